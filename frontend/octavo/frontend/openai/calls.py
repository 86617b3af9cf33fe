"""From a call's requests to their events: who asks, until when, and several generations as one."""

import asyncio
import contextlib
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, Final

from starlette.requests import Request

from octavo.frontend.access import tenant_from_headers
from octavo.frontend.events import Event
from octavo.frontend.openai.door import Door, caller_of
from octavo.frontend.request import GenerationRequest

_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
# An event, and which of the call's generations it is of.
Placed = tuple[int, Event]


def origin_of(request: Request) -> dict[str, Any]:
    """The arguments of `GenerationRequest` that a call's headers tell. Raises `InvalidRequest` for a tenant that the
    caller must not speak for."""
    traceparent = request.headers.get("traceparent", "")
    return {
        "tenant": tenant_from_headers(request.headers, caller_of(request)),
        "traceparent": traceparent if _TRACEPARENT.fullmatch(traceparent) else "",
    }


def fresh_id() -> str:
    """For a call's generation whose body asks for none."""
    return secrets.token_hex(16)


def generations(
    door: Door, request: Request, asked: Sequence[GenerationRequest], timeout_s: float | None
) -> AsyncGenerator[Placed]:
    """The events of all that is asked for, each generation's in order. Raises `ServiceError` with the first that fails;
    the others end with it, as all do when the generator is closed."""
    deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
    sources = [_events(door, one, request, deadline) for one in asked]
    return _placed(sources[0]) if len(sources) == 1 else _merged(sources)


async def _events(
    door: Door, asked: GenerationRequest, request: Request, deadline: float | None
) -> AsyncGenerator[Event]:
    async with contextlib.aclosing(door.generation.generate(asked, caller_of(request), deadline)) as emitted:
        async for _, event in emitted:
            yield event


async def _placed(source: AsyncGenerator[Event]) -> AsyncGenerator[Placed]:
    async with contextlib.aclosing(source):
        async for event in source:
            yield 0, event


async def _merged(sources: Sequence[AsyncGenerator[Event]]) -> AsyncGenerator[Placed]:
    # Bounded, so that what a slow client leaves here is merged where it is made.
    events: asyncio.Queue[Placed | None] = asyncio.Queue(len(sources))
    tasks = [asyncio.create_task(_feed(place, source, events)) for place, source in enumerate(sources)]
    try:
        async for placed in _until_all_ended(events, tasks):
            yield placed
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _feed(place: int, source: AsyncGenerator[Event], events: "asyncio.Queue[Placed | None]") -> None:
    try:
        async with contextlib.aclosing(source):
            async for event in source:
                await events.put((place, event))
    finally:
        await events.put(None)


async def _until_all_ended(
    events: "asyncio.Queue[Placed | None]", tasks: "Sequence[asyncio.Task[None]]"
) -> AsyncIterator[Placed]:
    for _ in tasks:
        while (placed := await events.get()) is not None:
            yield placed
        for task in tasks:
            if task.done():
                task.result()
