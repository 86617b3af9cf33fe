"""Runs all processes with a model of random weights, and a gRPC client that sends them a load."""

import asyncio
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import grpc
from grpc_health.v1 import health_pb2

from octavo.bench.gpu.machine import GpuMachine
from octavo.bench.gpu.served.loads import RequestBatch, warm_up_load, write_model
from octavo.bench.measurement import TokenTimes
from octavo.bench.workloads import CaseRequest
from octavo.testbed.stack import Stack
from octavo.v1 import generation_pb2, generation_pb2_grpc

Stub = generation_pb2_grpc.GenerationServiceStub


@dataclass(frozen=True)
class LoadResult:
    """Holds the wall time of a load, and the median time to the first token of its requests (0: answers came whole)."""

    wall_s: float
    num_output_tokens: int
    first_token_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_output_tokens / self.wall_s


@dataclass(frozen=True)
class Window:
    """Holds a while in which all of a load decoded: its length, its steps, and the microseconds of what they did."""

    wall_s: float
    steps: int
    prepare_us: int
    model_us: int
    sample_us: int

    @property
    def busy_us(self) -> int:
        """Returns the busy time of a GPU: what prepares a step there runs beside the step before."""
        return self.model_us + self.sample_us


class Service:
    """Runs scheduler, frontend and one worker; a service is ready and warm once made."""

    def __init__(self, stack: Stack, directory: Path, budget_s: Callable[[], float]) -> None:
        self.stack = stack
        self._directory = directory
        self._budget_s = budget_s

    @classmethod
    def start(cls, machine: GpuMachine, model: str, **environment: str) -> Self:
        """Raises `RuntimeError` with the end of its log if a process ends, or none is ready in the time left."""
        directory = Path(tempfile.mkdtemp(prefix="octavo-"))
        stack = Stack(write_model(model, directory), directory / "run", {**_environment(machine), **environment})
        service = cls(stack.__enter__(), directory, machine.budget.left)
        try:
            for command in ("scheduler", "frontend", "worker"):
                stack.start(command)
            service._wait_ready()
            service.run(warm_up_load())
        except BaseException:
            service.close()
            raise
        return service

    def close(self) -> None:
        self.stack.__exit__(None, None, None)
        shutil.rmtree(self._directory, ignore_errors=True)

    def run(self, load: RequestBatch, *, streamed: bool = False) -> LoadResult:
        """Sends all of the load's requests at once. Raises `RuntimeError` if one got fewer tokens than it wanted."""
        wall_s, streams = asyncio.run(self._run(load, streamed))
        for job, stream in zip(load.jobs, streams, strict=True):
            if stream.num_tokens != job.num_tokens:
                raise RuntimeError(f"{stream.num_tokens} tokens came where {job.num_tokens} were asked for")
        firsts = sorted(stream.first for stream in streams)
        return LoadResult(wall_s, load.num_output_tokens, firsts[len(firsts) // 2] if streamed else 0.0)

    def decode_window(self, load: RequestBatch) -> Window:
        """Measures from when every request of the load has its first token until most have four fifths of theirs."""
        return asyncio.run(self._decode_window(load))

    def log(self) -> str:
        return self.stack.log("worker")

    async def _run(self, load: RequestBatch, streamed: bool) -> tuple[float, list[TokenTimes]]:
        streams = [TokenTimes() for _ in load.jobs]
        async with grpc.aio.insecure_channel(self.stack.address) as channel:
            await channel.channel_ready()
            began = time.perf_counter()
            await self._receive_all(Stub(channel), load, streams, began, streamed)
            return time.perf_counter() - began, streams

    async def _receive_all(
        self, stub: Stub, load: RequestBatch, streams: list[TokenTimes], began: float, streamed: bool
    ) -> None:
        timeout = max(1.0, self._budget_s())
        await asyncio.gather(
            *(
                _receive(stub, _request(job, streamed), stream, began, timeout)
                for job, stream in zip(load.jobs, streams, strict=True)
            )
        )

    async def _decode_window(self, load: RequestBatch) -> Window:
        streams = [TokenTimes() for _ in load.jobs]
        wanted = load.jobs[0].num_tokens
        async with grpc.aio.insecure_channel(self.stack.address) as channel:
            received = asyncio.create_task(
                self._receive_all(Stub(channel), load, streams, time.perf_counter(), streamed=True)
            )
            await _until(received, lambda: min(stream.num_tokens for stream in streams) >= 1)
            before, began = await asyncio.to_thread(self._times), time.perf_counter()
            await _until(received, lambda: max(stream.num_tokens for stream in streams) >= 0.8 * wanted)
            after, ended = await asyncio.to_thread(self._times), time.perf_counter()
            await received
        return Window(ended - began, *(b - a for a, b in zip(before, after, strict=True)))

    def _times(self) -> tuple[int, int, int, int]:
        """Returns the steps, and the microseconds of all of them."""
        worker = self.stack.load().workers[0]
        return worker.steps, worker.times.prepare_us, worker.times.model_us, worker.times.sample_us

    def _wait_ready(self) -> None:
        while self.stack.health() != health_pb2.HealthCheckResponse.SERVING:
            for name, process in self.stack.processes.items():
                if process.poll() is not None:
                    raise RuntimeError(f"{name} ended with status {process.returncode}: {self.stack.log(name)[-2000:]}")
            if self._budget_s() <= 0:
                raise RuntimeError(f"not ready in the time that was left: {self.log()[-2000:]}")
            time.sleep(0.1)


def _environment(machine: GpuMachine) -> dict[str, str]:
    """Returns the environment of every process, which has the module path of this process."""
    settings = {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OCTAVO_LOAD_FORMAT": "dummy",
        "OCTAVO_DEVICE": machine.device.type,
        "OCTAVO_MAX_MODEL_LEN": "4096",
        "OCTAVO_MAX_NUM_SEQS": "256",
    }
    if machine.device.type == "cuda":
        settings |= {"OCTAVO_DTYPE": "bfloat16", "OCTAVO_MAX_NUM_BATCHED_TOKENS": "8192"}
    return settings


async def _until(received: "asyncio.Task[None]", condition: Callable[[], bool]) -> None:
    """Polls until the condition holds; raises what receiving raises."""
    while not condition():
        if received.done():
            received.result()
            raise RuntimeError("all requests had ended before they were looked at")
        await asyncio.sleep(0.002)


async def _receive(
    stub: Stub, request: generation_pb2.GenerateRequest, stream: TokenTimes, began: float, timeout: float
) -> None:
    async for event in stub.Generate(request, timeout=timeout):
        stream.arrived(len(event.delta.token_ids), time.perf_counter() - began)


def _request(job: CaseRequest, streamed: bool) -> generation_pb2.GenerateRequest:
    """Makes a greedy request for exactly `job.num_tokens` tokens, as text and ids; the answer comes in one piece unless
    `streamed`."""
    return generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=job.prompt_token_ids),
        sampling=generation_pb2.SamplingParams(temperature=0, top_k=0, top_p=1.0),
        stopping=generation_pb2.StoppingCriteria(max_new_tokens=job.num_tokens, ignore_eos=True),
        response=generation_pb2.ResponseOptions(text=True, token_ids=True, incremental=streamed),
    )
