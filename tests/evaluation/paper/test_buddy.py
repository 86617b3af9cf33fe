"""The buddy allocator beside a plain map of who holds which slot."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.paper.contiguous_kv import BuddyAllocator


class BuddyMachine(RuleBasedStateMachine):
    """Allocates and frees at random, and owns what it got slot by slot."""

    @initialize(size=st.integers(1, 200))
    def begin(self, size: int) -> None:
        self.buddy = BuddyAllocator(size)
        self.owners: dict[int, int] = {}
        self.chunks: list[int] = []

    @rule(num_slots=st.integers(1, 70), count=st.integers(1, 3))
    def allocate(self, num_slots: int, count: int) -> None:
        if not self.buddy.can_allocate(num_slots, count):
            before = self.buddy.num_free
            if count == 1:
                with pytest.raises(ValueError, match="is free, though"):
                    self.buddy.allocate(num_slots)
            assert self.buddy.num_free == before
            return
        assert self.buddy.can_ever_allocate(num_slots, count)
        for _ in range(count):
            self._take(self.buddy.allocate(num_slots), num_slots)

    def _take(self, first: int, num_slots: int) -> None:
        size = self.buddy.size_of(first)
        assert num_slots <= size < 2 * num_slots
        slots = range(first, first + size)
        assert slots.stop <= self.buddy.size
        assert self.owners.keys().isdisjoint(slots), "two chunks overlap"
        self.owners.update(dict.fromkeys(slots, first))
        self.chunks.append(first)

    @precondition(lambda self: self.chunks)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        first = self.chunks.pop(data.draw(st.integers(0, len(self.chunks) - 1)))
        self.buddy.free(first)
        self.owners = {slot: owner for slot, owner in self.owners.items() if owner != first}
        with pytest.raises(ValueError, match="no chunk begins"):
            self.buddy.free(first)

    @invariant()
    def counts_agree(self) -> None:
        self.buddy.check()
        assert self.buddy.num_free == self.buddy.size - len(self.owners)
        largest, num_free = self.buddy.largest_free, self.buddy.num_free
        assert (largest > 0) == (num_free > 0)
        assert not largest or self.buddy.can_allocate(largest)
        assert not self.buddy.can_allocate(largest + 1)
        assert self.buddy.fragmentation == (1 - largest / num_free if num_free else 0)

    def teardown(self) -> None:
        """All merges back into the trees that there were at first."""
        if hasattr(self, "buddy"):
            for first in self.chunks:
                self.buddy.free(first)
            self.buddy.check()
            assert self.buddy.num_free == self.buddy.size
            assert self.buddy.largest_free == 1 << (self.buddy.size.bit_length() - 1)


BuddyMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestBuddyMachine = BuddyMachine.TestCase


def test_a_pool_that_is_no_power_of_two_is_used_whole() -> None:
    buddy = BuddyAllocator(15_700)
    chunks = [buddy.allocate(2048) for _ in range(7)]
    assert len(set(chunks)) == 7
    assert not buddy.can_allocate(2048)
    assert buddy.num_free == 15_700 - 7 * 2048
    assert buddy.largest_free == 1024


def test_free_slots_apart_make_no_large_chunk() -> None:
    buddy = BuddyAllocator(64)
    chunks = sorted(buddy.allocate(8) for _ in range(8))
    for first in chunks[::2]:
        buddy.free(first)
    assert buddy.num_free == 32
    assert buddy.largest_free == 8
    assert buddy.fragmentation == 0.75
    assert not buddy.can_allocate(9)
    assert buddy.can_ever_allocate(9, 4)


@pytest.mark.parametrize("size", [0, -1])
def test_a_pool_or_a_chunk_of_nothing_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="at least 1 slot"):
        BuddyAllocator(size)
    with pytest.raises(ValueError, match="at least 1 slot"):
        BuddyAllocator(8).allocate(size)
