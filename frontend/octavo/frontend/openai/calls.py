"""From a call's requests to their events: who asks, until when, and several generations as one."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request

from octavo.frontend.access.access import tenant_from_headers
from octavo.frontend.errors import ServiceError
from octavo.frontend.http.errors import name_field
from octavo.frontend.openai.endpoint import Api, caller_of
from octavo.frontend.request.events import Event
from octavo.frontend.request.request import GenerationRequest

# An event, and which of the call's generations it is of.
IndexedEvent = tuple[int, Event]
# That; or that one of them has ended, and why if it failed.
_Fed = IndexedEvent | Exception | None


def origin_of(request: Request) -> dict[str, Any]:
    """The arguments of `GenerationRequest` that a call's headers tell. Raises `InvalidRequest` for a tenant that the
    caller must not speak for."""
    return {
        "tenant": tenant_from_headers(request.headers, caller_of(request)),
        "traceparent": request.headers.get("traceparent", ""),
    }


def fresh_id() -> str:
    """For a call's generation whose body asks for none."""
    return secrets.token_hex(16)


def generations(
    api: Api, request: Request, asked: Sequence[GenerationRequest], timeout_s: float | None
) -> AsyncGenerator[IndexedEvent]:
    """The events of all that is asked for, each generation's in order. Raises `ServiceError` with the first that fails;
    the others end with it, as all do when the generator is closed."""
    deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
    sources = [_events(api, one, request, deadline) for one in asked]
    return _placed(sources[0]) if len(sources) == 1 else _merged(sources)


async def _events(
    api: Api, asked: GenerationRequest, request: Request, deadline: float | None
) -> AsyncGenerator[Event]:
    try:
        async with contextlib.aclosing(api.generation.generate(asked, caller_of(request), deadline)) as emitted:
            async for _, event in emitted:
                yield event
    except ServiceError as error:
        name_field(error, request.url.path)
        raise


async def _placed(source: AsyncGenerator[Event]) -> AsyncGenerator[IndexedEvent]:
    async with contextlib.aclosing(source):
        async for event in source:
            yield 0, event


async def _merged(sources: Sequence[AsyncGenerator[Event]]) -> AsyncGenerator[IndexedEvent]:
    # Bounded, so that what a slow client leaves here is merged where it is made.
    fed: asyncio.Queue[_Fed] = asyncio.Queue(len(sources))
    tasks = [asyncio.create_task(_feed(place, source, fed)) for place, source in enumerate(sources)]
    running = len(tasks)
    try:
        while running:
            match await fed.get():
                case None:
                    running -= 1
                case Exception() as error:
                    raise error
                case placed:
                    yield placed
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _feed(place: int, source: AsyncGenerator[Event], fed: "asyncio.Queue[_Fed]") -> None:
    """The source's events, and how it ends. Nothing once it is cancelled, for then nobody takes it."""
    try:
        async with contextlib.aclosing(source):
            async for event in source:
                await fed.put((place, event))
    except Exception as error:
        await fed.put(error)
    else:
        await fed.put(None)
