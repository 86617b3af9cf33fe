"""Swapping: preempted sequences in CPU memory, the moves that bring their blocks there and back, and the tokens that
are lost without them."""

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ordered
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from octavo.scheduler.core.sequence import Sequence
from octavo.scheduler.kv.blocks import BlockPool, BlockTable, present
from octavo.scheduler.kv.device_blocks import DeviceBlocks
from octavo.scheduler.kv.prefix_cache import PrefixCache, block_hashes
from octavo.wire.base import NULL_BLOCK
from octavo.wire.steps import BlockMove


@dataclass(frozen=True, slots=True)
class Span:
    """A run of a sequence's tokens: `num_tokens` after the first `context`."""

    context: int
    num_tokens: int


def lost_spans(tables: Iterable[tuple[Sequence, BlockTable]], lost: AbstractSet[int], block_size: int) -> list[Span]:
    """Returns the tokens of each of a group's sequences that are computed again, all after its first lost block; those
    that several sequences share count only for the first."""
    spans, recomputed = [], set[int]()
    for sequence, table in tables:
        gone = lost - recomputed
        num_found = _num_found(sequence, table, gone, block_size) * block_size
        recomputed.update(table.block_ids)
        spans.append(Span(num_found, sequence.num_known - num_found))
    return spans


def _num_found(sequence: Sequence, table: BlockTable, gone: AbstractSet[int], block_size: int) -> int:
    """Counts the full blocks that a hit would cover: never the last known token, and nothing of which no KV group has a
    block."""
    limit = (sequence.num_known - 1) // block_size
    for index, blocks in enumerate(zip(*table.groups, strict=True)):
        held = [block_id for block_id in blocks if block_id != NULL_BLOCK]
        if index == limit or not held or not gone.isdisjoint(held):
            return index
    return min(limit, len(table))


# Takes so many free device blocks.
Take = Callable[[int], list[int]]


class SwapSpace:
    """Holds the tables of swapped sequences; their blocks are numbers in a pool of their own.

    `device` and `cache` are those of the device's blocks: content that others hold there by now need not be brought
    back.
    """

    def __init__(self, num_blocks: int, block_size: int, device: BlockPool, cache: PrefixCache) -> None:
        self._pool = BlockPool(num_blocks)
        self._block_size = block_size
        self._device = device
        self._cache = cache
        self._tables: dict[Sequence, BlockTable] = {}

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    def table(self, sequence: Sequence) -> BlockTable:
        """Returns the sequence's table of CPU blocks; not to be changed."""
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

    def num_missing(self, sequences: Ordered[Sequence]) -> int:
        """Counts the device blocks that a swapped group needs to come back and compute one more token for each
        sequence."""
        held = {block_id for sequence in sequences for block_id in self._to_bring_back(sequence)}
        new = sum(self._num_new(sequence) * len(self._tables[sequence].groups) for sequence in sequences)
        begun = [sequence for sequence in sequences if sequence.num_computed % self._block_size]
        written = [blocks[-1] for sequence in begun for blocks in self._tables[sequence].groups]
        # The last of a block's holders writes to it in place.
        return len(held) + new + len(written) - len(set(written))

    def bring_back(self, sequence: Sequence, moved: dict[int, int], take: Take) -> list[list[int]]:
        """Returns the sequence's tables on the device, with room for all its known tokens.

        Blocks whose content others hold there are shared; the rest come into new blocks, each with its CPU block added
        to `moved`, unless it has one already.
        """
        swapped = self._tables[sequence]
        return [
            [self._return(cpu_block, held, moved, take) for cpu_block, held in zip(blocks, found, strict=True)]
            + take(self._num_new(sequence))
            for blocks, found in zip(swapped.groups, self._held_by_others(sequence), strict=True)
        ]

    def _return(self, cpu_block: int, held: int | None, moved: dict[int, int], take: Take) -> int:
        if cpu_block == NULL_BLOCK:
            return NULL_BLOCK
        block_id = moved.get(cpu_block) if held is None else held
        if block_id is None:
            (moved[cpu_block],) = take(1)
            return moved[cpu_block]
        self._device.share([block_id])
        return block_id

    def _num_new(self, sequence: Sequence) -> int:
        """Counts the blocks of each KV group for known tokens that were not computed."""
        return -(-sequence.num_known // self._block_size) - len(self._tables[sequence])

    def _to_bring_back(self, sequence: Sequence) -> list[int]:
        found = self._held_by_others(sequence)
        return [
            cpu_block
            for blocks, held in zip(self._tables[sequence].groups, found, strict=True)
            for cpu_block, block_id in zip(blocks, held, strict=True)
            if cpu_block != NULL_BLOCK and block_id is None
        ]

    def _held_by_others(self, sequence: Sequence) -> list[list[int | None]]:
        """Finds for each entry of the sequence's tables the device block, if any, that holds the same for others."""
        swapped = self._tables[sequence]
        num_full = min(sequence.num_computed, sequence.num_known) // self._block_size
        hashes = block_hashes(sequence, self._block_size)[:num_full]
        partial = [None] * (len(swapped) - num_full)
        return [
            [*(self._held_block(group, value) for value in hashes), *partial] for group in range(len(swapped.groups))
        ]

    def _held_block(self, group: int, value: bytes) -> int | None:
        block_id = self._cache.confirmed_block(group, value)
        return block_id if block_id is not None and self._device.ref_count(block_id) else None

    def drop(self, sequence: Sequence) -> None:
        """Gives a sequence's blocks up."""
        for block_id in self._tables.pop(sequence).block_ids:
            if self._pool.release(block_id):
                self._pool.give_back(block_id)

    def check(self) -> None:
        """Asserts that every block is free or in a table, and counted right."""
        self._pool.check(table.block_ids for table in self._tables.values())


class Swapper:
    """Moves whole groups between `tables`, those on the device, and a swap space of `num_blocks` CPU blocks."""

    def __init__(
        self, num_blocks: int, block_size: int, blocks: DeviceBlocks, tables: dict[Sequence, BlockTable]
    ) -> None:
        self.space = SwapSpace(num_blocks, block_size, blocks.pool, blocks.cache)
        self._block_size = block_size
        self._blocks = blocks
        self._tables = tables

    def can_swap_out(self, sequences: Ordered[Sequence]) -> bool:
        """Tells whether CPU memory has room for the blocks that `sequences` hold."""
        return self.num_to_swap(sequences) <= self.space.num_free

    def num_to_swap(self, sequences: Ordered[Sequence]) -> int:
        """Counts the blocks that a swap-out of `sequences` moves."""
        return len(self._computed_blocks(sequences))

    def num_own(self, sequences: Ordered[Sequence]) -> int:
        """Counts those of these blocks that no other sequence holds."""
        held, ref_count = self._held_by(sequences), self._blocks.pool.ref_count
        return sum(ref_count(block_id) == held[block_id] for block_id in self._computed_blocks(sequences))

    def lost_by(self, sequences: Ordered[Sequence], num_taken: int) -> list[Span]:
        """Returns the tokens that would have to be computed again of `sequences`, all that their group holds, if they
        gave up their blocks and `num_taken` of these were taken before they came back."""
        held = self._held_by(sequences)
        own = {block_id for block_id, count in held.items() if self._blocks.pool.ref_count(block_id) == count}
        tables = [(sequence, self._tables[sequence]) for sequence in sequences]
        return lost_spans(tables, own - self._blocks.surviving(own, num_taken), self._block_size)

    def swap_out(self, sequences: Ordered[Sequence]) -> list[BlockMove]:
        """Moves the blocks of a whole group to CPU blocks, shared as they were, and returns the moves; the device
        blocks are free at once.

        No step with the group may be outstanding.
        """
        moved: dict[int, int] = {}
        for sequence in sequences:
            self.space.put(sequence, self._computed(sequence), moved)
        self._blocks.release(block_id for sequence in sequences for block_id in self._tables.pop(sequence).block_ids)
        return [BlockMove(source, target) for source, target in moved.items()]

    def num_missing(self, sequences: Ordered[Sequence]) -> int:
        """Counts the device blocks that a swapped group needs to come back and compute one more token for each
        sequence."""
        return self.space.num_missing(sequences)

    def swap_in(self, sequences: Ordered[Sequence]) -> list[BlockMove]:
        """Moves a group back, except for blocks whose content others hold on the device by then: those are shared.
        Returns the moves. The tables get room for all known tokens."""
        moved: dict[int, int] = {}
        for sequence in sequences:
            self._tables[sequence] = BlockTable(self.space.bring_back(sequence, moved, self._blocks.take))
        for sequence in sequences:
            self.space.drop(sequence)
        return [BlockMove(source, target) for source, target in moved.items()]

    def _computed_blocks(self, sequences: Ordered[Sequence]) -> set[int]:
        return {block_id for sequence in sequences for block_id in present(self._computed(sequence))}

    def _computed(self, sequence: Sequence) -> list[list[int]]:
        """Returns the blocks with any computed token in them, one list per KV group."""
        count = -(-sequence.num_computed // self._block_size)
        return [blocks[:count] for blocks in self._tables[sequence].groups]

    def _held_by(self, sequences: Ordered[Sequence]) -> Counter[int]:
        return Counter(block_id for sequence in sequences for block_id in self._tables[sequence].block_ids)
