"""Blocks and block tables: the pool counts references to one device's KV blocks, a table maps a sequence's logical
blocks to physical ones."""

from collections import OrderedDict
from collections.abc import Iterable, KeysView
from dataclasses import dataclass, field

from octavo.wire.base import NULL_BLOCK


class BlockPool:
    """Holds reference-counted blocks 0..num_blocks-1 with an ordered free list; every operation is O(1) per block.

    Blocks are taken from the front of the list. A free block may be shared again while it is in the list, which is why
    it must leave from anywhere.
    """

    def __init__(self, num_blocks: int) -> None:
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    def __deepcopy__(self, memo: dict[int, object]) -> "BlockPool":
        double = BlockPool(0)
        double._ref_counts, double._free = list(self._ref_counts), self._free.copy()
        return double

    @property
    def num_blocks(self) -> int:
        return len(self._ref_counts)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def free_block_ids(self) -> KeysView[int]:
        """Returns the free blocks in the order in which they are taken."""
        return self._free.keys()

    def ref_count(self, block_id: int) -> int:
        """Returns how many holders the block has."""
        return self._ref_counts[block_id]

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks, referenced once each. Raises `ValueError` if fewer are free; nothing is taken then."""
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
        """Drops one reference and returns whether it was the last, after which the block must be given back.

        Raises `ValueError` if nobody holds the block.
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


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence, one list per KV group, all of one length; `NULL_BLOCK` where a window has passed.

    The first `num_indexed` have been offered to the prefix cache. The first `num_passed` of each windowed group are
    null.
    """

    groups: list[list[int]]
    num_indexed: int = 0
    num_passed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.num_passed:
            self.num_passed = [_leading_nulls(blocks) for blocks in self.groups]

    def __len__(self) -> int:
        return len(self.groups[0])

    def __deepcopy__(self, memo: dict[int, object]) -> "BlockTable":
        return self.copy()

    def copy(self) -> "BlockTable":
        return BlockTable([list(blocks) for blocks in self.groups], self.num_indexed, list(self.num_passed))

    @property
    def block_ids(self) -> list[int]:
        """Returns all blocks of all groups, without null entries."""
        return present(self.groups)


def present(groups: Iterable[Iterable[int]]) -> list[int]:
    """Returns all entries that are blocks."""
    return [block_id for blocks in groups for block_id in blocks if block_id != NULL_BLOCK]


def first_visible(window: int, position: int, block_size: int) -> int:
    """Returns the first logical block that the token at `position` can see, in a KV group of this `window` in tokens
    (0: all)."""
    return max(0, position - window + 1) // block_size if window else 0


def _leading_nulls(blocks: list[int]) -> int:
    return next((i for i, block_id in enumerate(blocks) if block_id != NULL_BLOCK), len(blocks))
