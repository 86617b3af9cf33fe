"""What one request goes through: `python -m tests.house.request_path`.

A frontend and a scheduler run in this process, beside a worker of the fake model. Functions that one gRPC request
enters are counted by the interpreter's profiler; the kinds of object that a request lies in, by what
grows with the number of requests that run.
"""

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final

import grpc
import zmq

from octavo.frontend.config import FrontendConfig
from octavo.frontend.server import FrontendServer
from octavo.runtime.transport.sockets import bind_router
from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.core.scheduler import Scheduler
from octavo.scheduler.server.loop import SchedulerShell
from octavo.testbed.tiny_model import write_byte_model
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as services

from .tree import REPOSITORY

_SERVICES: Final = tuple(str(REPOSITORY / name / "octavo" / name) + "/" for name in ("frontend", "scheduler"))
# Ticks and renewals enter functions too, but not in every request's time.
_REQUESTS: Final = 16
_RUNNING: Final = 16
# The events that a client was sent, and what a call of gRPC has beside its request.
_OF_CALLS: Final = tuple(f"octavo.frontend.{name}." for name in ("request.events", "grpc", "stream.pacing"))
_TOKENS: Final = 4


@dataclass(frozen=True)
class RequestPath:
    """Holds what every one of some requests has entered, and the kinds of object that each running one had."""

    functions: Sequence[str]
    kinds: Sequence[str]
    files: Sequence[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "files", sorted({place.partition(":")[0] for place in self.functions}))


@contextlib.asynccontextmanager
async def _serving(directory: Path) -> AsyncIterator[tuple[FrontendServer, Any]]:
    """Yields a frontend and a stub of its service, with a scheduler and a worker behind it."""
    write_byte_model(directory / "model")
    frontends, workers = (f"ipc://{directory}/{name}.sock" for name in ("frontends", "workers"))
    with (
        zmq.Context() as context,
        bind_router(context, frontends) as frontend_socket,
        bind_router(context, workers) as worker_socket,
        _working(directory, workers),
    ):
        shell = asyncio.create_task(
            SchedulerShell(Scheduler(SchedulerConfig(), 1), frontend_socket, worker_socket).run()
        )
        config = FrontendConfig(
            model_directory=directory / "model",
            served_model_name="model",
            listen=f"unix:{directory}/frontend.sock",
            http_listen="",
            scheduler_endpoints=(frontends,),
            text_processes=1,
            drain_timeout_s=0.0,
        )
        try:
            async with (
                _running(FrontendServer(config)) as frontend,
                grpc.aio.insecure_channel(config.listen) as channel,
            ):
                yield frontend, services.GenerationServiceStub(channel)
        finally:
            shell.cancel()
            await asyncio.gather(shell, return_exceptions=True)


@contextlib.asynccontextmanager
async def _running(frontend: FrontendServer) -> AsyncIterator[FrontendServer]:
    stopping = asyncio.Event()
    serving = asyncio.create_task(frontend.serve(stopping))
    try:
        yield frontend
    finally:
        stopping.set()
        await serving


@contextlib.contextmanager
def _working(directory: Path, endpoint: str) -> Iterator[None]:
    """Runs a worker of the fake model in a process of its own inside the block."""
    command = [sys.executable, "-m", "octavo.cli.main", "worker", "--device", "fake", "--fake-step-ms", "3"]
    # Steps that take a while, so that no request ends before it is looked at.
    places = ["--drain-timeout", "0", "--model", str(directory / "model"), "--worker-endpoint", endpoint]
    environment = {**os.environ, "OCTAVO_RUNTIME_DIR": str(directory)}
    with (directory / "worker.log").open("wb") as log:
        worker = subprocess.Popen([*command, *places], env=environment, stdout=log, stderr=log)
    try:
        yield
    finally:
        worker.terminate()
        worker.wait()


async def _generate(stub: Any, tokens: int = _TOKENS) -> None:
    stopping = pb.StoppingCriteria(max_new_tokens=tokens, ignore_eos=True)
    async for _ in stub.Generate(pb.GenerateRequest(text="hello", stopping=stopping)):
        pass


async def _entered(stub: Any) -> set[str]:
    """Returns the functions of frontend and scheduler that one request enters, as FILE:LINE NAME."""
    found = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_SERVICES):
            path = Path(code.co_filename).relative_to(REPOSITORY)
            found.add(f"{path}:{code.co_firstlineno} {code.co_qualname}")

    sys.setprofile(note)
    try:
        await _generate(stub)
    finally:
        sys.setprofile(None)
    return found


def _instances() -> Counter[str]:
    gc.collect()
    kinds = (type(each) for each in gc.get_objects())
    return Counter(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds if _is_ours(kind))


def _is_ours(kind: type) -> bool:
    module = f"{kind.__module__}."
    return module.startswith("octavo.frontend.") and not module.startswith(_OF_CALLS)


async def _held(frontend: FrontendServer, stub: Any) -> set[str]:
    """Returns the kinds of object of the frontend of which each running request has at least one."""
    before = _instances()
    calls = [stub.Generate(_endless()) for _ in range(_RUNNING)]
    for call in calls:
        while (await call.read()).WhichOneof("event") != "delta":
            pass
    more = _instances() - before
    for call in calls:
        call.cancel()
    while frontend.generation.num_running:
        await asyncio.sleep(0.01)
    return {kind for kind, count in more.items() if count >= _RUNNING}


def _endless() -> pb.GenerateRequest:
    return pb.GenerateRequest(text="hello", stopping=pb.StoppingCriteria(max_new_tokens=1500, ignore_eos=True))


async def walk(directory: Path) -> RequestPath:
    """Runs requests, and returns what they go through."""
    async with _serving(directory) as (frontend, stub):
        while not frontend.generation.ready:
            await asyncio.sleep(0.01)
        await _generate(stub)
        entered = [await _entered(stub) for _ in range(_REQUESTS)]
        return RequestPath(sorted(set.intersection(*entered)), sorted(await _held(frontend, stub)))


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="octavo-") as name:
        path = asyncio.run(walk(Path(name)))
    print(f"kinds of object per frontend request: {len(path.kinds)}", *path.kinds, sep="\n  ")
    print(f"files entered by one gRPC request: {len(path.files)} ({len(path.functions)} functions)")
    by_file = Counter(place.partition(":")[0] for place in path.functions)
    print(*(f"{count:4} {name}" for name, count in sorted(by_file.items())), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
