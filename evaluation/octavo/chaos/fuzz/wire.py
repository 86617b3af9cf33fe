"""Messages of the inner wires with anything in their fields that the types allow, and some that they do not."""

from enum import Enum
from random import Random
from typing import Any, Final

import msgspec
from msgspec import inspect

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
        """A message of `kind` as bytes."""
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
