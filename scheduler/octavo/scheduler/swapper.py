"""Preempted sequences: their blocks move to CPU memory and back; what that moves, and what is lost without it."""

from collections import Counter
from collections.abc import Sequence as Ordered

from octavo.scheduler.block_table import BlockTable, present
from octavo.scheduler.device_blocks import DeviceBlocks
from octavo.scheduler.lost_spans import Span, lost_spans
from octavo.scheduler.sequence import Sequence
from octavo.scheduler.swap_space import SwapSpace
from octavo.wire.steps import BlockMove


class Swapper:
    """Moves whole groups between `tables`, of those on the device, and a swap space of `num_blocks` CPU blocks."""

    def __init__(
        self, num_blocks: int, block_size: int, blocks: DeviceBlocks, tables: dict[Sequence, BlockTable]
    ) -> None:
        self.space = SwapSpace(num_blocks, block_size, blocks.pool, blocks.cache)
        self._block_size = block_size
        self._blocks = blocks
        self._tables = tables

    def can_swap_out(self, sequences: Ordered[Sequence]) -> bool:
        """Whether CPU memory has room for what `sequences` hold."""
        return self.num_to_swap(sequences) <= self.space.num_free

    def num_to_swap(self, sequences: Ordered[Sequence]) -> int:
        """Blocks that a swap-out of `sequences` moves."""
        return len(self._computed_blocks(sequences))

    def num_own(self, sequences: Ordered[Sequence]) -> int:
        """Of these blocks the ones that nobody else holds."""
        held, ref_count = self._held_by(sequences), self._blocks.pool.ref_count
        return sum(ref_count(block_id) == held[block_id] for block_id in self._computed_blocks(sequences))

    def lost_by(self, sequences: Ordered[Sequence], num_taken: int) -> list[Span]:
        """What would have to be computed again of `sequences`, all that their group holds, if they gave up their blocks
        and `num_taken` of these were taken before they came back."""
        held = self._held_by(sequences)
        own = {block_id for block_id, count in held.items() if self._blocks.pool.ref_count(block_id) == count}
        tables = [(sequence, self._tables[sequence]) for sequence in sequences]
        return lost_spans(tables, own - self._blocks.surviving(own, num_taken), self._block_size)

    def swap_out(self, sequences: Ordered[Sequence]) -> list[BlockMove]:
        """Moves the blocks of a whole group to CPU blocks, shared as they were; their device blocks are free at once.

        Only for a group of which no step is outstanding.
        """
        moved: dict[int, int] = {}
        for sequence in sequences:
            self.space.put(sequence, self._computed(sequence), moved)
        self._blocks.release(block_id for sequence in sequences for block_id in self._tables.pop(sequence).block_ids)
        return [BlockMove(source, target) for source, target in moved.items()]

    def num_missing(self, sequences: Ordered[Sequence]) -> int:
        """Device blocks that a swapped group needs to come back and compute one more token for each sequence."""
        return self.space.num_missing(sequences)

    def swap_in(self, sequences: Ordered[Sequence]) -> list[BlockMove]:
        """The way back, but for what others hold by then: that is shared. The tables get room for all known tokens."""
        moved: dict[int, int] = {}
        for sequence in sequences:
            self._tables[sequence] = BlockTable(self.space.bring_back(sequence, moved, self._blocks.take))
        for sequence in sequences:
            self.space.drop(sequence)
        return [BlockMove(source, target) for source, target in moved.items()]

    def _computed_blocks(self, sequences: Ordered[Sequence]) -> set[int]:
        return {block_id for sequence in sequences for block_id in present(self._computed(sequence))}

    def _computed(self, sequence: Sequence) -> list[list[int]]:
        """The blocks with any computed token in them."""
        count = -(-sequence.num_computed // self._block_size)
        return [blocks[:count] for blocks in self._tables[sequence].groups]

    def _held_by(self, sequences: Ordered[Sequence]) -> Counter[int]:
        return Counter(block_id for sequence in sequences for block_id in self._tables[sequence].block_ids)
