from hypothesis import given
from hypothesis import strategies as st

from octavo.wire import history

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=30)


@given(TOKENS, TOKENS)
def test_hashing_in_parts_equals_hashing_at_once(head: list[int], tail: list[int]) -> None:
    assert history.extend(history.extend(history.EMPTY, head), tail) == history.extend(history.EMPTY, head + tail)


@given(TOKENS, st.integers(0, 2**31 - 1))
def test_appending_a_token_equals_extending_by_it(tokens: list[int], token: int) -> None:
    assert history.append(history.extend(history.EMPTY, tokens), token) == history.extend(
        history.EMPTY, [*tokens, token]
    )


def test_every_version_computes_the_same_hash() -> None:
    """Frontends compare the hashes of schedulers of another version with their own."""
    assert history.extend(history.EMPTY, [1, 2, 49151]) == 0xD04A0E18668946EF


@given(TOKENS, st.data())
def test_a_changed_token_changes_the_hash(tokens: list[int], data: st.DataObject) -> None:
    tokens = [*tokens, 5]
    position = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens[:position], tokens[position] + 1, *tokens[position + 1 :]]
    assert history.extend(history.EMPTY, changed) != history.extend(history.EMPTY, tokens)
