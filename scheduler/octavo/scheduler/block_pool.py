"""One device's KV blocks: which are free, and how many hold each of the others."""

from collections import OrderedDict
from collections.abc import Iterable, KeysView


class BlockPool:
    """Reference-counted blocks 0..num_blocks-1 with an ordered free list; every operation is O(1) per block.

    Blocks are taken from the front of the list. A free block may be shared again while it is in the list, which is why
    it must leave from anywhere.
    """

    def __init__(self, num_blocks: int) -> None:
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_blocks(self) -> int:
        return len(self._ref_counts)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def free_block_ids(self) -> KeysView[int]:
        """In the order in which they are taken."""
        return self._free.keys()

    def ref_count(self, block_id: int) -> int:
        """How many hold the block."""
        return self._ref_counts[block_id]

    def allocate(self, count: int) -> list[int]:
        """`count` blocks, referenced once each. Raises `ValueError` if fewer are free; nothing is taken then."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} free")
        block_ids = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Adds one reference to each block, free or held."""
        for block_id in block_ids:
            self._free.pop(block_id, None)
            self._ref_counts[block_id] += 1

    def release(self, block_id: int) -> bool:
        """Drops one reference; whether it was the last, after which the block must be given back.

        Raises `ValueError` if nobody holds it.
        """
        if self._ref_counts[block_id] == 0:
            raise ValueError(f"double free of block {block_id}")
        self._ref_counts[block_id] -= 1
        return self._ref_counts[block_id] == 0

    def give_back(self, block_id: int, *, first: bool = False) -> None:
        """Puts a block that nobody holds at the end of the free list, or at its front."""
        assert self._ref_counts[block_id] == 0, f"block {block_id} is held"
        self._free[block_id] = None
        if first:
            self._free.move_to_end(block_id, last=False)

    def check(self, holders: Iterable[Iterable[int]]) -> None:
        """Asserts that `holders` (tables, parking lots, pins) account for each reference and the free list for the
        rest."""
        expected = [0] * self.num_blocks
        for block_ids in holders:
            for block_id in block_ids:
                expected[block_id] += 1
        assert expected == self._ref_counts, "reference counts differ from the tables that hold the blocks"
        assert sorted(self._free) == [i for i, count in enumerate(expected) if count == 0], "free list is wrong"
