"""Serves conversations: items that are kept under a name, to which responses add their turns."""

import secrets
from functools import partial
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw
from starlette.requests import Request
from starlette.responses import Response

from octavo.frontend.api.body import decoded, given, read_call, unknown_fields_header
from octavo.frontend.api.endpoint import Api, origin_of
from octavo.frontend.errors import bad_parameter
from octavo.frontend.http.connection import MAX_BODY
from octavo.frontend.http.envelope import unix_time
from octavo.frontend.openai.answers import encode
from octavo.frontend.openai.responses_input import Item, messages_of
from octavo.frontend.request.chat import Chat
from octavo.frontend.request.request import GenerationRequest
from octavo.frontend.request.validation import check_form
from octavo.frontend.stored.items import kept_items, resolved
from octavo.frontend.stored.retrieval import items_page, json, listed
from octavo.frontend.stored.service import StoredResponses
from octavo.frontend.stored.store import Store
from octavo.frontend.stored.values import Kind, Record

# As OpenAI bounds them.
_MAX_ITEMS: Final = 20
_Key = Annotated[str, Meta(max_length=64)]
_Value = Annotated[str, Meta(max_length=512)]
_Metadata = Annotated[dict[_Key, _Value], Meta(max_length=16)]


class ConversationBody(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the body that makes or changes a conversation."""

    metadata: _Metadata | None = None
    items: Raw = Raw()


class ItemsBody(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the body that adds items to a conversation."""

    items: Raw


async def create(api: Api, request: Request, stored: StoredResponses) -> Response:
    """Makes a conversation, with the items that it begins with."""
    body, unknown = await read_call(request, ConversationBody, {}, api.generation.beginnings)
    items = await _items_of(request, stored, body.items)
    conversation: dict[str, Any] = {
        "id": f"conv_{secrets.token_hex(16)}",
        "object": "conversation",
        "created_at": unix_time(),
        "metadata": body.metadata or {},
    }
    text, tenant = encode(conversation), origin_of(request)["tenant"]
    await stored.store.call(Store.add_conversation, tenant, conversation["id"], text, items)
    return _answer(text, unknown)


async def retrieve(api: Api, request: Request, stored: StoredResponses) -> Response:
    """Answers with a conversation, without its items."""
    return json((await _found(request, stored)).body)


async def update(api: Api, request: Request, stored: StoredResponses) -> Response:
    """Replaces the metadata of a conversation."""
    body, unknown = await read_call(request, ConversationBody, {"items": ()}, api.generation.beginnings)
    record = await _found(request, stored)
    text = encode({**msgspec.json.decode(record.body), "metadata": body.metadata or {}})
    await stored.store.call(Store.change, Kind.CONVERSATION, origin_of(request)["tenant"], record.id, text)
    return _answer(text, unknown)


async def delete(api: Api, request: Request, stored: StoredResponses) -> Response:
    """Removes a conversation with its items; responses that were part of it stay."""
    tenant, conversation_id = _named(request)
    await stored.store.call(Store.remove, Kind.CONVERSATION, tenant, conversation_id)
    return json(encode({"id": conversation_id, "object": "conversation.deleted", "deleted": True}))


async def list_items(api: Api, request: Request, stored: StoredResponses) -> Response:
    """Lists items of a conversation, newest first unless asked otherwise."""
    return await items_page(request, stored, await _found(request, stored))


async def add_items(api: Api, request: Request, stored: StoredResponses) -> Response:
    """Appends items to a conversation."""
    body, unknown = await read_call(request, ItemsBody, {}, api.generation.beginnings)
    items = await _items_of(request, stored, body.items)
    added = await stored.store.call(Store.add_items, *_named(request), items)
    return _answer(listed(added), unknown)


async def retrieve_item(api: Api, request: Request, stored: StoredResponses) -> Response:
    """Answers with an item of a conversation."""
    record = await _found(request, stored)
    return json(await stored.store.call(Store.item, record.key, request.path_params["item_id"]))


async def delete_item(api: Api, request: Request, stored: StoredResponses) -> Response:
    """Removes an item of a conversation, and answers with the conversation."""
    record = await _found(request, stored)
    await stored.store.call(Store.remove_item, *_named(request), request.path_params["item_id"])
    return json(record.body)


async def _items_of(request: Request, stored: StoredResponses, raw: Raw) -> list[dict[str, Any]]:
    """Returns items as they are kept. Raises `InvalidRequest`, `Unsupported` for what no prompt could be made of, and
    `NotFound` for references to what is not there."""
    text = await stored.store.call(_resolved, origin_of(request)["tenant"], given(raw))
    items = decoded("items", Raw(text), list[Item], MAX_BODY) or []
    if len(items) > _MAX_ITEMS:
        raise bad_parameter("items", f"a list of {len(items)}", f"at most {_MAX_ITEMS} are added at once")
    if items:
        check_form(GenerationRequest(Chat(tuple(messages_of(items, [])))))
    return kept_items(msgspec.json.decode(text or b"[]"))


def _resolved(store: Store, tenant: str, text: bytes) -> bytes:
    return resolved("items", text, partial(store.items_named, tenant))


def _named(request: Request) -> tuple[str, str]:
    """Returns the tenant, and the conversation's id that the address has."""
    return origin_of(request)["tenant"], request.path_params["conversation_id"]


async def _found(request: Request, stored: StoredResponses) -> Record:
    return await stored.store.call(Store.find, Kind.CONVERSATION, *_named(request))


def _answer(text: bytes, unknown: list[str]) -> Response:
    response = json(text)
    response.headers.update(unknown_fields_header(unknown))
    return response
