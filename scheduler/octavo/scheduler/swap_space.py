"""CPU blocks, and what swapped sequences keep in them."""

from octavo.scheduler.block_pool import BlockPool
from octavo.scheduler.block_table import BlockTable
from octavo.scheduler.sequence import Sequence
from octavo.wire.base import NULL_BLOCK


class SwapSpace:
    """The tables of swapped sequences; their blocks are numbers in a pool of their own."""

    def __init__(self, num_blocks: int) -> None:
        self._pool = BlockPool(num_blocks)
        self._tables: dict[Sequence, BlockTable] = {}

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    def table(self, sequence: Sequence) -> BlockTable:
        """To be read."""
        return self._tables[sequence]

    def put(self, sequence: Sequence, groups: list[list[int]], moved: dict[int, int]) -> None:
        """Takes a CPU block for each device block of `groups` and adds the pair to `moved`, unless it has one already:
        sequences of one group share here what they shared on the device."""
        self._tables[sequence] = BlockTable(
            [[self._place(block_id, moved) for block_id in blocks] for blocks in groups]
        )

    def _place(self, block_id: int, moved: dict[int, int]) -> int:
        if block_id == NULL_BLOCK:
            return NULL_BLOCK
        if block_id in moved:
            self._pool.share([moved[block_id]])
        else:
            (moved[block_id],) = self._pool.allocate(1)
        return moved[block_id]

    def drop(self, sequence: Sequence) -> None:
        """Gives a sequence's blocks up."""
        for block_id in self._tables.pop(sequence).block_ids:
            if self._pool.release(block_id):
                self._pool.give_back(block_id)

    def check(self) -> None:
        """Asserts that every block is free or in a table, and counted right."""
        self._pool.check(table.block_ids for table in self._tables.values())
