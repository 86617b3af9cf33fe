"""Which values of a parametrized test `make test` tries; `make test-deep` tries the others.

Where a test has several parameters, `make test` tries the combinations of values none of which is deep.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def deep_unless(is_shallow: Callable[[Any], bool], values: Iterable[Any]) -> list[Any]:
    """All `values`, in order, as parameters; each that `is_shallow` denies is marked deep."""
    return [value if is_shallow(value) else pytest.param(value, marks=pytest.mark.deep) for value in values]


def every(step: int, values: Iterable[Any], *, first: int = 0) -> list[Any]:
    """All `values`, in order, as parameters; all but every `step`-th from number `first` on are marked deep."""
    return [
        value if number % step == first else pytest.param(value, marks=pytest.mark.deep)
        for number, value in enumerate(values)
    ]


def every_row(step: int, rows: Iterable[tuple[Any, ...]]) -> list[Any]:
    """The same for rows of several parameters, from the first on."""
    return [
        row if number % step == 0 else pytest.param(*row, marks=pytest.mark.deep) for number, row in enumerate(rows)
    ]


def deep_rows(*rows: tuple[Any, ...]) -> list[Any]:
    """These rows of several parameters, marked deep."""
    return [pytest.param(*row, marks=pytest.mark.deep) for row in rows]


def deep(*values: Any) -> list[Any]:
    """These `values` as parameters marked deep."""
    return deep_unless(lambda _: False, values)
