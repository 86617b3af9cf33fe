"""Serves GET and DELETE /requests/{id}: tells a caller where a request stands, and ends it.

A tenant's id names its own request of this frontend, as for Abort over gRPC; the scheduler is asked of no other. A
trusted caller may also name any request that the scheduler lists, by the id that the scheduler has for it, and by
`?frontend=` the frontend that sent it.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import grpc
import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.frontend.api.endpoint import Api, caller_of
from octavo.frontend.errors import NotFound, Overloaded, Reason, Unavailable
from octavo.frontend.page.live_view import status_of, unreachable
from octavo.frontend.request.request import Caller
from octavo.frontend.scheduler.pool import Listing
from octavo.v1 import admin_pb2 as pb
from octavo.v1 import admin_pb2_grpc as services

_TIMEOUT_S: Final = 5.0
# Between two questions of this frontend: for each answer the scheduler plans its workers' next steps, in time that its
# requests lack.
_PAUSE_S: Final = 0.1
# Questions of one tenant that wait or are asked, so that no tenant keeps others from theirs.
_MOST_WAITING: Final = 4
# Characters of a request's id that an error repeats.
_MAX_QUOTED: Final = 128


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
        f"the scheduler holds no request {request_id[:_MAX_QUOTED]!r}: it has ended, or has not come there yet",
        request_id=request_id[:_MAX_QUOTED],
    )


def to_explanation(explanation: pb.Explanation, *, names_others: bool) -> dict[str, Any]:
    """Returns an explanation as the page's script reads it. The requests ahead are those of others: only with
    `names_others` are their ids shown."""
    ahead = list(explanation.ahead_request_ids)
    return {
        **status_of(explanation.status),
        "queue_position": explanation.queue_position,
        "ahead": ahead if names_others else [],
        "steps": len(explanation.step_ids),
        "tokens_in_flight": explanation.tokens_in_flight,
        "obstacles": [_obstacle(obstacle) for obstacle in explanation.obstacles],
        "cache": _cache(explanation.cache) if explanation.HasField("cache") else None,
    }


def _cache(cache: pb.CacheLookup) -> dict[str, Any]:
    return {
        "worker_id": cache.worker_id,
        "tokens": cache.tokens,
        "device_tokens": cache.device_tokens,
        "cpu_tokens": cache.cpu_tokens,
        "disk_tokens": cache.disk_tokens,
        "reason": pb.CacheLookup.Reason.Name(cache.reason).removeprefix("REASON_").lower(),
        "position": cache.position,
        "token": cache.token if cache.HasField("token") else None,
        "other_token": cache.other_token if cache.HasField("other_token") else None,
        "evicted_s": cache.evicted.ToMilliseconds() / 1000 if cache.HasField("evicted") else None,
        "elsewhere": cache.elsewhere,
    }


def _obstacle(obstacle: pb.Obstacle) -> dict[str, Any]:
    return {
        "worker_id": obstacle.worker_id,
        "kind": pb.Obstacle.Kind.Name(obstacle.kind).removeprefix("KIND_").lower(),
        "needed": obstacle.needed,
        "available": obstacle.available,
    }


async def abort_request(api: Api, request: Request) -> Response:
    """Ends a request that this frontend holds. Raises `NotFound`."""
    request_id, frontend_id, caller = _named(request)
    generation = api.generation
    if frontend_id:
        aborted = generation.abort_listed(Listing(frontend_id, request_id))
    else:
        aborted = generation.abort(request_id, caller)
    if not aborted:
        raise NotFound(
            Reason.REQUEST_NOT_FOUND,
            f"no request {request_id[:_MAX_QUOTED]!r} of yours runs at this frontend; it has ended, or is another's",
            request_id=request_id[:_MAX_QUOTED],
        )
    return _json({"request_id": request_id, "aborted": True})


async def explain_request(api: Api, request: Request, explainer: Explainer) -> Response:
    """Says where a request stands. Raises `NotFound`, `Overloaded`, `Unavailable`."""
    request_id, frontend_id, caller = _named(request)
    if not caller.trusted:
        listing = api.generation.listing_of(request_id, caller)
        if listing is None:
            raise _not_listed(request_id)
        frontend_id, request_id = listing
    check_has_source(api)
    found = [
        to_explanation(each, names_others=caller.trusted)
        for each in await explainer.explain(request_id, caller.tenant)
        if frontend_id in ("", each.status.frontend_id)
    ]
    if not found:
        raise _not_listed(request_id)
    return _json({"explanations": found})


def check_has_source(api: Api) -> None:
    """Raises `Unavailable` where this frontend has no Admin service to ask."""
    if not api.config.scheduler_admin:
        raise Unavailable(
            Reason.SCHEDULER_UNREACHABLE,
            "this frontend has not been told of the scheduler's Admin service; start it with --scheduler-admin",
        )


def _named(request: Request) -> tuple[str, str, Caller]:
    """Returns the request's id, the id of the frontend that sent it, empty for any, and the caller."""
    caller = caller_of(request)
    frontend_id = request.query_params.get("frontend", "") if caller.trusted else ""
    return request.path_params["request_id"], frontend_id, caller


def _not_listed(request_id: str) -> NotFound:
    return NotFound(
        Reason.REQUEST_NOT_FOUND,
        f"request {request_id[:_MAX_QUOTED]!r} is not with the scheduler: it is being prepared, or has ended",
        request_id=request_id[:_MAX_QUOTED],
    )


def _json(content: dict[str, object]) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json", headers={"cache-control": "no-store"})
