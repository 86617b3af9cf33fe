"""What a refused call costs the frontend's process: `python -m octavo.bench.refusals`.

By the process's CPU time, over gRPC and over HTTP: of calls without a key, of calls that find the server full, and of
calls that are answered, for comparison. The clients are another process.
"""

import asyncio
import dataclasses
import http.client
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, cast

import grpc

from octavo.frontend.config import FrontendConfig
from octavo.frontend.server import FrontendServer
from octavo.testing.fake_scheduler import FakeScheduler
from octavo.testing.frontends import running_frontend
from octavo.testing.keys import bearer, write_keys
from octavo.testing.tiny_model import VOCAB_SIZE, write_byte_model
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as services
from octavo.wire.model_directory import fingerprint
from octavo.wire.steps import ModelInfo

_CALLS: Final = 500
_MAX_MODEL_LEN: Final = 4096
# 16 KiB, as prompts with some context are.
_TEXT: Final = "All work and no play. " * 744


def main() -> None:
    """Prints a table, or is the client of the process that does."""
    if len(sys.argv) > 1:
        door, port, authorization = sys.argv[1:]
        _DOORS[door](int(port), authorization)
    else:
        asyncio.run(_measure())


async def _measure() -> None:
    async with _serving() as (server, scheduler):
        await _print(server, "without a key", "")
        await _print(server, "answered", bearer("alice"))
        scheduler.pace_s = 3600.0
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            held = services.GenerationServiceStub(channel).Generate(
                pb.GenerateRequest(text="x"), metadata=(("authorization", bearer("gateway")),)
            )
            while not server.generation.num_running:
                await asyncio.sleep(0.01)
            await _print(server, "full", bearer("alice"))
            held.cancel()


@asynccontextmanager
async def _serving() -> AsyncIterator[tuple[FrontendServer, FakeScheduler]]:
    """A frontend with keys that is full with one request."""
    with tempfile.TemporaryDirectory(prefix="octavo-") as name:
        directory = Path(name)
        write_byte_model(directory / "model", _MAX_MODEL_LEN * 8)
        config = FrontendConfig(
            directory / "model", "byte-model", "127.0.0.1:0", f"ipc://{directory}/frontends.sock", max_requests=1
        )
        config = dataclasses.replace(
            config, http_listen="127.0.0.1:0", api_keys=write_keys(directory / "keys.json"), text_processes=1
        )
        model = ModelInfo("byte-model", fingerprint(config.model_directory), "float32", VOCAB_SIZE, _MAX_MODEL_LEN * 8)
        async with (
            FakeScheduler(config.scheduler_endpoint, model).serving() as scheduler,
            running_frontend(config) as (server, _),
        ):
            yield server, scheduler


async def _print(server: FrontendServer, kind: str, authorization: str) -> None:
    for door, port in (("grpc", server.port), ("http", server.http_port)):
        client = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "octavo.bench.refusals", door, str(port), authorization),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert client.stdin is not None
        assert client.stdout is not None
        # It has made a call, and waits for a word to make the others.
        outcome = (await client.stdout.readline()).decode().strip()
        idle = await _cpu_s_per_s(asyncio.sleep(2))
        began = time.monotonic()
        client.stdin.write(b"\n")
        busy = await _cpu_s_per_s(client.stdout.readline())
        micros = (busy - idle) * (time.monotonic() - began) / _CALLS * 1e6
        await client.communicate()
        print(f"{door:5} {kind:15} {outcome:40} {micros:7.0f} us of CPU", flush=True)


async def _cpu_s_per_s(awaited: Awaitable[object]) -> float:
    """What the process uses until then, per second."""
    began, used = time.monotonic(), time.process_time()
    await awaited
    return (time.process_time() - used) / (time.monotonic() - began)


def _over_grpc(port: int, authorization: str) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = services.GenerationServiceStub(channel)
        request = pb.GenerateRequest(text=_TEXT, stopping=pb.StoppingCriteria(max_new_tokens=1))

        def call() -> str:
            try:
                list(stub.Generate(request, metadata=(("authorization", authorization),)))
            except grpc.RpcError as error:
                return str(cast(grpc.Call, error).code())
            return "OK"

        _repeat(call)


def _over_http(port: int, authorization: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    body = json.dumps({"prompt": _TEXT, "max_tokens": 1})
    headers = {"content-type": "application/json", "authorization": authorization}

    def call() -> str:
        connection.request("POST", "/v1/completions", body, headers)
        answer = connection.getresponse()
        answer.read()
        return str(answer.status)

    _repeat(call)


def _repeat(call: Callable[[], str]) -> None:
    outcome = call()
    print(outcome, flush=True)
    sys.stdin.readline()
    outcomes = {call() for _ in range(_CALLS)}
    assert outcomes == {outcome}
    print("done", flush=True)


_DOORS: Final = {"grpc": _over_grpc, "http": _over_http}

if __name__ == "__main__":
    main()
