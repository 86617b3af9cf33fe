"""Logprobs in columns are the same as in objects, whatever is cut out of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.frontend.request.events import LogprobTable, chosen, num_numbers
from octavo.wire.sampling import Logprobs

numbers = st.floats(-100, 0)
entries = st.lists(
    st.lists(st.tuples(st.integers(0, 2**31 - 1), numbers), max_size=3).flatmap(
        lambda top: st.builds(
            Logprobs,
            numbers,
            st.integers(1, 2**31),
            st.just([token_id for token_id, _ in top]),
            st.just([logprob for _, logprob in top]),
        )
    ),
    max_size=8,
)


@given(st.lists(entries, max_size=4), st.integers(-10, 10), st.integers(-10, 10), st.integers(-10, 10))
def test_a_table_is_what_was_put_in(parts: list[list[Logprobs]], start: int, stop: int, again: int) -> None:
    table, plain = LogprobTable(), []
    views: list[tuple[LogprobTable, list[Logprobs]]] = []
    for part in parts:
        table.extend(part)
        plain += part
        views.append((table[start:stop], plain[start:stop]))
        views.append((table[start:stop][again:], plain[start:stop][again:]))
    assert table == plain
    assert num_numbers(table) == num_numbers(plain)
    assert list(chosen(table)) == chosen(plain)
    for view, expected in views:
        # It stays what it was while the table grows.
        assert view == expected
        assert len(view) == len(expected)
        assert num_numbers(view) == num_numbers(expected)
        assert list(chosen(view)) == chosen(expected)


def test_what_is_not_there_cannot_be_looked_at() -> None:
    table = LogprobTable([Logprobs(-1.0, 1, [], [])])[:0]
    with pytest.raises(IndexError):
        table[0]
    with pytest.raises(ValueError, match="no gaps"):
        table[::2]


def test_a_view_does_not_grow() -> None:
    with pytest.raises(AssertionError):
        LogprobTable()[:].extend([Logprobs(-1.0, 1, [], [])])
