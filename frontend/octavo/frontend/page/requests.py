"""Serves GET and DELETE /requests/{id}: tells a caller where a request stands, and ends it.

A tenant's id names its own request of this frontend, as for Abort over gRPC; the scheduler is asked of no other. A
trusted caller may also name any request that the scheduler lists, by the id that the scheduler has for it, and by
`?frontend=` the frontend that sent it.
"""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.frontend.api.endpoint import Api, caller_of
from octavo.frontend.api.explanations import MAX_QUOTED, Explainer, cache_object, check_has_source
from octavo.frontend.errors import NotFound, Reason
from octavo.frontend.page.live_view import status_of
from octavo.frontend.request.request import Caller
from octavo.frontend.scheduler.pool import Listing
from octavo.v1 import admin_pb2 as pb


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
        "cache": cache_object(explanation.cache) if explanation.HasField("cache") else None,
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
            f"no request {request_id[:MAX_QUOTED]!r} of yours runs at this frontend; it has ended, or is another's",
            request_id=request_id[:MAX_QUOTED],
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


def _named(request: Request) -> tuple[str, str, Caller]:
    """Returns the request's id, the id of the frontend that sent it, empty for any, and the caller."""
    caller = caller_of(request)
    frontend_id = request.query_params.get("frontend", "") if caller.trusted else ""
    return request.path_params["request_id"], frontend_id, caller


def _not_listed(request_id: str) -> NotFound:
    return NotFound(
        Reason.REQUEST_NOT_FOUND,
        f"request {request_id[:MAX_QUOTED]!r} is not with the scheduler: it is being prepared, or has ended",
        request_id=request_id[:MAX_QUOTED],
    )


def _json(content: dict[str, object]) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json", headers={"cache-control": "no-store"})
