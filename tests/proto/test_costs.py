"""What a chunk of tokens attends to, counted one by one."""

from hypothesis import given
from hypothesis import strategies as st

from octavo.wire.costs import attended_pairs


@given(st.integers(0, 40), st.integers(0, 40), st.lists(st.integers(0, 30), min_size=1, max_size=3))
def test_pairs_are_those_that_the_windows_let_each_token_see(context: int, num_tokens: int, windows: list[int]) -> None:
    positions = range(context, context + num_tokens)
    seen = [min(position + 1, window or position + 1) for window in windows for position in positions]
    assert attended_pairs(context, num_tokens, windows) == sum(seen) / len(windows)
