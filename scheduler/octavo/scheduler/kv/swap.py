"""Swapping: preempted sequences in CPU memory, the moves that bring their blocks there and back, and the tokens that
are lost without them."""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from collections.abc import Set as AbstractSet

from octavo.scheduler.core.sequence import Sequence
from octavo.scheduler.kv.blocks import BlockPool, BlockTable, DeviceBlocks, present
from octavo.scheduler.kv.memory import TokenRun
from octavo.scheduler.kv.prefix_cache import block_hashes
from octavo.wire.base import NULL_BLOCK
from octavo.wire.steps import BlockMove


class SwapSpace:
    """Holds the tables of swapped sequences, whose blocks are numbers in a pool of CPU blocks; moves whole groups
    between it and `device_tables`, the tables of `device`."""

    def __init__(
        self, num_blocks: int, block_size: int, device: DeviceBlocks, device_tables: dict[Sequence, BlockTable]
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.tables: dict[Sequence, BlockTable] = {}
        self._block_size = block_size
        self._device = device
        self._device_tables = device_tables

    # -- out --------------------------------------------------------------------------------------------------------

    def num_to_swap(self, sequences: Iterable[Sequence]) -> int:
        """Counts the blocks that a swap-out of `sequences` moves."""
        return len(self._computed_blocks(sequences))

    def num_own(self, sequences: Ordered[Sequence]) -> int:
        """Counts those of these blocks that no other sequence holds."""
        return len(self._computed_blocks(sequences) & self._own(sequences))

    def lost_by(self, sequences: Ordered[Sequence], num_taken: int) -> list[TokenRun]:
        """Returns the tokens of each sequence that are computed again, all after its first lost block; those that
        several sequences share count only for the first."""
        own = self._own(sequences)
        lost, runs = own - self._device.surviving(own, num_taken), []
        for sequence in sequences:
            table = self._device_tables[sequence]
            num_found = _num_found(sequence, table, lost, self._block_size) * self._block_size
            lost.difference_update(table.block_ids)
            runs.append(TokenRun(num_found, sequence.num_known - num_found))
        return runs

    def swap_out(self, sequences: Ordered[Sequence]) -> list[BlockMove]:
        """Moves the blocks of a whole group to CPU blocks, shared as they were, and returns the moves; the device
        blocks are free at once."""
        moved: dict[int, int] = {}
        for sequence in sequences:
            groups = [[self._place(block_id, moved) for block_id in blocks] for blocks in self._computed(sequence)]
            self.tables[sequence] = _alike(self._device_tables[sequence], groups)
        self._device.release(
            block_id for sequence in sequences for block_id in self._device_tables.pop(sequence).block_ids
        )
        return [BlockMove(source, target) for source, target in moved.items()]

    def _place(self, block_id: int, moved: dict[int, int]) -> int:
        """Returns the CPU block for a device block, taken and added to `moved` unless it has one already: sequences of
        one group share here what they shared on the device."""
        if block_id == NULL_BLOCK:
            return NULL_BLOCK
        if block_id in moved:
            self.pool.share([moved[block_id]])
        else:
            (moved[block_id],) = self.pool.allocate(1)
        return moved[block_id]

    def _computed(self, sequence: Sequence) -> list[list[int]]:
        """Returns the blocks with any computed token in them, one list per KV group."""
        count = -(-sequence.placement.num_computed // self._block_size)
        return [blocks[:count] for blocks in self._device_tables[sequence].groups]

    def _computed_blocks(self, sequences: Iterable[Sequence]) -> set[int]:
        return {block_id for sequence in sequences for block_id in present(self._computed(sequence))}

    def _own(self, sequences: Iterable[Sequence]) -> set[int]:
        """Returns the blocks of which `sequences` hold all references."""
        held = Counter(block_id for sequence in sequences for block_id in self._device_tables[sequence].block_ids)
        return {block_id for block_id, count in held.items() if self._device.pool.ref_count(block_id) == count}

    # -- in ---------------------------------------------------------------------------------------------------------

    def num_to_return(self, sequences: Ordered[Sequence]) -> int:
        """Counts the device blocks that a swapped group needs to come back and compute one more token for each
        sequence."""
        moved = {
            cpu_block
            for sequence in sequences
            for blocks, found in self._blocks_and_found(sequence)
            for cpu_block, block_id in zip(blocks, found, strict=True)
            if cpu_block != NULL_BLOCK and block_id is None
        }
        new = sum(self._num_new(sequence) * len(self.tables[sequence].groups) for sequence in sequences)
        begun = [sequence for sequence in sequences if sequence.placement.num_computed % self._block_size]
        written = [blocks[-1] for sequence in begun for blocks in self.tables[sequence].groups]
        # The last of a block's holders writes to it in place.
        return len(moved) + new + len(written) - len(set(written))

    def swap_in(self, sequences: Ordered[Sequence]) -> list[BlockMove]:
        """Moves a group back, except for blocks whose content others hold on the device by then: those are shared.
        Returns the moves. The tables get room for all known tokens."""
        moved: dict[int, int] = {}
        for sequence in sequences:
            groups = [
                [self._return(cpu_block, held, moved) for cpu_block, held in zip(blocks, found, strict=True)]
                + self._device.take(self._num_new(sequence))
                for blocks, found in self._blocks_and_found(sequence)
            ]
            self._device_tables[sequence] = _alike(self.tables[sequence], groups)
        for sequence in sequences:
            self.drop(sequence)
        return [BlockMove(source, target) for source, target in moved.items()]

    def _return(self, cpu_block: int, held: int | None, moved: dict[int, int]) -> int:
        """Returns the device block for a CPU block: the one that others `held`, or else one taken for it and added to
        `moved`, unless it has one already."""
        if cpu_block == NULL_BLOCK:
            return NULL_BLOCK
        block_id = moved.get(cpu_block) if held is None else held
        if block_id is None:
            (moved[cpu_block],) = self._device.take(1)
            return moved[cpu_block]
        self._device.pool.share([block_id])
        return block_id

    def _num_new(self, sequence: Sequence) -> int:
        """Counts the blocks of each KV group for known tokens that were not computed."""
        return -(-sequence.num_known // self._block_size) - len(self.tables[sequence])

    def _blocks_and_found(self, sequence: Sequence) -> list[tuple[list[int], list[int | None]]]:
        """Returns the sequence's CPU blocks, one list per KV group, each beside the device blocks, if any, that hold
        the same for others; what is private is shared with none."""
        swapped = self.tables[sequence]
        if swapped.is_private:
            return [(blocks, [None] * len(blocks)) for blocks in swapped.groups]
        num_full = min(sequence.placement.num_computed, sequence.num_known) // self._block_size
        hashes = block_hashes(sequence, self._block_size)[:num_full]
        partial = [None] * (len(swapped) - num_full)
        return [
            (blocks, [*(self._held_block(group, value) for value in hashes), *partial])
            for group, blocks in enumerate(swapped.groups)
        ]

    def _held_block(self, group: int, value: bytes) -> int | None:
        block_id = self._device.cache.confirmed_block(group, value)
        return block_id if block_id is not None and self._device.pool.ref_count(block_id) else None

    def drop(self, sequence: Sequence) -> None:
        """Gives a swapped sequence's blocks up."""
        for block_id in self.tables.pop(sequence).block_ids:
            if self.pool.release(block_id):
                self.pool.give_back(block_id)

    def check(self) -> None:
        """Asserts that every block is free or in a table, and counted right."""
        self.pool.check(table.block_ids for table in self.tables.values())


def _alike(table: BlockTable, groups: list[list[int]]) -> BlockTable:
    """Makes the table of the same sequence in the other memory, whose blocks are `groups`."""
    return BlockTable(groups, shares_last=table.shares_last, is_private=table.is_private)


def _num_found(sequence: Sequence, table: BlockTable, gone: AbstractSet[int], block_size: int) -> int:
    """Counts the full blocks that a hit would cover: never the last known token, and nothing of which no KV group has a
    block."""
    limit = (sequence.num_known - 1) // block_size
    for index, blocks in enumerate(zip(*table.groups, strict=True)):
        held = [block_id for block_id in blocks if block_id != NULL_BLOCK]
        if index == limit or not held or not gone.isdisjoint(held):
            return index
    return min(limit, len(table))
