"""Runs campaigns in which clients leave: of their own accord, or because their process is killed."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from random import Random
from typing import Any, Final

import grpc

from octavo.chaos.client import JudgedClient
from octavo.chaos.system import SystemUnderLoad
from octavo.testbed.history import Came, Left
from octavo.testbed.stack import token_request
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as services

_NUM_TOKENS: Final = 1500
_STREAMS: Final = 200
_STREAMS_PER_PROCESS: Final = 25
# Of those that are patient and see to it that nobody else's stream suffers.
_STAYING: Final = 24
# Of the streams of a process that is to be killed.
_TIMEOUT_S: Final = 120.0


async def leave(system: SystemUnderLoad, count: int, streams: int = _STREAMS) -> dict[str, float]:
    """Begins `streams` streams at once, of which half are cancelled by their clients and half lose theirs to kill -9,
    while others go on; `count` times."""
    for _ in range(count):
        async with system.crowd(_STAYING):
            await leave_all(system, streams)
        await asyncio.to_thread(system.stack.wait_idle)
    return {"rounds": count, "left": count * streams}


async def leave_all(system: SystemUnderLoad, streams: int) -> None:
    """Begins `streams` streams and leaves them, half in each way."""
    processes = [await _start(system) for _ in range(streams // 2 // _STREAMS_PER_PROCESS)]
    cancelled = [asyncio.create_task(_cancel(system)) for _ in range(streams - len(processes) * _STREAMS_PER_PROCESS)]
    for process, names in processes:
        assert process.stdout is not None
        assert await process.stdout.readline(), "a process of clients has died"
        process.send_signal(signal.SIGKILL)
        now = time.monotonic()
        for name in names:
            system.witness(Left(now, name))
        await process.wait()
    await asyncio.gather(*cancelled)


async def _start(system: SystemUnderLoad) -> tuple[asyncio.subprocess.Process, list[str]]:
    first = system.name()
    names = [f"{first}-{number}" for number in range(_STREAMS_PER_PROCESS)]
    for name in names:
        system.witness(Came(time.monotonic(), name, None))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "octavo.chaos.departures", system.stack.address),
        *(first, str(_STREAMS_PER_PROCESS), str(_NUM_TOKENS)),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return process, names


async def _cancel(system: SystemUnderLoad) -> None:
    request = endless(system.random, system.name(), _NUM_TOKENS)
    await JudgedClient(system.stubs[0], system.witness, request, _after(system.random.randint(0, 30))).ask(None)


def _after(events: int) -> Callable[[pb.GenerateResponse], bool]:
    """Makes a client who has had enough after so many events."""
    remaining = iter(range(events))
    return lambda response: next(remaining, None) is None


def endless(random: Random, name: str, num_tokens: int) -> pb.GenerateRequest:
    """Makes a request that nobody waits out."""
    request = token_request(random.choices(range(250), k=random.randint(8, 30)), num_tokens, request_id=name)
    request.sampling.temperature = 1.0
    request.sampling.seed = random.getrandbits(32)
    request.sampling.num_sequences = random.choice((1, 1, 1, 2))
    return request


async def _read(stub: Any, request: pb.GenerateRequest, begun: asyncio.Semaphore) -> None:
    async for response in stub.Generate(request, timeout=_TIMEOUT_S):
        if response.HasField("delta"):
            begun.release()


async def _main(address: str, first: str, count: int, num_tokens: int) -> None:
    """Runs a process of clients that is to be killed: it asks for many streams, writes a line once all have begun, and
    reads until it dies."""
    random, begun = Random(first), [asyncio.Semaphore(0) for _ in range(count)]
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = services.GenerationServiceStub(channel)
        requests = [endless(random, f"{first}-{number}", num_tokens) for number in range(count)]
        streams = [asyncio.create_task(_read(stub, *each)) for each in zip(requests, begun, strict=True)]
        for each in begun:
            await each.acquire()
        print("begun", flush=True)
        await asyncio.gather(*streams)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
