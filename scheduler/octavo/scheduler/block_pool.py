"""One device's KV blocks: which are free, and how many hold each of the others."""

from collections import deque
from collections.abc import Iterable


class BlockPool:
    """Reference-counted blocks 0..num_blocks-1 with an O(1) free list.

    Freed blocks go to the end of the list, so the longest unused is taken first.
    """

    def __init__(self, num_blocks: int) -> None:
        self._ref_counts = [0] * num_blocks
        self._free = deque(range(num_blocks))

    @property
    def num_blocks(self) -> int:
        return len(self._ref_counts)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks, referenced once each. Raises `ValueError` if fewer are free; nothing is taken then."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} free")
        block_ids = [self._free.popleft() for _ in range(count)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def free(self, block_ids: Iterable[int]) -> None:
        """Drops one reference to each block. Raises `ValueError` on one that nobody holds."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                raise ValueError(f"double free of block {block_id}")
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free.append(block_id)

    def check(self, holders: Iterable[Iterable[int]]) -> None:
        """Asserts that `holders` (tables, parking lots) account for each reference and the free list for the rest."""
        expected = [0] * self.num_blocks
        for block_ids in holders:
            for block_id in block_ids:
                expected[block_id] += 1
        assert expected == self._ref_counts, "reference counts differ from the tables that hold the blocks"
        assert sorted(self._free) == [i for i, count in enumerate(expected) if count == 0], "free list is wrong"
