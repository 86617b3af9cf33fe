"""Messages of protobuf with anything in every field of theirs."""

from collections.abc import Callable
from random import Random
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from octavo.chaos.fuzz.noise import garbage

_TEXTS: Final = (
    "",
    "x",
    "hello",
    "\0",
    "a\nb",
    "é" * 130,
    "<|im_end|>",
    "{}",
    "[",
    "(",
    "byte-model",
    "user",
    "a" * 600,
)
_DOUBLES: Final = (0.0, 1.0, -1.0, 0.5, 1e308, float("nan"), float("inf"), float("-inf"))
_DEPTH: Final = 6

_F = FieldDescriptor
_DRAW: Final[dict[int, Callable[[Random], Any]]] = {
    _F.CPPTYPE_INT32: lambda rng: rng.choice([0, 1, -1, 2**31 - 1, -(2**31), rng.randrange(100)]),
    _F.CPPTYPE_INT64: lambda rng: rng.choice([0, 1, -1, 2**63 - 1, -(2**63), rng.randrange(100)]),
    _F.CPPTYPE_UINT32: lambda rng: rng.choice([0, 1, 2**31, 2**32 - 1, rng.randrange(300)]),
    _F.CPPTYPE_UINT64: lambda rng: rng.choice([0, 1, 2**63, 2**64 - 1, rng.randrange(300)]),
    _F.CPPTYPE_DOUBLE: lambda rng: rng.choice([*_DOUBLES, rng.random()]),
    _F.CPPTYPE_FLOAT: lambda rng: rng.choice([0.0, 1.0, -1.0, 0.5, float("nan"), float("inf"), rng.random()]),
    _F.CPPTYPE_BOOL: lambda rng: rng.random() < 0.5,
    _F.CPPTYPE_ENUM: lambda rng: rng.choice([0, 1, 2, 3, 77, -1, 2**31 - 1]),
    _F.CPPTYPE_STRING: lambda rng: rng.choice(_TEXTS),
}


def fill(rng: Random, message: Message, share: float = 0.4, depth: int = _DEPTH) -> None:
    """Sets about `share` of the message's fields, and of those of the messages in it."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() < share:
            _set(rng, message, field, share, depth)


def drawn(rng: Random, field: FieldDescriptor) -> Any:
    """A value for a field that is no message."""
    if field.type == _F.TYPE_BYTES:
        return garbage(rng, 32)
    return _DRAW[field.cpp_type](rng)


def _set(rng: Random, message: Message, field: Any, share: float, depth: int) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        _set_entries(rng, getattr(message, field.name), field)
    elif field.message_type is not None:
        _set_messages(rng, message, field, share, depth)
    elif field.is_repeated:
        getattr(message, field.name).extend(drawn(rng, field) for _ in range(rng.randrange(5)))
    else:
        setattr(message, field.name, drawn(rng, field))


def _set_entries(rng: Random, entries: Any, field: Any) -> None:
    key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    for _ in range(rng.randrange(4)):
        if value.message_type is None:
            entries[drawn(rng, key)] = drawn(rng, value)
        else:
            fill(rng, entries[drawn(rng, key)], depth=1)


def _set_messages(rng: Random, message: Message, field: FieldDescriptor, share: float, depth: int) -> None:
    if depth == 0:
        return
    if field.is_repeated:
        for _ in range(rng.randrange(3)):
            fill(rng, getattr(message, field.name).add(), share, depth - 1)
    else:
        inner = getattr(message, field.name)
        inner.SetInParent()
        fill(rng, inner, share, depth - 1)
