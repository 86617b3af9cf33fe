"""Writes items as they are kept and listed: each with an id, and messages with their content in parts; and reads
references to items."""

import secrets
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from octavo.frontend.errors import bad_parameter

_encode = msgspec.json.Encoder().encode
# How ids of items begin, by their type.
_PREFIXES: Final = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_MAX_ID: Final = 256
# Types of items that have got as far as they will.
_WITH_STATUS: Final = ("message", "function_call", "function_call_output")


class _Reference(msgspec.Struct):
    """Holds what tells a reference from an item."""

    type: Any = None
    id: Any = None


def resolved(field: str, said: bytes, find: Callable[[dict[str, str]], Mapping[str, bytes]]) -> bytes:
    """Returns JSON of an input with items in the place of references to them. `find` returns items by their ids, which
    it is given with the places where they are named."""
    if b"item_reference" not in said:
        return said
    try:
        items = msgspec.json.decode(said, type=list[msgspec.Raw])
        named = msgspec.json.decode(said, type=list[_Reference])
    except msgspec.MsgspecError:
        # A text; or whoever reads the items says what is wrong.
        return said
    places: dict[str, str] = {}
    for place, item in enumerate(named):
        if item.type == "item_reference":
            if not isinstance(item.id, str):
                raise bad_parameter(f"{field}[{place}].id", "no text", "it must be the id of a stored item")
            places.setdefault(item.id, f"{field}[{place}].id")
    found = find(places)
    return _encode(
        [
            msgspec.Raw(found[each.id]) if each.type == "item_reference" else item
            for each, item in zip(named, items, strict=True)
        ]
    )


def input_items(text: bytes) -> list[dict[str, Any]]:
    """Returns the items of an input that was checked, as they are kept: JSON of a text, or of a list of items. Items
    keep their ids."""
    said = msgspec.json.decode(text)
    return [_kept(item) for item in ([{"role": "user", "content": said}] if isinstance(said, str) else said)]


def with_fresh_id(item: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the item under an id that no other has."""
    return {**item, "id": f"{_PREFIXES.get(item['type'], 'item')}_{secrets.token_hex(16)}"}


def _kept(item: Mapping[str, Any]) -> dict[str, Any]:
    kind, found = item.get("type") or "message", item.get("id")
    kept = {"id": found, "type": kind, **{name: value for name, value in item.items() if name not in ("id", "type")}}
    if kind in _WITH_STATUS and not kept.get("status"):
        kept["status"] = "completed"
    if kind == "message" and isinstance(kept.get("content"), str):
        kept["content"] = [_part(item.get("role"), kept["content"])]
    is_id = isinstance(found, str) and 0 < len(found) <= _MAX_ID and found.isprintable()
    return kept if is_id else with_fresh_id(kept)


def _part(role: object, text: str) -> dict[str, Any]:
    if role == "assistant":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "input_text", "text": text}
