"""Clients that open more connections than there may be: whoever else comes is served at once, through either API."""

import asyncio
import contextlib
import dataclasses
import resource
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.frontend.access.connections import allow_open_files, connections_that_fit
from octavo.frontend.config import FrontendConfig
from octavo.frontend.grpc.connections import TcpConnection, superfluous
from octavo.frontend.server import FrontendServer
from octavo.testbed.credentials import Pair, make_certificate
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.testing.frontends import running_frontend
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as services

MOST: Final = 16
# Loopback has many addresses: clients of one machine, who look as if they were of several.
GREEDY, OTHER = "127.0.0.1", "127.0.0.2"
# A channel with a connection of its own, which tries again soon.
ALONE: Final = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 500)]


@pytest.fixture
def config(config: FrontendConfig) -> FrontendConfig:
    return dataclasses.replace(config, http_listen="127.0.0.1:0", max_connections=MOST)


@pytest.fixture
async def opened() -> AsyncIterator[Callable[..., Any]]:
    """Opens a connection from an address; all end with the test."""
    writers: list[asyncio.StreamWriter] = []

    async def connect(port: int, host: str = GREEDY) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(host, 0))
        writers.append(writer)
        return reader, writer

    yield connect
    for writer in writers:
        writer.transport.abort()
    await asyncio.sleep(0)


async def livez(streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> int:
    reader, writer = streams
    writer.write(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
    await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split()[0]))
    return int(head.split()[1])


def is_closed(streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> bool:
    return streams[0].at_eof() or streams[0].exception() is not None


@pytest.mark.parametrize("first", ["silent", "idle", "half a request"])
async def test_idle_connections_of_http_keep_nobody_out(frontend: FrontendServer, opened: Any, first: str) -> None:
    port = frontend.http_port
    greedy = []
    for _ in range(2 * MOST):
        greedy.append(await opened(port))
        if first == "idle":
            assert await livez(greedy[-1]) == 200
        elif first == "half a request":
            greedy[-1][1].write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n\r\nxx")
    for _ in range(3):
        assert await livez(await opened(port, OTHER)) == 200
    # Its own last ones are served as well.
    assert await livez(await opened(port)) == 200
    async with asyncio.timeout(60):
        while sum(map(is_closed, greedy)) < 2 * MOST - MOST // 2:
            await asyncio.sleep(0.01)


async def test_a_running_stream_is_not_cut_for_newcomers(
    frontend: FrontendServer, scheduler: FakeScheduler, opened: Any, eventually: Any
) -> None:
    scheduler.hold_after = 1
    port, body = frontend.http_port, b'{"prompt": "x", "max_tokens": 3, "stream": true}'
    reader, writer = await opened(port)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
    writer.write(head + body)
    assert b"200" in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
    for _ in range(2 * MOST):
        assert await livez(await opened(port)) == 200
    assert frontend.generation.num_running == 1
    assert not is_closed((reader, writer))


async def test_tls_handshakes_that_do_not_end_keep_nobody_out(
    config: FrontendConfig, authority: Pair, opened: Any
) -> None:
    pair = make_certificate(authority, "localhost")
    tls = dataclasses.replace(config, tls_certificate=pair.certificate, tls_key=pair.key)
    async with running_frontend(tls) as (frontend, _):
        greedy = [await opened(frontend.http_port) for _ in range(2 * MOST)]
        context = ssl.create_default_context(cafile=str(authority.certificate))
        reader, writer = await asyncio.wait_for(
            asyncio.open_connection(
                "127.0.0.1", frontend.http_port, ssl=context, server_hostname="localhost", local_addr=(OTHER, 0)
            ),
            60,
        )
        assert await livez((reader, writer)) == 200
        writer.transport.abort()
        async with asyncio.timeout(60):
            while sum(map(is_closed, greedy)) < 2 * MOST - MOST // 2:
                await asyncio.sleep(0.01)


async def test_idle_connections_of_grpc_keep_nobody_out_and_no_call_is_cut(
    frontend: FrontendServer, scheduler: FakeScheduler, opened: Any, stub: Any
) -> None:
    scheduler.hold_after = 1
    running = stub.Generate(pb.GenerateRequest(text="x", stopping={"max_new_tokens": 3}))
    assert (await running.read()).HasField("started")
    async with contextlib.AsyncExitStack() as stack:
        # These answer pings, as long as they are let.
        greedy = [grpc.aio.insecure_channel(f"127.0.0.1:{frontend.port}", ALONE) for _ in range(MOST + MOST // 2)]
        for channel in greedy:
            await stack.enter_async_context(channel)
        async with asyncio.timeout(60):
            were_there = set[int]()
            while len(were_there) < MOST - 1:
                states = [channel.get_state(try_to_connect=True) for channel in greedy]
                were_there |= {i for i, state in enumerate(states) if state is grpc.ChannelConnectivity.READY}
                await asyncio.sleep(0.005)
            for _ in range(2):
                async with grpc.aio.insecure_channel(f"127.0.0.1:{frontend.port}", ALONE) as channel:
                    other: Any = services.GenerationServiceStub(channel)
                    assert (await other.ListModels(pb.ListModelsRequest(), wait_for_ready=True)).models
        assert frontend.generation.num_running == 1
        # Nor does HTTP suffer from it.
        assert await livez(await opened(frontend.http_port)) == 200
    running.cancel()


async def test_probes_have_connections_of_their_own(config: FrontendConfig, opened: Any, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/probes.sock"
    async with running_frontend(dataclasses.replace(config, health_address=address)) as (frontend, _):
        for port in (frontend.port, frontend.http_port):
            for _ in range(2 * MOST):
                with contextlib.suppress(OSError):
                    await opened(port)
        async with grpc.aio.insecure_channel(address) as channel:
            probe: Any = health_pb2_grpc.HealthStub(channel)
            assert (await probe.Check(health_pb2.HealthCheckRequest(), timeout=60)).status == 1


def connection(fd: int, host: str, silent_ms: int = 0) -> TcpConnection:
    return TcpConnection(fd, (host, fd), silent_ms)


def closed(connections: list[TcpConnection], busy: set[int], most: int) -> list[int]:
    peers = {each.peer for each in connections if each.fd in busy}
    return [each.fd for each in superfluous(connections, peers, most)]


def test_of_grpc_s_connections_those_of_the_largest_client_give_way() -> None:
    greedy = [connection(fd, "10.0.0.1", silent_ms=fd) for fd in range(12)]
    others = [connection(100 + i, f"10.0.1.{i}") for i in range(4)]
    # Half of 16 are left to it, and then as many as make room.
    assert closed(greedy + others, set(), 16) == [11, 10, 9, 8]
    assert closed(greedy + others, {11, 9, 0, 1, 2, 3}, 16) == [10, 8, 7, 6]
    assert closed(greedy[:8] + others[:2], set(), 16) == []
    # Where all are small, too.
    many = [connection(fd, f"10.0.{fd}.1") for fd in range(16)]
    assert len(closed(many, set(), 16)) == 4
    assert closed(many, set(range(16)), 16) == []


@pytest.fixture
def limits() -> Iterator[Callable[[int], None]]:
    """Sets the soft limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda number: resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_apis_share_the_files_that_a_process_may_open(limits: Callable[[int], None]) -> None:
    limits(1024)
    assert connections_that_fit(4096) == 256
    assert connections_that_fit(100) == 100
    allow_open_files(700)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 1912
    assert connections_that_fit(4096) == 700
