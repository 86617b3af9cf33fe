"""Several generations are read as one stream, and end together with it."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from octavo.frontend.api.endpoint import IndexedEvent, _merged
from octavo.frontend.errors import Broken, Reason
from octavo.frontend.request.events import TextDelta


async def endless(ended: list[str]) -> AsyncGenerator[IndexedEvent]:
    try:
        while True:
            yield 0, TextDelta("x", [1])
    finally:
        ended.append("endless")


async def failing() -> AsyncGenerator[IndexedEvent]:
    yield 0, TextDelta("x", [1])
    raise Broken(Reason.INTERNAL, "no more")


async def test_closing_the_stream_ends_generations_that_wait_to_be_read() -> None:
    ended: list[str] = []
    merged = _merged([endless(ended), endless(ended)])
    async with asyncio.timeout(60):
        await anext(merged)
        # By now they have made more than there is room for.
        await asyncio.sleep(0)
        await merged.aclose()
    assert ended == ["endless"] * 2


async def test_a_generation_that_fails_ends_those_that_wait_to_be_read() -> None:
    ended: list[str] = []
    merged = _merged([endless(ended), failing(), endless(ended)])

    async def read_all() -> None:
        async for _ in merged:
            await asyncio.sleep(0)

    with pytest.raises(Broken, match="no more"):
        await asyncio.wait_for(read_all(), 60)
    assert ended == ["endless"] * 2
