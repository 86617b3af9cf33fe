"""Bodies as they come in over connections: few bytes are held of many, and none before a key was seen."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from octavo.frontend.access.access import Access, Bounds, read_api_keys
from octavo.frontend.config import FrontendConfig
from octavo.frontend.errors import ServiceError
from octavo.frontend.http.bodies import Bodies, BodyBound
from octavo.frontend.http.connection import read_body
from octavo.frontend.http.errors import error_response
from octavo.frontend.http.guards import AccessMiddleware
from octavo.frontend.http.server import HttpServer
from octavo.testbed.credentials import write_keys

WHOLE: Final = 1 << 20
ALMOST: Final = WHOLE - 1
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def echo(request: Request) -> Response:
    try:
        return PlainTextResponse(str(len(await read_body(request))))
    except ServiceError as error:
        return error_response(error, request.scope)


@asynccontextmanager
async def serving(config: FrontendConfig, bodies: Bodies, access: Access | None = None) -> AsyncIterator[HttpServer]:
    app = AccessMiddleware(
        BodyBound(Starlette(routes=[Route("/", echo, methods=["POST"])]), bodies), access or Access()
    )
    server = HttpServer(app, dataclasses.replace(config, http_listen="127.0.0.1:0"))
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def send(server: HttpServer, size: int, stack: AsyncExitStack) -> Streams:
    """Of a body of `WHOLE` bytes so many."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    stack.callback(lambda: writer.transport.abort())
    writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % WHOLE + b"x" * size)
    await writer.drain()
    return reader, writer


async def status_of(streams: Streams) -> int:
    head = await asyncio.wait_for(streams[0].readuntil(b"\r\n\r\n"), 60)
    return int(head.split()[1])


async def test_the_oldest_of_many_unfinished_bodies_are_told_to_come_again(config: FrontendConfig) -> None:
    bodies = Bodies(max_unfinished=4 * WHOLE)
    async with serving(config, bodies) as server, AsyncExitStack() as stack:
        sent = []
        for _ in range(12):
            sent.append(await send(server, ALMOST, stack))
            async with asyncio.timeout(60):
                while bodies.held < min(len(sent), 4) * ALMOST:
                    await asyncio.sleep(0.001)
            assert bodies.held <= 4 * WHOLE
        # They need not send anything more to be told so.
        assert {await status_of(streams) for streams in sent[:8]} == {429}
        # One that sends without a pause is whole before it is the oldest.
        assert await status_of(await send(server, WHOLE, stack)) == 200
        for streams in sent[9:]:
            streams[1].write(b"x")
            assert await status_of(streams) == 200
        async with asyncio.timeout(60):
            while bodies.held:
                await asyncio.sleep(0.001)


async def test_without_a_key_no_byte_is_read(config: FrontendConfig, tmp_path: Path) -> None:
    bodies = Bodies()
    access = Access(read_api_keys(write_keys(tmp_path / "keys.json"), Bounds()))
    async with serving(config, bodies, access) as server, AsyncExitStack() as stack:
        for size in (0, 1000, ALMOST):
            assert await status_of(await send(server, size, stack)) == 401
            assert bodies.held == 0
        [*kept] = (len(connection.cycle.body) for connection in server.connections)
        assert set(kept) == {0}


async def test_who_leaves_is_not_counted_any_more(config: FrontendConfig) -> None:
    bodies = Bodies()
    async with serving(config, bodies) as server, AsyncExitStack() as stack:
        _, writer = await send(server, ALMOST, stack)
        async with asyncio.timeout(60):
            while bodies.held < ALMOST:
                await asyncio.sleep(0.001)
            writer.transport.abort()
            while bodies.held:
                await asyncio.sleep(0.001)


@pytest.mark.parametrize("size", [0, 5])
async def test_a_small_body_passes(config: FrontendConfig, size: int) -> None:
    bodies = Bodies(max_unfinished=10)
    async with serving(config, bodies) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size + b"x" * size)
        assert await status_of((reader, writer)) == 200
        writer.close()
