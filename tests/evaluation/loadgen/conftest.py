"""An HTTP server in name only: it answers with the bytes that a test wrote."""

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import pytest

from octavo.loadgen.servers import ServerAddress


class ScriptedServer:
    """Attributes are knobs to be turned between calls and records to be read."""

    def __init__(self) -> None:
        self.models = reply(200, json.dumps({"data": [{"id": "m"}, {"id": "other"}]}))
        # For the calls to come; each connection serves one.
        self.replies: deque[bytes] = deque()
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.headers: dict[str, str] = {}
        self.target = ServerAddress("http", "")

    async def serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.strip().split("\r\n")
            self.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            self.paths.append(first.split()[1])
            if first.startswith("GET"):
                writer.write(self.models)
            else:
                self.bodies.append(json.loads(await reader.readexactly(int(self.headers["content-length"]))))
                writer.write(self.replies.popleft())
            await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def reply(status: int, body: str, kind: str = "application/json") -> bytes:
    """A whole answer."""
    content = body.encode()
    return b"HTTP/1.1 %d X\r\ncontent-type: %b\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (
        status,
        kind.encode(),
        len(content),
        content,
    )


def stream(*payloads: str) -> bytes:
    """An answer that ends where its connection does."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nconnection: close\r\n\r\n"
    return head + b"".join(b"data: %b\n\n" % payload.encode() for payload in payloads)


@pytest.fixture
async def scripted() -> AsyncIterator[ScriptedServer]:
    scripted = ScriptedServer()
    server = await asyncio.start_server(scripted.serve_one, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        scripted.target = ServerAddress("http", f"http://127.0.0.1:{port}")
        yield scripted
