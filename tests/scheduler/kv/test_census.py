"""What a cell tells of its blocks: when the first replica holds one, when the last has dropped it, parents first."""

from octavo.scheduler.core.sequence import Sequence
from octavo.scheduler.kv.census import AllBlocksCleared, BlockCensus, BlockRemoved, BlockStored, short_hash
from octavo.scheduler.kv.prefix_cache import CachedBlock, FilledBlock, PrefixCache, filled_block
from octavo.wire import history
from octavo.wire.requests import CacheKey


def block(name: int, parent: int | None, depth: int = 0, kv_group: int = 0, window: int = 0) -> FilledBlock:
    """A block of two tokens; its hash is its name."""
    value, before = (None if each is None else each.to_bytes(32, "big") for each in (name, parent))
    assert value is not None
    return FilledBlock(CachedBlock(value, kv_group, depth), before, [name, name + 1], "", window)


A, B, C, D = block(10, None), block(20, 10, 1), block(30, 20, 2), block(40, 10, 1)


def stored(parent: int | None, *names: int, kv_group: int = 0, window: int = 0) -> BlockStored:
    return BlockStored(
        kv_group, window, "", 2, parent, [*names], [token for name in names for token in (name, name + 1)]
    )


def census(*blocks: FilledBlock, num_groups: int = 1) -> BlockCensus:
    """One that has told of these."""
    made = BlockCensus()
    made.joined(num_groups)
    for each in blocks:
        made.stored(each)
    made.take()
    return made


def test_blocks_that_follow_one_another_are_told_as_one() -> None:
    made = census()
    for each in (A, B, D, C):
        made.stored(each)
    assert made.take() == [stored(None, 10, 20, 30), stored(10, 40)]
    assert made.take() == []


def test_a_block_is_told_once_and_removed_with_its_last_holder() -> None:
    made = census(A)
    made.stored(A)
    assert made.take() == []
    made.removed(A.content)
    assert made.take() == []
    made.removed(A.content)
    assert made.take() == [BlockRemoved(0, [10])]


def test_what_comes_and_goes_between_two_turns_is_not_told() -> None:
    made = census(A)
    made.stored(B)
    made.removed(B.content)
    made.removed(A.content)
    made.stored(A)
    assert made.take() == []


def test_what_was_never_told_is_not_removed() -> None:
    made = census()
    made.removed(A.content)
    assert made.take() == []


def test_a_child_is_withheld_until_its_parent_is_known() -> None:
    made = census()
    made.stored(B)
    made.stored(C)
    assert made.take() == []
    made.stored(A)
    assert made.take() == [stored(None, 10, 20, 30)]


def test_a_withheld_child_that_goes_is_never_told() -> None:
    made = census()
    made.stored(B)
    made.take()
    made.removed(B.content)
    made.stored(A)
    assert made.take() == [stored(None, 10)]


def test_a_child_whose_parent_goes_before_it_was_told_is_withheld() -> None:
    made = census()
    made.stored(A)
    made.stored(B)
    made.removed(A.content)
    assert made.take() == []
    made.stored(A)
    assert made.take() == [stored(None, 10, 20)]


def test_a_child_stays_where_its_parent_is_removed() -> None:
    made = census(A, B)
    made.removed(A.content)
    assert made.take() == [BlockRemoved(0, [10])]
    made.stored(A)
    assert made.take() == [stored(None, 10)]


def test_groups_are_told_apart_and_a_window_needs_no_parent_of_its_own() -> None:
    made = census(num_groups=2)
    for each in (A, B, block(20, 10, 1, kv_group=1, window=4)):
        made.stored(each)
    assert made.take() == [stored(None, 10, 20), stored(10, 20, kv_group=1, window=4)]
    for each in (A, B, block(20, 10, 1, kv_group=1)):
        made.removed(each.content)
    assert made.take() == [BlockRemoved(0, [10, 20]), BlockRemoved(1, [20])]


def test_where_none_is_held_a_replica_that_joins_clears_all() -> None:
    made = BlockCensus()
    assert made.take() == []
    made.joined(1)
    assert made.take() == [AllBlocksCleared()]
    made.stored(A)
    made.joined(1)
    assert made.take() == [stored(None, 10)]
    made.removed(A.content)
    made.joined(1)
    assert made.take() == [AllBlocksCleared()]


# -- prefix caches ----------------------------------------------------------------------------------------------------


def test_a_block_is_told_of_once_its_step_is_answered() -> None:
    made = census()
    cache = PrefixCache(1, made)
    cache.insert(A.content, 3, 1, 1, A)
    assert made.take() == []
    cache.step_answered(1, valid=True)
    assert made.take() == [stored(None, 10)]
    cache.remove(3)
    assert made.take() == [BlockRemoved(0, [10])]


def test_a_block_of_a_failed_or_withdrawn_step_is_never_told_of() -> None:
    made = census()
    cache = PrefixCache(1, made)
    cache.insert(A.content, 3, 1, 1, A)
    cache.insert(B.content, 4, 2, 1, B)
    cache.withdraw({1}, after_step=1)
    cache.step_answered(1, valid=False)
    cache.step_answered(2, valid=True)
    cache.check()
    assert made.take() == []


def test_a_cache_that_closes_tells_that_all_is_gone_and_then_nothing() -> None:
    made = census()
    cache = PrefixCache(1, made)
    cache.insert(A.content, 3, 1, 1, A)
    cache.step_answered(1, valid=True)
    cache.insert(B.content, 4, 2, 1, B)
    made.take()
    cache.close()
    cache.remove(3)
    cache.step_answered(2, valid=True)
    assert made.take() == [BlockRemoved(0, [10])]


def test_salted_blocks_are_nobodys_to_know_of_and_those_before_are() -> None:
    sequence = Sequence(
        0, [1, 2, 3, 4, 5, 6], [], history.EMPTY, cache_key=CacheKey(adapter="a", salt="s", salted_from=3)
    )
    values = [CachedBlock(bytes(32), 0, depth) for depth in range(3)]
    first = filled_block(sequence, values[0], 2, 5)
    assert first == FilledBlock(values[0], None, [1, 2], "a", 5)
    # The second block holds the third token, which is shared, and the fourth, which is not.
    assert [filled_block(sequence, each, 2, 5) for each in values[1:]] == [None, None]


def test_a_hash_is_told_by_its_last_64_bits() -> None:
    assert short_hash(bytes(range(32))) == int.from_bytes(bytes(range(24, 32)), "big")
