"""Little is held for a client that does not read, however much there is to send."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Final

from octavo.frontend.http.streaming import EventStream, data

# Of one stream, in bytes.
BOUND: Final = 256 << 10


async def test_what_a_client_does_not_read_is_left_where_it_is_made() -> None:
    made, sent = 0, asyncio.Event()

    async def source() -> AsyncGenerator[bytes]:
        nonlocal made
        while True:
            event = data(b"x" * 1000)
            made += len(event)
            yield event
            await asyncio.sleep(0)

    async def never(message: Any) -> None:
        if message["type"] == "http.response.body":
            sent.set()
            await asyncio.Event().wait()

    async def receive() -> Any:
        await asyncio.Event().wait()

    answering = asyncio.ensure_future(EventStream(source(), ping_s=10)({"type": "http"}, receive, never))
    await sent.wait()
    # Some hundred times as often as the bound would take.
    for _ in range(100 * BOUND // 1000):
        await asyncio.sleep(0)
    assert 0 < made <= BOUND
    answering.cancel()
    await asyncio.gather(answering, return_exceptions=True)


async def test_what_comes_in_one_turn_is_bounded_too() -> None:
    made, sizes = 0, []

    async def source() -> AsyncGenerator[bytes]:
        nonlocal made
        for _ in range(100):
            event = data(b"x" * 20_000)
            made += len(event)
            yield event

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            sizes.append((len(message["body"]), made))

    async def receive() -> Any:
        await asyncio.Event().wait()

    await EventStream(source(), ping_s=10)({"type": "http"}, receive, send)
    assert sum(size for size, _ in sizes) == made > 2_000_000
    assert sizes[0][1] <= BOUND
    assert max(size for size, _ in sizes) <= BOUND // 2
