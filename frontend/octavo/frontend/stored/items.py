"""Writes items as they are kept and listed: each with an id, and messages with their content in parts."""

import secrets
from collections.abc import Mapping
from typing import Any, Final

import msgspec

# How ids of items begin, by their type.
_PREFIXES: Final = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_MAX_ID: Final = 256
# Types of items that have got as far as they will.
_WITH_STATUS: Final = ("message", "function_call", "function_call_output")


def input_items(text: bytes) -> list[dict[str, Any]]:
    """Returns the items of an input that was checked: JSON of a text, or of a list of items. Items keep their ids."""
    said = msgspec.json.decode(text)
    items = [{"role": "user", "content": said}] if isinstance(said, str) else said
    return kept_items(items)


def kept_items(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns items that were checked, as they are kept."""
    return [_kept(item) for item in items]


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
