"""Swapping: preempted sequences in CPU memory, the moves that bring their blocks there and back, and the tokens that
are lost without them."""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from collections.abc import Set as AbstractSet

from octavo.scheduler.core.sequence import Sequence
from octavo.scheduler.kv.blocks import BlockTable, CachedBlocks, present
from octavo.scheduler.kv.cpu_tier import CPUTier
from octavo.scheduler.kv.memory import Arrival, TokenRun
from octavo.scheduler.kv.prefix_cache import block_hashes
from octavo.wire.base import NULL_BLOCK
from octavo.wire.steps import BlockMove


class SwapSpace:
    """Holds the tables of swapped sequences, whose blocks are numbers in the pool of `cpu` blocks; moves whole groups
    between it and `device_tables`, the tables of `device`. What they leave there others find as they find what is in
    the `tier`, if there is one."""

    def __init__(
        self,
        block_size: int,
        device: CachedBlocks,
        device_tables: dict[Sequence, BlockTable],
        cpu: CachedBlocks,
        tier: CPUTier | None,
    ) -> None:
        self.pool = cpu.pool
        self._cpu = cpu
        self._tier = tier
        self.tables: dict[Sequence, BlockTable] = {}
        # What comes from other replicas.
        self.arrivals: list[Arrival] = []
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
        several sequences share count only for the first. Cached blocks that are taken go on in the tier, as far as it
        has room."""
        own = self._own(sequences)
        lost, runs = own - self._surviving(own, num_taken), []
        for sequence in sequences:
            table = self._device_tables[sequence]
            num_found = _num_found(sequence, table, lost, self._block_size) * self._block_size
            lost.difference_update(table.block_ids)
            runs.append(TokenRun(num_found, sequence.num_known - num_found))
        return runs

    def num_kept(self, sequences: Ordered[Sequence], num_taken: int) -> int:
        """Counts the blocks of those taken that go on in the tier."""
        own = self._own(sequences)
        return len(self._surviving(own, num_taken)) - len(self._device.surviving(own, num_taken))

    def _surviving(self, own: set[int], num_taken: int) -> set[int]:
        room = self.pool.num_free if self._tier is not None else 0
        return self._device.surviving(own, max(0, num_taken - room))

    def swap_out(self, sequences: Ordered[Sequence], step_id: int) -> list[BlockMove]:
        """Moves the blocks of a whole group to CPU blocks, shared as they were, and returns the moves, which step
        `step_id` makes; the device blocks are free at once."""
        moved: dict[int, int] = {}
        for sequence in sequences:
            groups = [[self._place(block_id, moved) for block_id in blocks] for blocks in self._computed(sequence)]
            self.tables[sequence] = _alike(self._device_tables[sequence], groups)
        if self._tier is not None:
            for block_id, cpu_block in moved.items():
                self._tier.store(self._device.cache.confirmed_content(block_id), cpu_block, step_id)
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
            (moved[block_id],) = self._cpu.take(1)
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
        if self._tier is not None:
            self._tier.hold([*moved])
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

    # -- from replica to replica ------------------------------------------------------------------------------------

    def leaving(self, sequences: Iterable[Sequence]) -> dict[Sequence, BlockTable]:
        """Returns the tables of sequences that are all on the device, or all swapped out, as far as anything is
        computed."""
        return {
            sequence: self.tables[sequence].copy()
            if sequence in self.tables
            else _alike(self._device_tables[sequence], self._computed(sequence))
            for sequence in sequences
        }

    def expect(self, tables: dict[Sequence, BlockTable]) -> Arrival:
        """Takes CPU blocks for what another replica holds by these tables, shared as they are there. Raises
        `ValueError` if too few are free."""
        needed = {block_id for table in tables.values() for block_id in table.block_ids}
        if len(needed) > self.pool.num_free:
            raise ValueError(f"{len(needed)} CPU blocks wanted, {self.pool.num_free} free")
        moved: dict[int, int] = {}
        blocks = {
            sequence: [[self._place(block_id, moved) for block_id in group] for group in table.groups]
            for sequence, table in tables.items()
        }
        arrival = Arrival(blocks, [BlockMove(source, target) for source, target in moved.items()])
        self.arrivals.append(arrival)
        return arrival

    def arrive(self, arrival: Arrival, tables: dict[Sequence, BlockTable]) -> None:
        """Makes swapped sequences of those that are still in `tables`, those of the other replica: all has come."""
        self.arrivals.remove(arrival)
        for sequence, groups in arrival.blocks.items():
            if sequence in tables:
                self.tables[sequence] = _alike(tables[sequence], groups)
            else:
                self._cpu.release(present(groups))

    def give_up(self, arrival: Arrival) -> None:
        """Frees the blocks of what does not come, or is of no use any more."""
        self.arrivals.remove(arrival)
        for groups in arrival.blocks.values():
            self._cpu.release(present(groups))

    def drop(self, sequence: Sequence) -> None:
        """Gives a swapped sequence's blocks up."""
        self._cpu.release(self.tables.pop(sequence).block_ids)

    def check(self, others: Iterable[int]) -> None:
        """Asserts that every block is free, in a table or held by `others`, and counted right."""
        held = [self._tier.held] if self._tier is not None else []
        coming = [present(groups) for arrival in self.arrivals for groups in arrival.blocks.values()]
        self.pool.check([others, *held, *coming, *(table.block_ids for table in self.tables.values())])


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
