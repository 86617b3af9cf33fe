"""Derives the table of a request's fields from the types of its class: their limits, and their names elsewhere."""

import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from math import inf
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from msgspec import Meta


@dataclass(frozen=True)
class Elsewhere:
    """Says of a field, in its annotation, where else than in a request it is found.

    `called` is its name in OpenAI's API and vLLM's, where that differs. If it is `recommended`, it says how tokens are
    sampled, and a model's generation_config.json may hold a default for it.
    """

    called: str = ""
    recommended: bool = False


@dataclass(frozen=True)
class Range:
    """Bounds a number from `low` to `high`, which `rule` says in words; a `whole` one has no fraction."""

    low: float
    high: float
    rule: str
    whole: bool = False

    def holds(self, value: float) -> bool:
        """Tells whether `value` is allowed. NaN never is."""
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Field:
    """Is a row of the table. `most` bounds the entries of a collection, or the characters of a text (`is_label`)."""

    called: str
    recommended: bool
    range: Range | None
    most: int | None
    is_label: bool


def table_of(kind: type[Any]) -> dict[str, Field]:
    """Returns a row for each field of a dataclass, in order."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: _field(field.name, hints[field.name]) for field in fields(kind)}


def range_of(hint: Any) -> Range:
    """Returns the range of a number's type, whose `Meta` has the words as its description."""
    plain, marks = _plain_of(hint)
    [found] = _ranges(plain, marks)
    return found


def _field(name: str, hint: Any) -> Field:
    plain, marks = _plain_of(hint)
    elsewhere = next((mark for mark in marks if isinstance(mark, Elsewhere)), Elsewhere())
    most = next((mark.max_length for mark in marks if isinstance(mark, Meta) and mark.max_length), None)
    return Field(
        elsewhere.called or name,
        elsewhere.recommended,
        range=next(_ranges(plain, marks), None),
        most=most,
        is_label=plain is str and most is not None,
    )


def _ranges(plain: Any, marks: Iterable[Any]) -> Iterator[Range]:
    for mark in marks:
        if isinstance(mark, Meta) and mark.description:
            # 5e-324 is the least number above 0.
            low = 5e-324 if mark.ge is None else mark.ge
            yield Range(low, inf if mark.le is None else mark.le, mark.description, whole=plain is int)


def _plain_of(hint: Any) -> tuple[Any, list[Any]]:
    """Returns the type without None and annotations, and these annotations."""
    marks = list(_marks(hint))
    while get_origin(hint) in (Annotated, Union, types.UnionType):
        hint = get_args(hint)[0]
    return hint, marks


def _marks(hint: Any) -> Iterator[Any]:
    if get_origin(hint) is Annotated:
        kind, *marks = get_args(hint)
        yield from (*marks, *_marks(kind))
    elif get_origin(hint) in (Union, types.UnionType):
        for each in get_args(hint):
            yield from _marks(each)
