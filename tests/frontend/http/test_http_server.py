"""The HTTP port against clients that are slow, large, rude or gone, byte by byte."""

import asyncio
import dataclasses
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from octavo.frontend.access.connections import ConnectionBook
from octavo.frontend.config import FrontendConfig
from octavo.frontend.errors import ServiceError
from octavo.frontend.http import protocol as http_protocol
from octavo.frontend.http import server as http_server
from octavo.frontend.http.connection import ClientGone, read_body
from octavo.frontend.http.errors import error_response
from octavo.frontend.http.server import Acceptor, HttpServer
from octavo.runtime.transport.endpoints import EndpointError

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def echo(request: Request) -> Response:
    try:
        return PlainTextResponse(str(len(await read_body(request))))
    except ServiceError as error:
        return error_response(error, request.scope)
    except ClientGone:
        return Response(status_code=499)


@pytest.fixture
def config(config: FrontendConfig) -> FrontendConfig:
    return dataclasses.replace(config, http_listen="127.0.0.1:0")


@asynccontextmanager
async def serving(config: FrontendConfig) -> AsyncIterator[HttpServer]:
    server = HttpServer(Starlette(routes=[Route("/", echo, methods=["GET", "POST"])]), config)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@pytest.fixture
async def connect(config: FrontendConfig) -> AsyncIterator[Callable[[], Any]]:
    opened: list[asyncio.StreamWriter] = []
    async with serving(config) as server:

        async def connect() -> Streams:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            opened.append(writer)
            return reader, writer

        yield connect
        for writer in opened:
            writer.transport.abort()


async def response_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the next response."""
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)).decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return int(head[0].split()[1]), headers, body


def post(size: int) -> bytes:
    return b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size


async def test_a_connection_serves_one_request_after_another(connect: Any) -> None:
    reader, writer = await connect()
    for size in (0, 5, 100_000):
        writer.write(post(size) + b"x" * size)
        status, headers, body = await response_of(reader)
        assert (status, int(body)) == (200, size)
        assert "server" not in headers
        assert headers["x-request-id"]


async def test_small_pieces_are_sent_at_once(config: FrontendConfig) -> None:
    async with serving(config) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        while not server.connections:
            await asyncio.sleep(0)
        [accepted] = [c.transport.get_extra_info("socket") for c in server.connections]
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()


async def test_requests_may_be_sent_ahead(connect: Any) -> None:
    reader, writer = await connect()
    writer.write(b"".join(post(size) + b"x" * size for size in (1, 2, 3)))
    assert [int((await response_of(reader))[2]) for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize(("size", "status"), [(4 << 20, 200), ((4 << 20) + 1, 413)])
async def test_the_size_of_a_body_that_is_announced(connect: Any, size: int, status: int) -> None:
    reader, writer = await connect()
    writer.write(post(size) + b"x" * size)
    found, _, body = await response_of(reader)
    assert found == status
    if status == 413:
        assert json.loads(body)["error"]["code"] == "too_large"


async def test_a_body_that_is_too_large_is_refused_before_it_has_come(connect: Any) -> None:
    reader, writer = await connect()
    writer.write(post(1 << 40))
    assert (await response_of(reader))[0] == 413


async def test_the_size_of_a_body_in_chunks(connect: Any) -> None:
    reader, writer = await connect()
    writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
    for _ in range(65):
        writer.write(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
    assert (await response_of(reader))[0] == 413


async def test_after_a_refused_body_the_connection_goes_on(connect: Any) -> None:
    reader, writer = await connect()
    writer.write(post((4 << 20) + 1) + b"x" * ((4 << 20) + 1) + post(3) + b"xxx")
    assert (await response_of(reader))[0] == 413
    assert (await response_of(reader))[0] == 200


@pytest.mark.parametrize(("size", "status"), [(30 << 10, 200), (33 << 10, 431), (200 << 10, 431), (1 << 20, 431)])
async def test_the_size_of_headers(connect: Any, size: int, status: int) -> None:
    reader, writer = await connect()
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nx-large: " + b"y" * size + b"\r\n\r\n")
    found, _, body = await response_of(reader)
    assert found == status
    if status == 431:
        assert "error" in json.loads(body)


@pytest.mark.parametrize("rubbish", [b"rubbish\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/1.1\r\n\r\n"])
async def test_what_is_no_http(connect: Any, rubbish: bytes) -> None:
    reader, writer = await connect()
    writer.write(rubbish + b"\r\n\r\n")
    status, headers, body = await response_of(reader)
    assert (status, headers["connection"]) == (400, "close")
    assert "error" in json.loads(body)
    assert await reader.read() == b""


@pytest.mark.parametrize(
    "head",
    [
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n",
        b"POST / HTTP/1.0\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n",
    ],
)
async def test_a_body_whose_end_can_be_read_in_two_ways_ends_the_connection(connect: Any, head: bytes) -> None:
    reader, writer = await connect()
    # What a proxy before this server may take for a body, and this for the next request.
    writer.write(head + b"0\r\n\r\n" + post(1) + b"x")
    status, headers, body = await response_of(reader)
    assert (status, headers["connection"]) == (400, "close")
    assert "error" in json.loads(body)
    assert await reader.read() == b""


async def test_a_websocket_is_not_to_be_had(connect: Any) -> None:
    reader, writer = await connect()
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
    assert (await response_of(reader))[0] == 200


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "REQUEST_S", 0.15)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("sent", [b"", b"POST / HT", b"POST / HTTP/1.1\r\nhost: x\r\n", post(5), post(5) + b"xx"])
async def test_a_request_that_does_not_arrive_in_time_is_cut_off(connect: Any, sent: bytes) -> None:
    reader, writer = await connect()
    writer.write(sent)
    # A byte now and then does not buy more time.
    dripping = asyncio.create_task(drip(writer)) if b"\r\n\r\n" not in sent else None
    ended = await asyncio.wait_for(asyncio.gather(reader.read(), return_exceptions=True), 60)
    assert ended[0] == b"" or isinstance(ended[0], ConnectionError)
    if dripping:
        dripping.cancel()


async def drip(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"x")
        await asyncio.sleep(0.02)


async def outlives_a_pause(streams: Streams, seconds: float) -> bool:
    """Whether a second request is answered so long after the first."""
    reader, writer = streams
    try:
        for _ in range(2):
            writer.write(post(1) + b"x")
            assert (await response_of(reader))[0] == 200
            await asyncio.sleep(seconds)
    except (asyncio.IncompleteReadError, ConnectionError):
        return False
    return True


async def test_a_connection_may_be_idle_between_requests(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine a request itself may take longer than is allowed here first.
    for seconds in (0.15, 1.5, 15.0):
        monkeypatch.setattr(http_protocol, "REQUEST_S", seconds)
        if await outlives_a_pause(await connect(), 2 * seconds):
            return
    pytest.fail("an idle connection was cut off")


async def test_it_listens_on_a_unix_socket_that_was_left_behind(config: FrontendConfig, tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    async with serving(dataclasses.replace(config, http_listen=f"unix:{path}")) as server:
        assert server.port == 0
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(post(2) + b"xx")
        assert (await response_of(reader))[2] == b"2"
        writer.close()


@pytest.mark.parametrize(
    "listen", ["nonsense", "127.0.0.1:http", "127.0.0.1:70000", "unix:/nowhere/at/all", "unix:/etc"]
)
def test_an_address_that_cannot_be_had(config: FrontendConfig, listen: str) -> None:
    with pytest.raises(EndpointError, match="choose another address"):
        HttpServer(Starlette(), dataclasses.replace(config, http_listen=listen))


async def test_an_address_that_is_taken(config: FrontendConfig) -> None:
    async with serving(config) as server:
        with pytest.raises(EndpointError, match="choose another address"):
            HttpServer(Starlette(), dataclasses.replace(config, http_listen=f"127.0.0.1:{server.port}"))


async def test_a_server_that_was_never_started_can_be_stopped(config: FrontendConfig) -> None:
    await HttpServer(Starlette(), config).stop()


class Slow:
    """A server whose only handler answers when it is let, and notes how it ends."""

    def __init__(self, config: FrontendConfig) -> None:
        self.has_come, self.may_answer, self.cut_off = asyncio.Event(), asyncio.Event(), False
        self.server = HttpServer(Starlette(routes=[Route("/", self._answer)]), config)

    async def _answer(self, request: Request) -> Response:
        self.has_come.set()
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.cut_off = True
            raise
        return PlainTextResponse("there")

    async def asked(self) -> Streams:
        """The connection over which an answer is due."""
        await self.server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.wait_for(self.has_come.wait(), 60)
        return reader, writer


async def test_a_stop_closes_idle_connections_and_waits_for_answers(
    config: FrontendConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "_STOP_GRACE_S", 60)
    slow = Slow(config)
    reader, writer = await slow.asked()
    idle, idle_writer = await asyncio.open_connection("127.0.0.1", slow.server.port)
    while len(slow.server.connections) < 2:
        await asyncio.sleep(0)
    stopping = asyncio.create_task(slow.server.stop())
    assert await asyncio.wait_for(idle.read(), 60) == b""
    assert not stopping.done()
    slow.may_answer.set()
    assert (await response_of(reader))[2] == b"there"
    await asyncio.wait_for(stopping, 60)
    assert not slow.server.connections
    assert not slow.cut_off
    for each in (writer, idle_writer):
        each.close()


async def test_a_stop_cuts_off_what_outlasts_it(config: FrontendConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_STOP_GRACE_S", 0.02)
    slow = Slow(config)
    reader, writer = await slow.asked()
    await asyncio.wait_for(slow.server.stop(), 60)
    assert await asyncio.wait_for(reader.read(), 60) == b""
    assert slow.cut_off
    writer.close()


async def test_a_stopping_server_refuses_connections_at_once(
    config: FrontendConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "_STOP_GRACE_S", 60)
    slow = Slow(config)
    reader, writer = await slow.asked()
    stopping = asyncio.create_task(slow.server.stop())
    await asyncio.sleep(0)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", slow.server.port)
    slow.may_answer.set()
    assert (await response_of(reader))[2] == b"there"
    await asyncio.wait_for(stopping, 60)
    await slow.server.stop()
    writer.close()


async def test_a_connection_that_comes_in_the_moment_of_a_stop_is_closed() -> None:
    empty = asyncio.Event()
    book = ConnectionBook(2, empty.set)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        listener.setblocking(False)
        client.settimeout(60)
        acceptor = Acceptor(listener, book, lambda place: asyncio.Protocol(), None)
        acceptor.start()
        # Timers have their turn right after what has come: the connection is accepted, and its task has not begun.
        asyncio.get_running_loop().call_later(0, acceptor.close)
        await asyncio.wait_for(empty.wait(), 60)
        await acceptor.wait_closed()
        assert client.recv(1) == b""
        assert len(book) == 0
