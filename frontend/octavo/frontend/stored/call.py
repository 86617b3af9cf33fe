"""Holds a call about what is stored, and writes answers to such calls."""

from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.frontend.api.endpoint import Api, origin_of
from octavo.frontend.errors import bad_parameter
from octavo.frontend.openai.answers import encode
from octavo.frontend.stored.service import StoredResponses
from octavo.frontend.stored.store import MAX_PAGE, Store
from octavo.frontend.stored.values import Kind, Named, Record

_PAGE: Final = 20


@dataclass(frozen=True)
class Call:
    """Holds a call about records of a kind; its address may name one."""

    api: Api
    request: Request
    stored: StoredResponses
    kind: Kind

    @property
    def tenant(self) -> str:
        return str(origin_of(self.request)["tenant"])

    @property
    def record_id(self) -> str:
        """Returns the id that the address has."""
        return str(self.request.path_params["record_id"])

    async def record(self) -> Record:
        """Returns the record that the address names. Raises `NotFound`."""
        return await self.stored.store.call(Store.find, self.kind, self.tenant, self.record_id)


async def delete(call: Call) -> Response:
    """Removes a record: a response, which is computed no further, or a conversation, whose responses stay."""
    key = await call.stored.store.call(Store.remove, call.kind, call.tenant, call.record_id)
    if run := call.stored.get(key):
        run.stop()
    name = "response" if call.kind is Kind.RESPONSE else "conversation.deleted"
    return json({"id": call.record_id, "object": name, "deleted": True})


async def list_items(call: Call) -> Response:
    """Lists items of a conversation, or of a response's own input, newest first unless asked otherwise."""
    record, query = await call.record(), call.request.query_params
    limit = number(call.request, "limit", _PAGE, 1, MAX_PAGE)
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise bad_parameter("order", repr(order[:64]), "it must be asc or desc")
    found = await call.stored.store.call(
        Store.items, record.key, query.get("after") or None, limit + 1, newest_first=order == "desc"
    )
    return json(listed(found[:limit], has_more=len(found) > limit))


def listed(items: list[bytes], *, has_more: bool = False) -> dict[str, Any]:
    """Returns a list of items as it is answered."""
    ids: list[str | None] = [msgspec.json.decode(item, type=Named).id for item in items]
    ids = ids or [None]
    data = [msgspec.Raw(item) for item in items]
    return {"object": "list", "data": data, "first_id": ids[0], "last_id": ids[-1], "has_more": has_more}


def json(body: bytes | dict[str, Any]) -> Response:
    """Returns an object, or its JSON text, as a response that nobody keeps."""
    text = body if isinstance(body, bytes) else encode(body)
    return Response(text, media_type="application/json", headers={"cache-control": "no-store"})


def number(request: Request, name: str, default: int, least: int, most: int) -> int:
    """Returns a parameter of the call's address. Raises `InvalidRequest` for one that is no number within bounds."""
    text = request.query_params.get(name)
    if not text:
        return default
    if not (text.isdecimal() and len(text) < 20 and least <= int(text) <= most):
        raise bad_parameter(name, repr(text[:64]), f"it must be a number from {least} to {most}")
    return int(text)
