"""Starts the servers that are measured side by side; each is ready once made, and answers one case at a time."""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import grpc

from octavo.bench.child import MeasuredChild
from octavo.bench.figures import Yardsticks
from octavo.bench.measurement import CpuMeter, Measurement, TokenTimes, measured, peak_memory
from octavo.bench.report import ALONE, OPENVINO, WHOLE
from octavo.bench.workloads import KV_CACHE_MEMORY, Case, CaseRequest
from octavo.testbed.stack import Stack
from octavo.v1 import admin_pb2, generation_pb2, generation_pb2_grpc


def run_whole(stack: Stack, case: Case) -> Measurement:
    """Sends all of the case's requests at once by gRPC from this machine, as users do, and measures what comes."""
    before = stack.load()
    meter = CpuMeter({"client": os.getpid(), **{name: process.pid for name, process in stack.processes.items()}})
    wall, streams = asyncio.run(_send_all(stack.address, case))
    cpu, load = meter.cpu_s(), stack.load()
    times, times_before = _times(load), _times(before)
    return measured(
        case,
        wall,
        streams,
        load.workers[0].steps - before.workers[0].steps,
        {stage: (times[stage] - times_before[stage]) / 1e6 for stage in times},
        cpu,
    )


async def _send_all(address: str, case: Case) -> tuple[float, list[TokenTimes]]:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        await channel.channel_ready()
        began = time.perf_counter()
        streams = await asyncio.gather(*(_receive(stub, job, began) for job in case.jobs))
        return time.perf_counter() - began, streams


async def _receive(stub: generation_pb2_grpc.GenerationServiceStub, job: CaseRequest, began: float) -> TokenTimes:
    stream = TokenTimes()
    async for event in stub.Generate(_request(job)):
        stream.arrived(len(event.delta.token_ids), time.perf_counter() - began)
    return stream


def _request(job: CaseRequest) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=job.prompt_token_ids),
        sampling=generation_pb2.SamplingParams(
            temperature=job.temperature, top_k=0, top_p=1.0, num_sequences=job.num_sequences, seed=1
        ),
        stopping=generation_pb2.StoppingCriteria(max_new_tokens=job.num_tokens, ignore_eos=True),
        response=generation_pb2.ResponseOptions(text=True, token_ids=True),
    )


def _times(load: admin_pb2.GetLoadResponse) -> dict[str, int]:
    times = load.workers[0].times
    return {"prepare": times.prepare_us, "model": times.model_us, "sample": times.sample_us}


class MeasuredSystem(Protocol):
    """Serves the model with `threads` threads of computing; it was ready after `start_s` seconds. For `memory` and
    `profile` see `octavo.bench.report.Runs`; what is not known is left out."""

    name: str
    threads: int
    start_s: float

    def run(self, case: Case) -> Measurement: ...
    def memory(self) -> dict[str, int]: ...
    def profile(self) -> dict[str, float]: ...


class ChildSystem:
    """Asks a server in a child process, which answers `run`, `memory` and `profile`."""

    def __init__(self, name: str, threads: int, child: MeasuredChild) -> None:
        self.name = name
        self.threads = threads
        self.start_s = child.start_s
        self._child = child

    def run(self, case: Case) -> Measurement:
        answer: dict[str, Any] = self._child.ask("run", case.to_json())
        return Measurement.from_json(answer)

    def memory(self) -> dict[str, int]:
        memory: dict[str, int] = self._child.ask("memory")
        return memory

    def profile(self) -> dict[str, float]:
        profile: dict[str, float] = self._child.ask("profile")
        return profile


class WholeSystem:
    """Runs scheduler, frontend and one worker, as `octavo serve` starts them, and a gRPC client."""

    def __init__(self, threads: int, stack: Stack) -> None:
        self.name = WHOLE
        self.threads = threads
        self._stack = stack
        began = time.perf_counter()
        stack.start_all()
        self.start_s = time.perf_counter() - began

    def run(self, case: Case) -> Measurement:
        return run_whole(self._stack, case)

    def memory(self) -> dict[str, int]:
        return {"peak": peak_memory(self._stack.processes["worker-0"].pid)}

    def profile(self) -> dict[str, float]:
        return {}


class Bench(ExitStack):
    """Starts what is measured, and stops it at the end of the `with` block; logs and sockets go with it."""

    def __init__(self, model: Path, dtype: str) -> None:
        super().__init__()
        self.model = model
        self._dtype = dtype
        self._directory = Path(self.enter_context(tempfile.TemporaryDirectory(prefix="octavo-")))

    def alone(self, threads: int, name: str = ALONE, **environment: str) -> ChildSystem:
        """Starts the worker alone in a process with `environment` besides this one's."""
        return ChildSystem(name, threads, self._octavo_child("alone", threads, **environment))

    def whole(self, threads: int) -> WholeSystem:
        environment = {
            "OCTAVO_DTYPE": self._dtype,
            "OCTAVO_THREADS": str(threads),
            "OCTAVO_KV_CACHE_MEMORY": str(KV_CACHE_MEMORY),
        }
        return WholeSystem(threads, self.enter_context(Stack(self.model, self._directory / f"w{threads}", environment)))

    def openvino(self, threads: int, python: Path) -> ChildSystem:
        """`python` is that of the environment that `make bench-peers` makes."""
        command = [python, Path(__file__).with_name("openvino_peer.py")]
        # The first start converts the model.
        self._child(command, threads).close()
        return ChildSystem(OPENVINO, threads, self._child(command, threads))

    def yardsticks(self, threads: int) -> "YardstickChild":
        return YardstickChild(threads, self._octavo_child("yardsticks", threads))

    def _octavo_child(self, module: str, threads: int, **environment: str) -> MeasuredChild:
        # It sees the modules that this process sees, however it came to.
        paths = os.pathsep.join(filter(None, sys.path))
        return self._child([sys.executable, "-m", f"octavo.bench.{module}"], threads, PYTHONPATH=paths, **environment)

    def _child(self, command: Sequence[str | Path], threads: int, **environment: str) -> MeasuredChild:
        log = self._directory / f"{Path(command[-1]).name}-{threads}.log"
        arguments = [*command, self.model, self._dtype, str(threads)]
        child = MeasuredChild(arguments, log, OMP_NUM_THREADS=str(threads), **environment)
        self.callback(child.close)
        return child


class YardstickChild:
    """Measures the machine with `threads` threads whenever asked."""

    def __init__(self, threads: int, child: MeasuredChild) -> None:
        self.threads = threads
        self._child = child

    def measure(self, layer_rows: list[int], head_rows: list[int]) -> Yardsticks:
        return Yardsticks.from_json(self._child.ask("measure", {"layers": layer_rows, "head": head_rows}))
