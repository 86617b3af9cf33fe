"""Gives handlers their services and caller, makes routes of them, and runs a call's generations as one stream."""

import asyncio
import contextlib
import functools
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.frontend.access.access import Access, tenant_from_headers
from octavo.frontend.answer_parsers.call_formats import detect_format
from octavo.frontend.api.body import Reading
from octavo.frontend.config import FrontendConfig
from octavo.frontend.errors import Reason, ServiceError, Unauthenticated, internal_error, log_failure
from octavo.frontend.http.connection import ClientGone
from octavo.frontend.http.envelope import unix_time
from octavo.frontend.http.errors import error_response, name_field
from octavo.frontend.request.events import Event, RequestStarted
from octavo.frontend.request.request import ANYBODY, Caller, GenerationRequest
from octavo.frontend.scheduler.pool import Listing
from octavo.frontend.stream.generation import Generation

_log = logging.getLogger(__name__)

# OpenAI's default, where neither the call nor the model says another.
_TEMPERATURE: Final = 1.0
# Seconds of silence after which a stream says that it is alive.
PING_S = 15.0
VERSION: Final = version("octavo")
# The same for all answers of one build, as clients expect that compare answers of one seed.
SYSTEM_FINGERPRINT: Final = f"octavo-{VERSION}"


@dataclass(frozen=True)
class Api:
    """Holds the services behind the routes.

    `started_at` is a Unix time, `tool_format` the format in which the model writes calls of functions.
    """

    generation: Generation
    access: Access
    config: FrontendConfig
    started_at: int = field(default_factory=unix_time)

    @property
    def ping_s(self) -> float:
        return PING_S

    @functools.cached_property
    def tool_format(self) -> str:
        parser = self.config.tool_call_parser
        tokenizer = self.generation.tokenizer
        if parser != "auto":
            return parser
        return detect_format(tokenizer.files.tool_template, tells_of_tools=tokenizer.tells_of_tools)

    def reading(self, ignored: list[str]) -> Reading:
        """Returns how a call is read whose fields `ignored` are not honoured."""
        temperature = None if self.generation.recommends_sampling else _TEMPERATURE
        return Reading(not self.config.open_json_schemas, temperature, ignored)


Handler = Callable[[Api, Request], Awaitable[Response]]


def caller_of(request: Request) -> Caller:
    """Returns the caller that the credentials of the call name, `ANYBODY` where none are asked for."""
    return getattr(request.state, "caller", ANYBODY)


def check_trusted(request: Request, why: str) -> None:
    """Raises `Unauthenticated` for a tenant, who must not see or change what is of others; `why` says what is."""
    if not caller_of(request).trusted:
        raise Unauthenticated(Reason.UNAUTHENTICATED, f"{why}; use the key of a trusted tenant")


def route(api: Api, path: str, handler: Handler, *methods: str) -> Route:
    """Returns a route that answers failures of `handler` as the error objects of the API that is called."""

    @functools.wraps(handler)
    async def answer(request: Request) -> Response:
        try:
            return await handler(api, request)
        except ServiceError as error:
            name_field(error, path)
            return error_response(error, request.scope)
        except ClientGone:
            # Nobody receives this.
            return Response(status_code=499)
        except Exception:
            log_failure(_log, "a request failed")
            return error_response(internal_error(), request.scope)

    return Route(path, answer, methods=methods)


# The place of a generation among the call's, and an event of that generation.
IndexedEvent = tuple[int, Event]
# An event; or the end of a generation: the error that it failed with, or None.
_Fed = IndexedEvent | Exception | None


def origin_of(request: Request) -> dict[str, Any]:
    """Returns the arguments of `GenerationRequest` that a call's headers set. Raises `InvalidRequest` for a tenant
    that the caller must not speak for."""
    return {
        "tenant": tenant_from_headers(request.headers, caller_of(request)),
        "traceparent": request.headers.get("traceparent", ""),
    }


def fresh_id() -> str:
    """Returns a random id for a generation whose body asks for none."""
    return secrets.token_hex(16)


def generations(
    api: Api, request: Request, asked: Sequence[GenerationRequest], timeout_s: float | None
) -> AsyncGenerator[IndexedEvent]:
    """Yields the events of all requests in `asked`, each generation's in order, until `timeout_s` seconds have passed.

    Raises the `ServiceError` of the first generation that fails; the others end with it, as all do when the generator
    is closed.
    """
    request.state.lookups = _Lookups(len(asked))
    deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
    sources = [_events(api, place, one, request, deadline) for place, one in enumerate(asked)]
    return sources[0] if len(sources) == 1 else _merged(sources)


async def _events(
    api: Api, place: int, asked: GenerationRequest, request: Request, deadline: float | None
) -> AsyncGenerator[IndexedEvent]:
    try:
        async with contextlib.aclosing(api.generation.generate(asked, caller_of(request), deadline)) as emitted:
            async for _, event in emitted:
                if isinstance(event, RequestStarted):
                    _note_lookup(api, place, request, event)
                yield place, event
    except ServiceError as error:
        name_field(error, request.url.path)
        raise


@dataclass
class _Lookups:
    """Holds how many tokens of each prompt of a call were found computed, and how the scheduler lists its request."""

    num_prompts: int
    cached_tokens: dict[int, int] = field(default_factory=dict)
    listings: dict[int, Listing | None] = field(default_factory=dict)


def _note_lookup(api: Api, place: int, request: Request, event: RequestStarted) -> None:
    """Notes what was found of a prompt: the sum for the response's header, once all prompts of the call were looked
    for."""
    lookups: _Lookups = request.state.lookups
    lookups.cached_tokens[place] = event.cached_prompt_tokens
    if len(lookups.cached_tokens) == lookups.num_prompts:
        request.state.cached_tokens = sum(lookups.cached_tokens.values())
    if getattr(request.state, "is_explained", False):
        lookups.listings[place] = api.generation.listing_of(event.request_id, caller_of(request))


def lookups_of(request: Request) -> Sequence[Listing | None]:
    """Returns how the scheduler lists each request of a call, in the order of the prompts; None for one that it did not
    list any more when that was looked for."""
    lookups: _Lookups | None = getattr(request.state, "lookups", None)
    return [lookups.listings.get(place) for place in range(lookups.num_prompts)] if lookups else []


async def _merged(sources: Sequence[AsyncGenerator[IndexedEvent]]) -> AsyncGenerator[IndexedEvent]:
    # Bounded, so that what a slow client leaves here is merged where it is made.
    fed: asyncio.Queue[_Fed] = asyncio.Queue(len(sources))
    tasks = [asyncio.create_task(_feed(source, fed)) for source in sources]
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


async def _feed(source: AsyncGenerator[IndexedEvent], fed: "asyncio.Queue[_Fed]") -> None:
    """Puts the source's events into `fed`, then None or the error that ended the source. Puts no end when cancelled,
    for nobody would take it."""
    try:
        async with contextlib.aclosing(source):
            async for event in source:
                await fed.put(event)
    except Exception as error:
        await fed.put(error)
    else:
        await fed.put(None)
