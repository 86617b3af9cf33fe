"""Serves conversations: items that are kept under a name, to which responses add their turns."""

import secrets
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw
from starlette.responses import Response

from octavo.frontend.api.body import decoded, given, read_call, unknown_fields_header
from octavo.frontend.errors import bad_parameter
from octavo.frontend.http.connection import MAX_BODY
from octavo.frontend.http.envelope import unix_time
from octavo.frontend.openai.answers import encode
from octavo.frontend.openai.responses_input import Item, messages_of
from octavo.frontend.request.chat import Chat
from octavo.frontend.request.request import GenerationRequest
from octavo.frontend.request.validation import check_form
from octavo.frontend.stored.call import Call, json, listed
from octavo.frontend.stored.items import input_items
from octavo.frontend.stored.store import Store
from octavo.frontend.stored.values import NewRecord

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


async def create(call: Call) -> Response:
    """Makes a conversation, with the items that it begins with."""
    body, unknown = await read_call(call.request, ConversationBody, {}, call.api.generation.beginnings)
    items = await _items_of(call, body.items)
    conversation: dict[str, Any] = {
        "id": f"conv_{secrets.token_hex(16)}",
        "object": "conversation",
        "created_at": unix_time(),
        "metadata": body.metadata or {},
    }
    new = NewRecord(call.kind, call.tenant, conversation["id"], encode(conversation), items)
    await call.stored.store.call(Store.add, new)
    return _answer(conversation, unknown)


async def retrieve(call: Call) -> Response:
    """Answers with a conversation, without its items."""
    return json((await call.record()).body)


async def update(call: Call) -> Response:
    """Replaces the metadata of a conversation."""
    body, unknown = await read_call(call.request, ConversationBody, {"items": ()}, call.api.generation.beginnings)
    record = await call.record()
    conversation = {**msgspec.json.decode(record.body), "metadata": body.metadata or {}}
    await call.stored.store.call(Store.change, call.kind, call.tenant, record.id, encode(conversation))
    return _answer(conversation, unknown)


async def add_items(call: Call) -> Response:
    """Appends items to a conversation."""
    body, unknown = await read_call(call.request, ItemsBody, {}, call.api.generation.beginnings)
    items = input_items(await _items_of(call, body.items))
    added = await call.stored.store.call(Store.add_items, call.tenant, call.record_id, items)
    return _answer(listed(added), unknown)


async def retrieve_item(call: Call) -> Response:
    """Answers with an item of a conversation."""
    record = await call.record()
    return json(await call.stored.store.call(Store.item, record.key, call.request.path_params["item_id"]))


async def delete_item(call: Call) -> Response:
    """Removes an item of a conversation, and answers with the conversation."""
    record, item_id = await call.record(), call.request.path_params["item_id"]
    await call.stored.store.call(Store.remove_item, call.tenant, record.id, item_id)
    return json(record.body)


async def _items_of(call: Call, raw: Raw) -> bytes:
    """Returns JSON of items, without references. Raises `InvalidRequest`, `Unsupported` for what no prompt could be
    made of, and `NotFound` for references to what is not there."""
    text = await call.stored.store.call(Store.resolved, call.tenant, "items", given(raw) or b"[]")
    items = decoded("items", Raw(text), list[Item], MAX_BODY) or []
    if len(items) > _MAX_ITEMS:
        raise bad_parameter("items", f"a list of {len(items)}", f"at most {_MAX_ITEMS} are added at once")
    if items:
        check_form(GenerationRequest(Chat(tuple(messages_of(items, [])))))
    return text


def _answer(body: dict[str, Any], unknown: list[str]) -> Response:
    response = json(body)
    response.headers.update(unknown_fields_header(unknown))
    return response
