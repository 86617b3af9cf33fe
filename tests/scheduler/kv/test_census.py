"""What a cell tells of its blocks: when the first replica holds one, when the last has dropped it, parents first."""

import copy

import pytest

from octavo.scheduler.kv.census import (
    AllBlocksCleared,
    BlockCensus,
    BlockRemoved,
    BlockStored,
    KVEvent,
    short_hashes,
)
from octavo.testing.fakes.cached_blocks import CachedBlocks
from octavo.wire.requests import CacheKey

# Three blocks of two tokens, and another that goes on after the first.
ABC, AD = [1, 2, 3, 4, 5, 6], [1, 2, 7, 8]
A, AB = ABC[:2], ABC[:4]


@pytest.fixture
def census() -> BlockCensus:
    return BlockCensus()


@pytest.fixture
def replica(census: BlockCensus) -> CachedBlocks:
    made = CachedBlocks(census)
    assert census.take() == [AllBlocksCleared()]
    return made


def stored(token_ids: list[int], first: int = 0, kv_group: int = 0, window: int = 0, adapter: str = "") -> BlockStored:
    hashes = CachedBlocks(BlockCensus()).hashes(token_ids)
    parent = hashes[first - 1] if first else None
    return BlockStored(kv_group, window, adapter, 2, parent, hashes[first:], token_ids[2 * first :])


def removed(token_ids: list[int], first: int = 0, kv_group: int = 0) -> BlockRemoved:
    return BlockRemoved(kv_group, sorted(CachedBlocks(BlockCensus()).hashes(token_ids)[first:]))


def taken(census: BlockCensus) -> list[KVEvent]:
    """What it tells, with hashes that are removed in order."""
    return [
        BlockRemoved(event.kv_group, sorted(event.hashes)) if isinstance(event, BlockRemoved) else event
        for event in census.take()
    ]


def test_blocks_that_follow_one_another_are_told_as_one(census: BlockCensus, replica: CachedBlocks) -> None:
    replica.hold(ABC)
    replica.hold(AD, first=1)
    assert taken(census) == [stored(ABC), stored(AD, first=1)]
    assert taken(census) == []


def test_a_block_is_told_of_once_its_step_is_answered(census: BlockCensus, replica: CachedBlocks) -> None:
    step = replica.fill(ABC)
    assert taken(census) == []
    replica.cache.step_answered(step, valid=True)
    assert taken(census) == [stored(ABC)]
    replica.drop(ABC)
    assert taken(census) == [removed(ABC)]


def test_a_block_of_a_failed_or_withdrawn_step_is_never_told_of(census: BlockCensus, replica: CachedBlocks) -> None:
    failed, withdrawn = replica.fill(AB), replica.fill(ABC, first=2)
    replica.cache.withdraw({withdrawn}, after_step=failed)
    replica.cache.step_answered(failed, valid=False)
    replica.cache.step_answered(withdrawn, valid=True)
    assert taken(census) == []


def test_a_block_is_told_once_and_removed_with_its_last_holder(census: BlockCensus, replica: CachedBlocks) -> None:
    other = CachedBlocks(census)
    for each in (replica, other):
        each.hold(AB)
    assert taken(census) == [stored(AB)]
    replica.drop(AB)
    assert taken(census) == []
    other.drop(AB, first=1)
    assert taken(census) == [removed(AB, first=1)]


def test_what_comes_and_goes_between_two_turns_is_not_told(census: BlockCensus, replica: CachedBlocks) -> None:
    replica.hold(A)
    taken(census)
    replica.hold(AB, first=1)
    replica.drop(AB)
    replica.hold(A)
    assert taken(census) == []


def test_a_block_that_another_still_computes_when_its_holder_drops_it_is_told_anew(
    census: BlockCensus, replica: CachedBlocks
) -> None:
    other = CachedBlocks(census)
    replica.hold(A)
    step = other.fill(A)
    assert taken(census) == [stored(A)]
    replica.drop(A)
    assert taken(census) == [removed(A)]
    other.cache.step_answered(step, valid=True)
    assert taken(census) == [stored(A)]


def test_a_block_that_is_filled_anew_is_told_anew(census: BlockCensus, replica: CachedBlocks) -> None:
    replica.hold(A)
    taken(census)
    replica.drop(A)
    step = replica.fill(A)
    assert taken(census) == [removed(A)]
    replica.cache.step_answered(step, valid=True)
    assert taken(census) == [stored(A)]


def test_a_block_that_its_last_holder_drops_while_another_computes_it_is_told_anew(
    census: BlockCensus, replica: CachedBlocks
) -> None:
    other = CachedBlocks(census)
    replica.hold(A)
    taken(census)
    step = other.fill(A)
    assert taken(census) == []
    replica.drop(A)
    assert taken(census) == [removed(A)]
    other.cache.step_answered(step, valid=True)
    assert taken(census) == [stored(A)]


def test_a_child_is_withheld_until_its_parent_is_known(census: BlockCensus, replica: CachedBlocks) -> None:
    replica.hold(ABC, first=1)
    assert taken(census) == []
    replica.hold(A)
    assert taken(census) == [stored(A), stored(ABC, first=1)]


def test_a_withheld_child_that_goes_is_never_told(census: BlockCensus, replica: CachedBlocks) -> None:
    replica.hold(AB, first=1)
    taken(census)
    replica.drop(AB, first=1)
    replica.hold(A)
    assert taken(census) == [stored(A)]


def test_a_child_stays_where_its_parent_is_removed(census: BlockCensus, replica: CachedBlocks) -> None:
    replica.hold(AB)
    taken(census)
    replica.drop(A)
    assert taken(census) == [removed(A)]
    replica.hold(AB[:2])
    assert taken(census) == [stored(A)]


def test_groups_are_told_apart_and_a_window_needs_no_parent_of_its_own(census: BlockCensus) -> None:
    replica = CachedBlocks(census, windows=(0, 4))
    taken(census)
    replica.hold(AB)
    replica.hold(AB, first=1, kv_group=1)
    assert taken(census) == [stored(AB), stored(AB, first=1, kv_group=1, window=4)]
    replica.drop(AB)
    replica.drop(AB, first=1, kv_group=1)
    assert taken(census) == [removed(AB), removed(AB, first=1, kv_group=1)]


def test_a_first_replica_that_joins_clears_all_and_a_second_does_not(census: BlockCensus) -> None:
    assert taken(census) == []
    replica = CachedBlocks(census)
    assert taken(census) == [AllBlocksCleared()]
    CachedBlocks(census)
    replica.hold(A)
    assert taken(census) == [stored(A)]


def test_what_a_replica_that_leaves_held_is_gone(census: BlockCensus, replica: CachedBlocks) -> None:
    replica.hold(AB)
    replica.fill(ABC, first=2)
    taken(census)
    replica.cache.close()
    assert taken(census) == [removed(AB)]
    replica.drop(ABC)
    assert taken(census) == []
    CachedBlocks(census).hold(A)
    assert taken(census) == [AllBlocksCleared(), stored(A)]


def test_nobody_is_told_what_becomes_of_a_copy(census: BlockCensus, replica: CachedBlocks) -> None:
    replica.hold(A)
    taken(census)
    copied = copy.deepcopy(replica.cache)
    copied.remove(1)
    assert taken(census) == []


def test_salted_blocks_are_nobodys_to_know_of_and_those_before_are(census: BlockCensus, replica: CachedBlocks) -> None:
    # The second block holds the third token, which is shared, and the fourth, which is not.
    replica.hold(ABC, key=CacheKey(salt="s", salted_from=3))
    assert taken(census) == [stored(A)]
    replica.hold(AD, key=CacheKey(salt="s"))
    assert taken(census) == []


def test_blocks_of_an_adapter_are_told_under_its_name(census: BlockCensus, replica: CachedBlocks) -> None:
    replica.hold(A, key=CacheKey(adapter="a"))
    (event,) = taken(census)
    assert isinstance(event, BlockStored)
    assert event.adapter == "a"
    assert event.hashes != stored(A).hashes


def test_a_hash_is_told_by_its_last_64_bits() -> None:
    assert short_hashes([bytes(range(32))]) == [int.from_bytes(bytes(range(24, 32)), "big")]
