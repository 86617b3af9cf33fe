"""Starts the servers that are measured side by side; each is ready once made, and answers one case at a time."""

import asyncio
import json
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
from octavo.bench.figures import LinearShapes, Yardsticks
from octavo.bench.formats import Format, file_bytes
from octavo.bench.measurement import CpuMeter, Measurement, TokenTimes, measured, peak_memory
from octavo.bench.workloads import KV_CACHE_MEMORY, Case, CaseRequest
from octavo.kernels.native.library import VARIANT_VARIABLE
from octavo.runtime.models.directory import resolve_model
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
    """Serves the model with `threads` threads of computing; it was ready after `start_s` seconds. For `about`, `memory`
    and `profile` see `octavo.bench.report.Runs`; what is not known is left out."""

    threads: int
    start_s: float
    about: str

    def run(self, case: Case) -> Measurement: ...
    def memory(self) -> dict[str, int]: ...
    def profile(self) -> dict[str, float]: ...


class ChildSystem:
    """Asks a server in a child process, which answers `about`, `run`, `memory` and `profile`."""

    def __init__(self, threads: int, child: MeasuredChild) -> None:
        self.threads = threads
        self.start_s = child.start_s
        self.about: str = child.ask("about")
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
    """Runs scheduler, frontend and one worker, as `octavo serve` starts them but for what `about` says, and a gRPC
    client."""

    def __init__(self, threads: int, stack: Stack) -> None:
        self.threads = threads
        self.about = "--speculation off, for the worker alone guesses no tokens either"
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
    """Starts what is measured, and stops it at the end of the `with` block; logs and sockets go with it.

    `peers` is the Python of the environment that `make bench-peers` makes. `held_to` names the one instruction set that
    Octavo's kernels and llama.cpp may use, "" the best for each.
    """

    def __init__(self, model: Path, peers: Path | None = None, held_to: str = "") -> None:
        super().__init__()
        self.model = model
        self._peers = peers
        self._held_to = held_to
        self._files: dict[str, Path] = {}
        self._num_children = 0
        self._directory = Path(self.enter_context(tempfile.TemporaryDirectory(prefix="octavo-")))

    def alone(self, threads: int, form: Format, **environment: str) -> ChildSystem:
        """Starts the worker alone in a process with `environment` besides this one's."""
        model, settings = self._served(form)
        held = self._instructions() | environment
        return ChildSystem(threads, self._octavo_child("alone", model, json.dumps(settings), threads, **held))

    def whole(self, threads: int, form: Format) -> WholeSystem:
        model, settings = self._served(form)
        environment = {
            **{f"OCTAVO_{name.upper()}": value for name, value in settings.items()},
            "OCTAVO_THREADS": str(threads),
            "OCTAVO_KV_CACHE_MEMORY": str(KV_CACHE_MEMORY),
            # The worker alone has no drafts: with them the two would not do the same work, for a small model repeats
            # itself and is guessed right.
            "OCTAVO_SPECULATION": "off",
            **self._instructions(),
        }
        directory = self._directory / f"w{threads}-{form.name.replace('/', '-')}"
        return WholeSystem(threads, self.enter_context(Stack(model, directory, environment)))

    def openvino(self, threads: int, kind: str) -> ChildSystem:
        return ChildSystem(threads, self._peer("openvino_peer.py", kind, threads))

    def llama_cpp(self, threads: int, kind: str) -> ChildSystem:
        """Starts llama.cpp as it was built for this machine, or with the part of it that was built for `held_to`."""
        held: dict[str, str] = {}
        if self._held_to and self._peers is not None:
            held["LD_LIBRARY_PATH"] = str(self._peers.parent.parent / "llama.cpp" / self._held_to / "bin")
        return ChildSystem(threads, self._peer("llama_cpp_peer.py", kind, threads, **held))

    def gguf_file(self, form: Format) -> Path:
        """Returns the model in this format as a file that llama.cpp has made."""
        if form.gguf not in self._files:
            child = self._peer("llama_cpp_peer.py", form.gguf, 1)
            self._files[form.gguf] = Path(child.ask("file"))
            child.close()
        return self._files[form.gguf]

    def weight_bytes(self, form: Format) -> int:
        """Counts the bytes of weights that every step reads."""
        if form.is_quantized and self._peers is not None:
            return file_bytes(self.gguf_file(form))
        return form.weight_bytes(LinearShapes.read(self.model))

    def yardsticks(self, threads: int, form: Format) -> "YardstickChild":
        """Measures torch in the dtype of `form`, or in bf16 if that is quantised."""
        dtype = "float32" if form.name == "fp32" else "bfloat16"
        return YardstickChild(threads, self._octavo_child("yardsticks", self.model, dtype, threads))

    def _served(self, form: Format) -> tuple[Path, dict[str, str]]:
        """Returns what a worker is to load, and its settings: of quantised weights the file that llama.cpp reads too,
        where there is one. Raises `ValueError` where nothing makes the format."""
        settings = dict(form.settings or {})
        if form.is_quantized and self._peers is not None:
            settings.pop("quantization", None)
            return resolve_model(str(self.gguf_file(form))), settings
        if form.is_quantized and "quantization" not in settings:
            raise ValueError(f"{form.name} is a GGUF file's alone, which llama.cpp makes: run make bench-peers")
        return self.model, settings

    def _instructions(self) -> dict[str, str]:
        return {VARIANT_VARIABLE: self._held_to} if self._held_to else {}

    def _octavo_child(self, module: str, model: Path, what: str, threads: int, **environment: str) -> MeasuredChild:
        # It sees the modules that this process sees, however it came to.
        paths = os.pathsep.join(filter(None, sys.path))
        command: list[str | Path] = [sys.executable, "-m", f"octavo.bench.{module}", model, what]
        return self._child(command, threads, PYTHONPATH=paths, **environment)

    def _peer(self, script: str, kind: str, threads: int, **environment: str) -> MeasuredChild:
        if self._peers is None:
            raise ValueError("peers run in an environment of their own: run make bench-peers")
        command: list[str | Path] = [self._peers, Path(__file__).with_name(script), self.model, kind]
        return self._child(command, threads, **environment)

    def _child(self, command: Sequence[str | Path], threads: int, **environment: str) -> MeasuredChild:
        self._num_children += 1
        log = self._directory / f"{self._num_children}.log"
        child = MeasuredChild([*command, str(threads)], log, OMP_NUM_THREADS=str(threads), **environment)
        self.callback(child.close)
        return child


class YardstickChild:
    """Measures the machine with `threads` threads whenever asked."""

    def __init__(self, threads: int, child: MeasuredChild) -> None:
        self.threads = threads
        self._child = child

    def measure(self, layer_rows: list[int], head_rows: list[int]) -> Yardsticks:
        return Yardsticks.from_json(self._child.ask("measure", {"layers": layer_rows, "head": head_rows}))
