"""GET and DELETE /requests/{id}: where a request stands, and its end, for those whose request it is.

A tenant's id means its own request of this frontend, as for Abort over gRPC, and the scheduler is asked of no other. A
trusted caller may also name what the scheduler lists: the id there, and with `?frontend=` the frontend that it is of.
"""

from starlette.requests import Request
from starlette.responses import Response

from octavo.frontend.errors import NotFound, Reason, Unavailable
from octavo.frontend.openai.answers import encode
from octavo.frontend.openai.endpoint import Api, caller_of
from octavo.frontend.page.explain import Explainer, to_explanation
from octavo.frontend.request.request import Caller
from octavo.frontend.scheduler.pool import Listing

_MAX_QUOTED = 128


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
    """Returns the request's id, the frontend in whose books that is, empty for any, and who asks."""
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
    return Response(encode(content), media_type="application/json", headers={"cache-control": "no-store"})
