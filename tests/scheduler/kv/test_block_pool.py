from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from octavo.scheduler.kv.blocks import BlockPool


def free(pool: BlockPool, block_id: int, *, first: bool = False) -> None:
    """Lets go of a block, and gives it back if nobody else holds it."""
    if pool.release(block_id):
        pool.give_back(block_id, first=first)


def test_allocates_each_block_once_and_refuses_more_than_are_free() -> None:
    pool = BlockPool(4)
    assert sorted(pool.allocate(3) + pool.allocate(1)) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="1 blocks wanted, 0 free"):
        pool.allocate(1)


def test_a_refused_allocation_takes_nothing() -> None:
    pool = BlockPool(4)
    with pytest.raises(ValueError, match="5 blocks wanted"):
        pool.allocate(5)
    assert pool.num_free == 4


def test_reuses_the_block_freed_longest_ago_first() -> None:
    pool = BlockPool(3)
    first, second, third = pool.allocate(3)
    for block_id in (second, first, third):
        free(pool, block_id)
    assert pool.allocate(3) == [second, first, third]


def test_a_block_freed_to_the_front_is_taken_first() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    free(pool, first)
    free(pool, second, first=True)
    assert pool.allocate(3) == [second, 2, first]


def test_a_shared_block_is_free_only_when_the_last_holder_lets_go() -> None:
    pool = BlockPool(2)
    (block_id,) = pool.allocate(1)
    pool.share([block_id])
    free(pool, block_id)
    assert pool.ref_count(block_id) == 1
    assert pool.num_free == 1
    free(pool, block_id)
    assert pool.ref_count(block_id) == 0
    assert pool.num_free == 2


def test_a_free_block_can_be_shared_and_is_then_no_longer_free() -> None:
    pool = BlockPool(2)
    pool.share([1])
    assert pool.allocate(1) == [0]
    with pytest.raises(ValueError, match="0 free"):
        pool.allocate(1)


def test_refuses_to_free_a_block_that_nobody_holds() -> None:
    pool = BlockPool(2)
    (block_id,) = pool.allocate(1)
    free(pool, block_id)
    with pytest.raises(ValueError, match="double free of block 0"):
        free(pool, 0)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda pool, held: held.pop(),
        lambda pool, held: held.append(held[0]),
        lambda pool, held: free(pool, held[0]),
    ],
    ids=["leaked", "held twice", "freed but held"],
)
def test_check_finds_books_that_do_not_add_up(spoil: Callable[[BlockPool, list[int]], object]) -> None:
    pool = BlockPool(4)
    held = pool.allocate(2)
    pool.check([held])
    spoil(pool, held)
    with pytest.raises(AssertionError):
        pool.check([held])


class PoolMachine(RuleBasedStateMachine):
    """The pool against the plainest model: sets of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(8)
        self.held: list[list[int]] = []

    @rule(count=st.integers(0, 8))
    def allocate(self, count: int) -> None:
        if count > self.pool.num_free:
            with pytest.raises(ValueError, match="free"):
                self.pool.allocate(count)
            return
        block_ids = self.pool.allocate(count)
        assert len(set(block_ids)) == count
        assert not set(block_ids) & {block_id for table in self.held for block_id in table}
        self.held.append(block_ids)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        for block_id in self.held.pop(data.draw(st.integers(0, len(self.held) - 1))):
            free(self.pool, block_id, first=data.draw(st.booleans()))

    @rule(block_ids=st.sets(st.integers(0, 7)))
    def share(self, block_ids: set[int]) -> None:
        self.pool.share(block_ids)
        self.held.append(list(block_ids))

    @invariant()
    def every_block_is_free_or_held(self) -> None:
        self.pool.check(self.held)
        assert self.pool.num_free == 8 - len({block_id for table in self.held for block_id in table})


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=100, stateful_step_count=30, derandomize=True, deadline=None)
