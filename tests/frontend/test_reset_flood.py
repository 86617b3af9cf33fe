"""Clients that open streams and reset them at once, faster than any honest one: nothing is held, nothing grows."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from octavo.frontend.server import FrontendServer
from octavo.testbed.grpc_calls import collect
from octavo.testing.fakes.fake_scheduler import FakeScheduler
from octavo.v1 import generation_pb2 as pb

STREAMS: Final = 2000
BEGUN: Final = 40
DATA, HEADERS, RST_STREAM, SETTINGS = 0, 1, 3, 4
END_STREAM, END_HEADERS = 0x1, 0x4
CANCEL = struct.pack(">I", 8)
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
REQUEST = pb.GenerateRequest(text="x", stopping=pb.StoppingCriteria(max_new_tokens=400)).SerializeToString()


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def text(value: bytes) -> bytes:
    return bytes([len(value)]) + value


# In HPACK: two fields of its static table, and five that are spelt out.
CALL = (
    b"\x83\x86"
    + (b"\x04" + text(b"/octavo.v1.GenerationService/Generate"))
    + (b"\x01" + text(b"localhost"))
    + (b"\x0f\x10" + text(b"application/grpc"))
    + (b"\x00" + text(b"te") + text(b"trailers"))
)


def opened(stream: int, *, whole: bool) -> bytes:
    """A call, with its request or without."""
    message = struct.pack(">BI", 0, len(REQUEST)) + REQUEST
    return frame(HEADERS, END_HEADERS, stream, CALL) + (frame(DATA, END_STREAM, stream, message) if whole else b"")


def reset(stream: int) -> bytes:
    return frame(RST_STREAM, 0, stream, CANCEL)


@contextlib.asynccontextmanager
async def connection(port: int) -> AsyncIterator[tuple["asyncio.Task[None]", asyncio.StreamWriter]]:
    """What is done when the server has closed it, and where to write."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    closed = asyncio.create_task(_drain(reader))
    writer.write(PREFACE + frame(SETTINGS, 0, 0))
    yield closed, writer
    writer.close()
    await closed


async def flood(port: int) -> None:
    """Streams that are reset at once, over as many connections as the server makes it take."""
    sent = 0
    while sent < STREAMS:
        async with connection(port) as (closed, writer):
            for first in range(1, 2 * (STREAMS - sent), 100):
                streams = range(first, first + 100, 2)
                writer.write(b"".join(opened(stream, whole=stream % 4 == 1) + reset(stream) for stream in streams))
                await asyncio.wait((closed,), timeout=0.005)
                sent += len(streams)
                if closed.done():
                    break


async def resets_in_the_midst(port: int, begun: Callable[[], Awaitable[None]]) -> None:
    """Streams that are reset together when all of them have begun."""
    streams = range(1, 2 * BEGUN, 2)
    async with connection(port) as (_, writer):
        writer.write(b"".join(opened(stream, whole=True) for stream in streams))
        await begun()
        writer.write(b"".join(map(reset, streams)))


async def _drain(reader: asyncio.StreamReader) -> None:
    try:
        while await reader.read(1 << 16):
            pass
    except ConnectionError:
        pass


def private_mib() -> float:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) / 1024


async def test_a_flood_of_resets(
    scheduler: FakeScheduler, frontend: FrontendServer, stub: Any, eventually: Any
) -> None:
    await eventually(lambda: frontend.generation.ready)
    scheduler.pace_s = 0.02
    used = []
    for _ in range(4):
        await flood(frontend.port)
        await resets_in_the_midst(frontend.port, lambda: eventually(lambda: len(scheduler.submitted) >= BEGUN))
        await eventually(lambda: not scheduler.running)
        await eventually(lambda: frontend.generation.num_running == 0)
        assert await collect(stub.Generate(pb.GenerateRequest(text="x", stopping={"max_new_tokens": 3}), timeout=60))
        scheduler.submitted.clear()
        scheduler.aborted.clear()
        used.append(private_mib())
    # A request that is kept takes tens of KiB.
    assert used[-1] - used[0] < 24


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_nothing_is_unpacked(scheduler: FakeScheduler, stub: Any, compression: grpc.Compression) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stub.Generate(pb.GenerateRequest(text="x" * 500), compression=compression))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
