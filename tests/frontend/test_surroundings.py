"""Health, reflection through a client that is not ours, and garbage on every port."""

import asyncio
import dataclasses
import json
import socket
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.frontend.server import FrontendServer
from octavo.runtime.transport.endpoints import EndpointError
from octavo.testbed.grpc_calls import collect
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.v1 import generation_pb2 as pb
from octavo.wire.codec import encode
from octavo.wire.requests import Unregistered

BUF = Path(sys.executable).with_name("buf")
SERVICE = "octavo.v1.GenerationService"


async def health(channel: grpc.aio.Channel, service: str) -> str:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


async def becomes(channel: grpc.aio.Channel, status: str) -> None:
    async with asyncio.timeout(60):
        while await health(channel, SERVICE) != status:
            await asyncio.sleep(0.01)


async def test_health_follows_scheduler_and_workers(fake_scheduler: FakeScheduler, channel: grpc.aio.Channel) -> None:
    assert await health(channel, "") == "SERVING"
    assert await health(channel, SERVICE) == "NOT_SERVING"
    fake_scheduler.replicas = 0
    async with fake_scheduler.serving():
        await fake_scheduler.set_replicas(1)
        await becomes(channel, "SERVING")
        await fake_scheduler.set_replicas(0)
        await becomes(channel, "NOT_SERVING")
        await fake_scheduler.set_replicas(1)
        await becomes(channel, "SERVING")
    await becomes(channel, "NOT_SERVING")
    assert await health(channel, "") == "SERVING"


async def curl(*arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *(str(BUF), "curl", "--protocol", "grpc", "--http2-prior-knowledge", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, errors.decode()
    return output.decode()


@pytest.mark.parametrize("protocol", ["grpc-v1", "grpc-v1alpha"])
async def test_a_foreign_client_finds_and_calls_everything(
    scheduler: FakeScheduler, frontend: FrontendServer, protocol: str
) -> None:
    url = f"http://127.0.0.1:{frontend.port}"
    methods = await curl("--reflect-protocol", protocol, "--list-methods", url)
    assert {f"{SERVICE}/{name}" for name in ("Generate", "Abort", "Tokenize", "ListModels")} <= set(methods.split())
    assert "grpc.health.v1.Health/Check" in methods
    data = json.dumps({"text": "hi", "stopping": {"maxNewTokens": 3}})
    answer = await curl("--reflect-protocol", protocol, "-d", data, f"{url}/{SERVICE}/Generate")
    assert '"finished"' in answer
    assert '"completionTokens": 3' in answer.replace('":3', '": 3')


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 4096, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 4096]
)
async def test_garbage_on_the_public_port(
    scheduler: FakeScheduler, frontend: FrontendServer, stub: Any, garbage: bytes
) -> None:
    with socket.create_connection(("127.0.0.1", frontend.port)) as connection:
        connection.sendall(garbage)
        assert len(await collect(stub.Generate(pb.GenerateRequest(text="x", stopping={"max_new_tokens": 1})))) == 4


@pytest.mark.parametrize(
    "frames",
    [
        (b"",),
        (b"\xff" * 100,),
        (b"\x93\xa6Deltas\x01\x02",),
        (b"\xd9\xff",),
        (encode(Unregistered(epoch=1)), b"more"),
        (b"\x91" * 100_000,),
    ],
)
async def test_garbage_from_the_scheduler(
    scheduler: FakeScheduler,
    frontend: FrontendServer,
    stub: Any,
    eventually: Any,
    frames: tuple[bytes, ...],
    caplog: Any,
) -> None:
    await eventually(lambda: frontend.generation.ready)
    await scheduler.send_raw(*frames)
    await eventually(lambda: "dropped a malformed message" in caplog.text)
    assert await collect(stub.Generate(pb.GenerateRequest(text="x", stopping={"max_new_tokens": 1})))


async def test_two_frontends_cannot_share_a_port(frontend: FrontendServer, config: Any) -> None:
    with pytest.raises(EndpointError, match="cannot listen on 127"):
        FrontendServer(dataclasses.replace(config, listen=f"127.0.0.1:{frontend.port}"))
