"""Serves what is asked of stored responses: /v1/responses/{id}, its events, its input, its end."""

import asyncio
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.frontend.api.endpoint import Api, origin_of
from octavo.frontend.errors import bad_parameter
from octavo.frontend.http.streaming import EventStream
from octavo.frontend.openai.answers import encode
from octavo.frontend.stored.service import POLL_S, StoredResponses, check_number
from octavo.frontend.stored.store import MAX_PAGE, Store
from octavo.frontend.stored.values import Kind, Record

_PAGE: Final = 20
# Seconds that a cancellation waits for another frontend to do it.
_CANCEL_S: Final = 10.0
_MOST: Final = 1 << 53
_FLAGS: Final = {"true": True, "1": True, "false": False, "0": False, "": False}


class _Named(msgspec.Struct):
    id: str


async def retrieve(api: Api, request: Request, stored: StoredResponses) -> Response:
    """Answers with a response as it is now, or with the events of one that was computed in the background."""
    tenant, record = await _found(request, stored)
    run = stored.get(record.key)
    if not _flag(request, "stream"):
        return json(encode(run.answer.response) if run else record.body)
    if not record.is_background:
        rule = "events are kept of responses with `background: true` alone; ask without stream"
        raise bad_parameter("stream", "true", rule)
    after = number(request, "starting_after", -1, 0, _MOST)
    if run or record.ended:
        check_number(after + 1, run.num_events if run else record.num_events)
    if request.method == "HEAD":
        return Response(media_type="text/event-stream")
    return EventStream(stored.follow(tenant, record.id, record.key, after + 1), ping_s=api.ping_s)


async def cancel(api: Api, request: Request, stored: StoredResponses) -> Response:
    """Ends a response that is computed in the background, and answers with what there is of it."""
    tenant, record = await _found(request, stored)
    if not record.is_background:
        rule = "only responses with `background: true` can be cancelled; leave its stream to end another"
        raise bad_parameter("response_id", repr(record.id[:128]), rule)
    if run := stored.get(record.key):
        run.stop()
        await run.over()
        return json(encode(run.answer.response))
    if not record.ended:
        await stored.store.call(Store.cancel, tenant, record.id)
        until = asyncio.get_running_loop().time() + _CANCEL_S
        while not record.ended and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(POLL_S)
            record = await stored.store.call(Store.find, Kind.RESPONSE, tenant, record.id)
    return json(record.body)


async def delete(api: Api, request: Request, stored: StoredResponses) -> Response:
    """Removes a response, which is computed no further."""
    tenant, response_id = origin_of(request)["tenant"], request.path_params["response_id"]
    key = await stored.store.call(Store.remove, Kind.RESPONSE, tenant, response_id)
    if run := stored.get(key):
        run.stop()
    return json(encode({"id": response_id, "object": "response", "deleted": True}))


async def input_items(api: Api, request: Request, stored: StoredResponses) -> Response:
    """Lists the items of a response's own input, newest first unless asked otherwise."""
    _, record = await _found(request, stored)
    return await items_page(request, stored, record)


async def items_page(request: Request, stored: StoredResponses, record: Record) -> Response:
    """Answers with some items of a record. Raises `InvalidRequest` for parameters that say something else."""
    limit = number(request, "limit", _PAGE, 1, MAX_PAGE)
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise bad_parameter("order", repr(order[:64]), "it must be asc or desc")
    after = request.query_params.get("after") or None
    return json(await stored.store.call(_page, record.key, after, limit, newest_first=order == "desc"))


def _page(store: Store, key: int, after: str | None, limit: int, *, newest_first: bool) -> bytes:
    found = store.items(key, after, limit + 1, newest_first=newest_first)
    return listed(found[:limit], has_more=len(found) > limit)


def listed(items: list[bytes], *, has_more: bool = False) -> bytes:
    """Returns a list of items as JSON text."""
    ids = [msgspec.json.decode(item, type=_Named).id for item in items]
    return encode(
        {
            "object": "list",
            "data": [msgspec.Raw(item) for item in items],
            "first_id": ids[0] if ids else None,
            "last_id": ids[-1] if ids else None,
            "has_more": has_more,
        }
    )


def json(body: bytes) -> Response:
    """Returns JSON text as a response that nobody keeps."""
    return Response(body, media_type="application/json", headers={"cache-control": "no-store"})


def number(request: Request, name: str, default: int, least: int, most: int) -> int:
    """Returns a parameter of the call's address. Raises `InvalidRequest` for one that is no number within bounds."""
    text = request.query_params.get(name)
    if not text:
        return default
    if not (text.isdecimal() and len(text) < 20 and least <= int(text) <= most):
        raise bad_parameter(name, repr(text[:64]), f"it must be a number from {least} to {most}")
    return int(text)


def _flag(request: Request, name: str) -> bool:
    text = request.query_params.get(name, "").lower()
    if text not in _FLAGS:
        raise bad_parameter(name, repr(text[:64]), "it must be true or false")
    return _FLAGS[text]


async def _found(request: Request, stored: StoredResponses) -> tuple[str, Record]:
    """Returns the tenant, and the response that the address names. Raises `NotFound`."""
    tenant = origin_of(request)["tenant"]
    return tenant, await stored.store.call(Store.find, Kind.RESPONSE, tenant, request.path_params["response_id"])
