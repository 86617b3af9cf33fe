"""A client that begins gRPC calls and leaves out the end of their messages, as no gRPC library does."""

import asyncio
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

WINDOW: Final = 65_535
SIZE: Final = 4 << 20


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def header(name: bytes, value: bytes) -> bytes:
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


@dataclass
class HalfSent:
    """Speaks as much HTTP/2 as it takes to begin calls and to send all but the end of their messages."""

    port: int
    path: str
    num_calls: int
    sent: dict[int, int] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    pongs: int = 0

    def __post_init__(self) -> None:
        self.windows = {1 + 2 * i: WINDOW for i in range(self.num_calls)}
        self.sent = dict.fromkeys(self.windows, 0)
        self.window = self.initial = WINDOW

    async def __aenter__(self) -> None:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()
        await self.writer.wait_closed()

    async def run(self, enough: Callable[[], bool]) -> None:
        """Sends whatever the server lets it send until `enough`."""
        self.writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b""))
        names = {":method": "POST", ":scheme": "http", ":path": self.path, ":authority": "x"}
        names |= {"content-type": "application/grpc", "te": "trailers"}
        head = b"".join(header(name.encode(), value.encode()) for name, value in names.items())
        for stream in self.windows:
            self.writer.write(frame(1, 4, stream, head))
        while not enough():
            await self._send()
            await self._read()

    async def ping(self) -> None:
        """Sends a ping, which the server answers behind all that it had to say."""
        self.writer.write(frame(6, 0, 0, bytes(8)))
        pongs = self.pongs
        while self.pongs == pongs:
            await self._send()
            await self._read()

    async def _send(self) -> None:
        for stream, window in self.windows.items():
            size = min(window, self.window, SIZE - 4096 - self.sent[stream])
            if stream in self.ended or size < 5:
                continue
            data = b"\0" + struct.pack(">I", SIZE - 5) if not self.sent[stream] else b""
            data += bytes(size - len(data))
            for i in range(0, size, 16_384):
                self.writer.write(frame(0, 0, stream, data[i : i + 16_384]))
            self.sent[stream] += size
            self.windows[stream] -= size
            self.window -= size
        await self.writer.drain()

    async def _read(self) -> None:
        head = await self.reader.readexactly(9)
        kind, flags, stream = head[3], head[4], int.from_bytes(head[5:9]) & 0x7FFFFFFF
        payload = await self.reader.readexactly(int.from_bytes(head[:3]))
        if kind == 4 and not flags & 1:
            settings = dict(struct.unpack(">HI", payload[i : i + 6]) for i in range(0, len(payload), 6))
            more = settings.get(4, self.initial) - self.initial
            self.initial += more
            self.windows = {each: window + more for each, window in self.windows.items()}
            self.writer.write(frame(4, 1, 0, b""))
        elif kind == 8 and stream == 0:
            self.window += int.from_bytes(payload)
        elif kind == 8:
            self.windows[stream] += int.from_bytes(payload)
        elif kind == 6 and not flags & 1:
            self.writer.write(frame(6, 1, 0, payload))
        elif kind == 6:
            self.pongs += 1
        elif kind == 3 or (kind == 1 and flags & 1):
            self.ended.add(stream)
