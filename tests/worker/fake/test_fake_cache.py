"""The fake's memory does with blocks what a real one does."""

from array import array

import pytest

from octavo.testing.oracles.worker_plans import moves
from octavo.wire.base import NULL_BLOCK
from octavo.worker.fake.cache import FakeCache, FakeCacheError


def make_cache() -> FakeCache:
    """Four device blocks of two tokens, holding 0 to 7, and two CPU blocks."""
    cache = FakeCache(num_blocks=4, num_cpu_blocks=2, block_size=2)
    cache.write([0, 1, 2, 3], 0, list(range(8)))
    return cache


def tokens(cache: FakeCache, table: list[int], start: int, end: int) -> list[int]:
    return list(array("i", cache.read(table, start, end)))


def test_tokens_are_read_back_through_the_table_they_were_written_through() -> None:
    cache = make_cache()
    cache.write([3, 1], 1, [20, 21])
    assert tokens(cache, [3, 1], 0, 4) == [6, 20, 21, 3]
    assert tokens(cache, [0, 1, 2, 3], 1, 7) == [1, 21, 3, 4, 5, 6]


def test_swapped_out_and_in_again_blocks_hold_what_they_held() -> None:
    cache = make_cache()
    cache.move(moves(swap_out=[(0, 1), (3, 0)]))
    cache.write([0, 3], 0, [90, 91, 92, 93])
    cache.move(moves(swap_in=[(1, 2), (0, 1)]))
    assert tokens(cache, [2, 1], 0, 4) == [0, 1, 6, 7]


def test_copies_come_after_swaps_and_may_fill_what_they_left() -> None:
    cache = make_cache()
    cache.move(moves(swap_out=[(0, 0)], copy=[(2, 0)]))
    assert tokens(cache, [0], 0, 2) == [4, 5]
    cache.move(moves(swap_in=[(0, 1)], copy=[(1, 3)]))
    assert tokens(cache, [1, 3], 0, 4) == [0, 1, 0, 1]


def test_moves_of_one_kind_all_read_before_any_writes() -> None:
    cache = make_cache()
    cache.move(moves(copy=[(0, 1), (1, 0)]))
    assert tokens(cache, [0, 1], 0, 4) == [2, 3, 0, 1]


@pytest.mark.parametrize("table", [[0], [NULL_BLOCK, 1], [0, NULL_BLOCK]])
def test_a_position_without_a_block_can_be_neither_read_nor_written(table: list[int]) -> None:
    cache = make_cache()
    with pytest.raises(FakeCacheError, match="positions 1 to 3 need blocks 0 to 1"):
        cache.read(table, 1, 4)
    with pytest.raises(FakeCacheError, match="positions 1 to 3 need blocks 0 to 1"):
        cache.write(table, 1, [1, 2, 3])


def test_blocks_outside_what_is_asked_for_do_not_matter() -> None:
    assert tokens(make_cache(), [NULL_BLOCK, 2, NULL_BLOCK], 2, 4) == [4, 5]
