"""Draws broken messages: wrong in their bytes, or in their values. Everything is drawn from a `random.Random`."""

from collections.abc import Callable
from enum import Enum
from random import Random
from typing import Any, Final

import msgspec
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from msgspec import inspect

_NUMBERS: Final = (0, 1, -1, 255, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 1e308, 5e-324)
_TEXTS: Final = ("", "\0", "a\nb", "é" * 200, "<|im_start|>", "../../etc/passwd", "{{ 7 * 7 }}", "x" * 5000, "null")
_MAX_DEPTH: Final = 200


def garbage(rng: Random, most: int = 256) -> bytes:
    """Draws up to `most` random bytes."""
    return rng.randbytes(rng.randrange(most))


def mutated(rng: Random, frame: bytes) -> bytes:
    """Changes the bytes in one to four ways."""
    for _ in range(rng.randint(1, 4)):
        frame = rng.choice(_CHANGES)(rng, frame)
    return frame


def _flipped(rng: Random, frame: bytes) -> bytes:
    if not frame:
        return b"\xff"
    place = rng.randrange(len(frame))
    return frame[:place] + bytes([frame[place] ^ 1 << rng.randrange(8)]) + frame[place + 1 :]


def _cut(rng: Random, frame: bytes) -> bytes:
    return frame[: rng.randrange(len(frame) + 1)]


def _without(rng: Random, frame: bytes) -> bytes:
    start, end = _slice(rng, frame)
    return frame[:start] + frame[end:]


def _doubled(rng: Random, frame: bytes) -> bytes:
    start, end = _slice(rng, frame)
    return frame[:end] + frame[start:end] * rng.randint(1, 3) + frame[end:]


def _with_garbage(rng: Random, frame: bytes) -> bytes:
    place = rng.randrange(len(frame) + 1)
    return frame[:place] + garbage(rng, 16) + frame[place:]


def _slice(rng: Random, frame: bytes) -> tuple[int, int]:
    start = rng.randrange(len(frame) + 1)
    return start, min(len(frame), start + rng.randrange(64))


_CHANGES: Final[tuple[Callable[[Random, bytes], bytes], ...]] = (_flipped, _cut, _without, _doubled, _with_garbage)


def any_value(rng: Random) -> Any:
    """Draws a value of JSON's kinds."""
    match rng.randrange(9):
        case 0:
            return None
        case 1:
            return rng.random() < 0.5
        case 2 | 3:
            return rng.choice(_NUMBERS)
        case 4:
            return rng.uniform(-1000, 1000)
        case 5:
            return rng.choice(_TEXTS)
        case 6:
            return "".join(map(chr, rng.choices(range(0xD7FF), k=rng.randrange(8))))
        case 7:
            return [any_value(rng) for _ in range(rng.randrange(4))]
        case _:
            return {str(any_value(rng))[:40]: any_value(rng) for _ in range(rng.randrange(4))}


def changed(rng: Random, value: Any) -> Any:
    """Returns the value of JSON's kinds, with a part of it left out, doubled, wrapped or replaced."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {name: each for name, each in value.items() if name != key}
        return {**value, key: changed(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.85:
        place = rng.randrange(len(value))
        if rng.random() < 0.2:
            return value[:place] + value[place:] * rng.randint(0, 3)
        return [*value[:place], changed(rng, value[place]), *value[place + 1 :]]
    return _other(rng, value)


def _other(rng: Random, value: Any) -> Any:
    if rng.random() < 0.02:
        for _ in range(_MAX_DEPTH):
            value = [value]
        return value
    if isinstance(value, int | float) and rng.random() < 0.5:
        return rng.choice(_NUMBERS)
    return any_value(rng)


_PROTOBUF_TEXTS: Final = (
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
    _F.CPPTYPE_STRING: lambda rng: rng.choice(_PROTOBUF_TEXTS),
}


def fill(rng: Random, message: Message, share: float = 0.4, depth: int = _DEPTH) -> None:
    """Sets about `share` of the message's fields, and of those of the messages in it."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() < share:
            _set(rng, message, field, share, depth)


def drawn(rng: Random, field: FieldDescriptor) -> Any:
    """Draws a value for a field that is no message."""
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


# What is drawn of a list or a text without need: long ones are other tests' matter.
_MOST: Final = 4
_WRONG: Final = 0.02
_CHARACTERS: Final = "abc-\0é\n漢"
_WIDEST: Final = 2**63 - 1

Known = dict[str, tuple[Any, ...]]


class Composer:
    """Draws messages. `known` has values for fields by their names, taken most of the time, so that messages are about
    things that exist. Of all values `wrong` are of another type."""

    def __init__(self, rng: Random, known: Known | None = None, wrong: float = _WRONG) -> None:
        self._rng = rng
        self._wrong = wrong
        self.known: Known = known or {}

    def frame(self, kind: type[msgspec.Struct]) -> bytes:
        """Composes a message of `kind` as bytes."""
        return msgspec.msgpack.encode(self._value(inspect.type_info(kind)))

    def _value(self, kind: inspect.Type) -> Any:
        rng = self._rng
        if rng.random() < self._wrong:
            return rng.choice([None, -1, "x", b"\xff", [], [[]], 1e300, float("nan"), 2**64 - 1])
        match kind:
            case inspect.Metadata(type=inner):
                return self._value(inner)
            case inspect.UnionType(types=types):
                return self._value(rng.choice(types))
            case inspect.StructType():
                return self._struct(kind)
            case inspect.ListType(item_type=item):
                return [self._value(item) for _ in range(self._length(kind.min_length, kind.max_length))]
            case inspect.TupleType(item_types=items):
                return [self._value(item) for item in items]
            case inspect.StrType():
                return "".join(rng.choices(_CHARACTERS, k=self._length(kind.min_length, kind.max_length)))
            case inspect.BytesType():
                return rng.randbytes(self._length(kind.min_length, kind.max_length))
            case inspect.IntType():
                return self._int(kind)
            case inspect.FloatType():
                return self._float(kind)
            case inspect.BoolType():
                return rng.random() < 0.5
            case inspect.EnumType(cls=cls):
                member: Enum = rng.choice(list(cls))
                return member.value
            case inspect.NoneType():
                return None
        raise TypeError(f"nothing is known about drawing {kind}")

    def _struct(self, kind: inspect.StructType) -> list[Any]:
        fields = [self._field(each) for each in kind.fields]
        return fields if kind.tag is None else [kind.tag, *fields]

    def _field(self, field: inspect.Field) -> Any:
        known = self.known.get(field.name)
        if known and self._rng.random() < 0.8:
            return self._rng.choice(known)
        return self._value(field.type)

    def _length(self, least: int | None, most: int | None) -> int:
        return self._rng.randint(least or 0, max(least or 0, min(_MOST, _MOST if most is None else most)))

    def _int(self, kind: inspect.IntType) -> int:
        least = kind.ge if kind.ge is not None else -_WIDEST
        most = kind.le if kind.le is not None else (kind.lt - 1 if kind.lt is not None else _WIDEST)
        near = min(most, least + 20)
        return int(self._rng.choice([least, most, self._rng.randint(least, near), self._rng.randint(least, most)]))

    def _float(self, kind: inspect.FloatType) -> float:
        if kind.ge is None and kind.gt is None:
            return self._rng.choice([0.0, -0.5, -1e300, float("inf"), float("-inf"), float("nan")])
        least, most = kind.ge if kind.ge is not None else kind.gt, kind.le
        assert least is not None
        return self._rng.uniform(least, least + 1.0 if most is None else most)
