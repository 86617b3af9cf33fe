"""Plays an innocent neighbour: it streams its answers and asks `/livez` while something hostile goes on beside it."""

import asyncio
import contextlib
import json
import ssl
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

_PATIENCE_S: Final = 60.0
_POLL_S: Final = 0.02
_TOKENS: Final = 400


@dataclass(frozen=True)
class AttackedServer:
    """Names a server: host and port of its HTTP and of its gRPC, and the authority of both where they speak TLS."""

    http: tuple[str, int]
    grpc: tuple[str, int]
    authority: Path | None = None


@dataclass
class Seen:
    """Holds what a neighbour has seen: seconds between its tokens, and of answers to `/livez` on connections of their
    own."""

    gaps: list[float] = field(default_factory=list)
    livez: list[float] = field(default_factory=list)
    num_tokens: int = 0
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class NeighbourBounds:
    """Limits, in seconds, the 99th percentile of the neighbour's gaps, and the longest time that a probe may take."""

    p99_gap: float
    livez: float


# What holds on a busy machine, and on one that does nothing else.
GENEROUS: Final = NeighbourBounds(0.5, 2.0)
STRICT: Final = NeighbourBounds(0.1, 0.5)


def percentile(seconds: list[float], percent: int) -> float:
    """Returns the percentile; it is infinite where nothing was seen."""
    if len(seconds) < 2:
        return max(seconds, default=float("inf"))
    return statistics.quantiles(seconds, n=100, method="inclusive")[percent - 1]


def judged(seen: Seen, bounds: NeighbourBounds) -> list[str]:
    """Returns what a neighbour has suffered beyond `bounds`."""
    faults = list(seen.wrong)
    if (gap := percentile(seen.gaps, 99)) > bounds.p99_gap:
        faults.append(f"the p99 gap between tokens was {gap * 1e3:.0f} ms")
    if (livez := max(seen.livez, default=float("inf"))) > bounds.livez:
        faults.append(f"/livez took {livez * 1e3:.0f} ms")
    return faults


@contextlib.asynccontextmanager
async def neighbour(target: AttackedServer) -> AsyncIterator[Seen]:
    """Lives inside the block."""
    seen = Seen()
    tasks = [asyncio.create_task(work) for work in (_stream(target, seen), _probe(target, seen))]
    try:
        while not (seen.num_tokens and seen.livez) and not seen.wrong:
            await asyncio.sleep(0.01)
        yield seen
        # A gap that is still open counts, too.
        number = seen.num_tokens, len(seen.livez)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                while not (seen.num_tokens > number[0] and len(seen.livez) > number[1]) and not seen.wrong:
                    await asyncio.sleep(0.01)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def connection(target: AttackedServer) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Opens a connection for HTTP that ends with the block, whatever is still to be said."""
    tls = ssl.create_default_context(cafile=target.authority) if target.authority else None
    reader, writer = await asyncio.open_connection(*target.http, ssl=tls)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def request_bytes(path: str, body: dict[str, Any] | None = None, **headers: str) -> bytes:
    """Returns one HTTP request whose connection ends with its answer."""
    content = b"" if body is None else json.dumps(body).encode()
    lines = [
        f"{'GET' if body is None else 'POST'} {path} HTTP/1.1",
        "host: localhost",
        "connection: close",
        *([] if body is None else ["content-type: application/json", f"content-length: {len(content)}"]),
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + content


async def _stream(target: AttackedServer, seen: Seen) -> None:
    """Reads one answer after the other, each of which was on its way before the next question."""
    while True:
        last: float | None = None
        body = {"prompt": "hello", "max_tokens": _TOKENS, "ignore_eos": True, "stream": True, "temperature": 0}
        try:
            async with connection(target) as (reader, writer), asyncio.timeout(None) as limit:
                writer.write(request_bytes("/v1/completions", body))
                limit.reschedule(asyncio.get_running_loop().time() + _PATIENCE_S)
                async for line in reader:
                    now = time.monotonic()
                    if line.startswith(b"HTTP/1.1") and not line.startswith(b"HTTP/1.1 200"):
                        seen.wrong.append(f"a good request was answered {line!r}")
                        return
                    if line.startswith(b'data: {"id"'):
                        limit.reschedule(asyncio.get_running_loop().time() + _PATIENCE_S)
                        if last is not None:
                            seen.gaps.append(now - last)
                        seen.num_tokens += 1
                        last = now
        except (OSError, TimeoutError) as error:
            seen.wrong.append(f"a good stream ended with {type(error).__name__}: {error}")
            return


async def _probe(target: AttackedServer, seen: Seen) -> None:
    while True:
        began = time.monotonic()
        try:
            async with asyncio.timeout(_PATIENCE_S), connection(target) as (reader, writer):
                writer.write(request_bytes("/livez"))
                answer = await reader.read()
        except (OSError, TimeoutError) as error:
            seen.livez.append(time.monotonic() - began)
            seen.wrong.append(f"/livez: {type(error).__name__}: {error}")
            return
        seen.livez.append(time.monotonic() - began)
        if not answer.startswith(b"HTTP/1.1 200"):
            seen.wrong.append(f"/livez answered {answer[:100]!r}")
            return
        await asyncio.sleep(_POLL_S)


def row(name: str, seen: Seen, faults: list[str]) -> str:
    """Formats one line of the table."""
    cells = [percentile(seen.gaps, 50), percentile(seen.gaps, 99), max(seen.gaps, default=float("inf"))]
    cells += [percentile(seen.livez, 50), max(seen.livez, default=float("inf"))]
    figures = "".join(f"{cell * 1e3:>10.0f}" for cell in cells)
    return f"{name:<28}{seen.num_tokens:>8}{figures}   {'; '.join(faults) or 'ok'}"


HEADER: Final = (
    f"{'input':<28}{'tokens':>8}" + "".join(f"{cell:>10}" for cell in ("p50", "p99", "max", "livez", "max")) + "   (ms)"
)
