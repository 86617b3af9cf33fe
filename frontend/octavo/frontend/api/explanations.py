"""Tells why no more of a prompt was found computed: asks the scheduler's Admin service, and adds its word to answers.

A call with the header `x-octavo-explain: cache` is told so with its answer: in the field `cache` of the object, or in a
comment before the last event of a stream. The scheduler tells a tenant of its own requests alone.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Final

import grpc
import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.frontend.api.endpoint import Api, Handler, caller_of, lookups_of
from octavo.frontend.errors import NotFound, Overloaded, Reason, ServiceError, Unavailable, bad_parameter
from octavo.frontend.http.errors import error_object
from octavo.frontend.http.streaming import EventStream, Sliced, comment
from octavo.frontend.scheduler.pool import Listing
from octavo.v1 import admin_pb2 as pb
from octavo.v1 import admin_pb2_grpc as services

EXPLAIN_HEADER: Final = "x-octavo-explain"
_CACHE: Final = "cache"
_encode: Final = msgspec.json.Encoder().encode
_TIMEOUT_S: Final = 5.0
# Between two questions of this frontend: for each answer the scheduler plans its workers' next steps, in time that its
# requests lack.
_PAUSE_S: Final = 0.1
# Questions of one tenant that wait or are asked, so that no tenant keeps others from theirs.
_MOST_WAITING: Final = 4
# Characters of a request's id that an error repeats.
MAX_QUOTED: Final = 128


class Explainer:
    """Asks the scheduler's Admin service where requests stand: one question at a time, at most ten a second.

    Belongs to one event loop.
    """

    def __init__(self, admin_address: str) -> None:
        self._address = admin_address
        self._turn = asyncio.Lock()
        self._next_at = 0.0
        # Questions by tenant.
        self._waiting: Counter[str] = Counter()

    async def explain(self, request_id: str, asker: str) -> Sequence[pb.Explanation]:
        """Returns an explanation for each request that the scheduler holds under that id, each of another frontend.

        `asker` is the tenant that asks. Raises `NotFound`, `Unavailable`; `Overloaded` for a tenant that asks too much.
        """
        if self._waiting[asker] >= _MOST_WAITING:
            raise Overloaded(
                Reason.TOO_MANY_REQUESTS,
                f"{_MOST_WAITING} explanations are under way for this tenant; wait for one of them",
                max=_MOST_WAITING,
            )
        self._waiting[asker] += 1
        try:
            async with self._turn:
                return await self._ask_in_time(request_id, asker)
        finally:
            # Subtraction drops tenants that have none.
            self._waiting -= Counter([asker])

    async def _ask_in_time(self, request_id: str, asker: str) -> Sequence[pb.Explanation]:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._next_at - loop.time()))
        try:
            return await self._ask(request_id, asker)
        finally:
            self._next_at = loop.time() + _PAUSE_S

    async def _ask(self, request_id: str, asker: str) -> Sequence[pb.Explanation]:
        async with grpc.aio.insecure_channel(self._address) as channel:
            asked = pb.ExplainRequestRequest(request_id=request_id, asker=asker)
            try:
                answer = await services.AdminServiceStub(channel).ExplainRequest(asked, timeout=_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                raise (_unknown(request_id) if error.code() is grpc.StatusCode.NOT_FOUND else unreachable()) from error
        explanations: Sequence[pb.Explanation] = answer.explanations
        return explanations


def _unknown(request_id: str) -> NotFound:
    return NotFound(
        Reason.REQUEST_NOT_FOUND,
        f"the scheduler holds no request {request_id[:MAX_QUOTED]!r}: it has ended, or has not come there yet",
        request_id=request_id[:MAX_QUOTED],
    )


def unreachable() -> Unavailable:
    """Returns the error for a scheduler that does not answer."""
    return Unavailable(
        Reason.SCHEDULER_UNREACHABLE, "the scheduler's Admin service does not answer; see whether it runs"
    )


def cache_object(cache: pb.CacheLookup) -> dict[str, Any]:
    """Returns where a prompt was found, and why not more of it, as JSON has it."""
    return {
        "worker_id": cache.worker_id,
        "tokens": cache.tokens,
        "device_tokens": cache.device_tokens,
        "cpu_tokens": cache.cpu_tokens,
        "disk_tokens": cache.disk_tokens,
        "replica_tokens": cache.replica_tokens,
        "source": cache.source,
        "reason": pb.CacheLookup.Reason.Name(cache.reason).removeprefix("REASON_").lower(),
        "position": cache.position,
        "token": cache.token if cache.HasField("token") else None,
        "other_token": cache.other_token if cache.HasField("other_token") else None,
        "evicted_s": cache.evicted.ToMilliseconds() / 1000 if cache.HasField("evicted") else None,
        "elsewhere": cache.elsewhere,
    }


def check_has_source(api: Api) -> None:
    """Raises `Unavailable` where this frontend has no Admin service to ask."""
    if not api.config.scheduler_admin:
        raise Unavailable(
            Reason.SCHEDULER_UNREACHABLE,
            "this frontend has not been told of the scheduler's Admin service; start it with --scheduler-admin",
        )


def explained(handler: Handler, explainer: Explainer) -> Handler:
    """Returns a handler whose answers say why no more of their prompts was found, to calls that ask for it."""

    async def answer(api: Api, request: Request) -> Response:
        if (asked := request.headers.get(EXPLAIN_HEADER)) is None:
            return await handler(api, request)
        if asked.strip().lower() != _CACHE:
            raise bad_parameter(EXPLAIN_HEADER, repr(asked[:64]), f"it can only be {_CACHE}")
        check_has_source(api)
        request.state.is_explained = True
        response = await handler(api, request)
        return _with_cache(response, request, explainer)

    return answer


def _with_cache(response: Response, request: Request, explainer: Explainer) -> Response:
    if isinstance(response, EventStream):
        response.source = _commented(response.source, request, explainer)
    elif isinstance(response, Sliced):
        response.source = _completed(response.source, request, explainer)
    else:
        return Sliced(
            _completed(_only(bytes(response.body)), request, explainer),
            headers={name: value for name, value in response.headers.items() if name not in _OWN_HEADERS},
            media_type="application/json",
        )
    return response


# Those that a response of another length must not have from this one.
_OWN_HEADERS: Final = frozenset({"content-length", "content-type"})


async def _only(body: bytes) -> AsyncGenerator[bytes]:
    yield body


async def _commented(source: AsyncGenerator[bytes], request: Request, explainer: Explainer) -> AsyncGenerator[bytes]:
    """Yields the events of a stream, and before the last what is known of the prompts. Each comes once the next is
    there; where the stream fails, nothing is told."""
    held = b""
    async with aclosing(source):
        try:
            async for event in source:
                if event:
                    yield held
                    held = event
        except ServiceError:
            yield held
            raise
    yield comment(f"{_CACHE} {_encode(await _lookups(request, explainer)).decode()}")
    yield held


async def _completed(source: AsyncGenerator[bytes], request: Request, explainer: Explainer) -> AsyncGenerator[bytes]:
    """Yields the slices of an object, with one more field."""
    held = b""
    async with aclosing(source):
        async for part in source:
            if held:
                yield held
            held = part
    yield held[:-1] + b',"%b":%b}' % (_CACHE.encode(), _encode(await _lookups(request, explainer)))


async def _lookups(request: Request, explainer: Explainer) -> list[dict[str, Any]]:
    """Returns what is known of each of the call's prompts, or the error that keeps it from being known."""
    return [await _lookup(request, each, explainer) for each in lookups_of(request)]


async def _lookup(request: Request, listed: Listing | None, explainer: Explainer) -> dict[str, Any]:
    try:
        if listed is None:
            raise unreachable()
        # Whoever calls without a key, or speaks for another tenant, is told what a prefix hit would tell.
        for each in await explainer.explain(listed.request_id, caller_of(request).tenant):
            if each.status.frontend_id == listed.frontend_id and each.HasField("cache"):
                return cache_object(each.cache)
        raise unreachable()
    except ServiceError as error:
        return {"error": error_object(error)}
