"""The KV cache manager of one replica: which blocks each sequence holds, which are shared, and whether more may be
had."""

import enum
import math
from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from collections.abc import Set as AbstractSet

from octavo.scheduler.core.sequence import Sequence
from octavo.scheduler.kv.blocks import BlockTable, Growth, first_visible, present
from octavo.scheduler.kv.device_blocks import DeviceBlocks, PinnedBlocks
from octavo.scheduler.kv.prefix_cache import Begin, CachedBlock, PrefixLookup, block_hashes
from octavo.scheduler.kv.swap import Swapper
from octavo.wire.base import NULL_BLOCK
from octavo.wire.steps import BlockMove, Remap


class AllocStatus(enum.Enum):
    """Answers to whether sequences can be given their blocks: OK, now; LATER, once others have freed theirs; NEVER on
    this replica."""

    OK = enum.auto()
    LATER = enum.auto()
    NEVER = enum.auto()


class KVCacheManager:
    """Holds the block tables of the sequences with KV on one replica, and the prefix cache over all its blocks.

    `windows`: one per KV group, in tokens, 0 for none. Blocks that a sequence gives up while a step with it is
    outstanding are parked until that step is answered, because until then the worker may still use them.

    A block enters the prefix cache as soon as a plan fills it, before the step is answered: a replica runs its plans in
    order, and writes a step's KV before it reads any, so a sequence that shares the block finds it filled. If the step
    fails, or skips what was to fill the block, the entry is withdrawn.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        watermark: float = 0.0,
        prefix_caching: bool = True,
        windows: Ordered[int] = (0,),
        num_cpu_blocks: int = 0,
    ) -> None:
        self.block_size = block_size
        self.watermark_blocks = math.ceil(num_blocks * watermark)
        self._windows = tuple(windows)
        self._windowed = [group for group, window in enumerate(windows) if window]
        self._prefix_caching = prefix_caching
        self.blocks = DeviceBlocks(num_blocks, len(self._windows), prefix_caching=prefix_caching)
        self._pool, self._cache = self.blocks.pool, self.blocks.cache
        self._take, self._release = self.blocks.take, self.blocks.release
        self._tables: dict[Sequence, BlockTable] = {}
        self._lookup = PrefixLookup(self._cache, block_size, self._windows)
        self.pins = PinnedBlocks(self.blocks, block_size, self._lookup.tails)
        self.swapper = Swapper(num_cpu_blocks, block_size, self.blocks, self._tables)
        # Blocks set aside for pinned prefixes, those still to be computed too.
        self.reserved_blocks = 0

    # -- counts -----------------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        """Counts the blocks that may be taken, those with cached content too."""
        return self._pool.num_free

    @property
    def num_cached(self) -> int:
        """Counts the blocks that a prefix hit would find."""
        return len(self._cache)

    @property
    def num_pinned(self) -> int:
        """Counts the blocks that pinned prefixes keep for good."""
        return len(self.pins.block_ids)

    @property
    def num_cpu_blocks(self) -> int:
        return self.swapper.space.num_blocks

    @property
    def num_cpu_free(self) -> int:
        return self.swapper.space.num_free

    @property
    def capacity_tokens(self) -> int:
        """Returns the most tokens that one sequence can hold here."""
        return (self.num_blocks - self.reserved_blocks) // len(self._windows) * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Returns how many blocks, of all KV groups together, hold `num_tokens` tokens of one sequence."""
        return -(-num_tokens // self.block_size) * len(self._windows)

    def holds(self, sequence: Sequence) -> bool:
        """Tells whether the sequence has blocks on the device."""
        return sequence in self._tables

    def block_table(self, sequence: Sequence) -> list[list[int]]:
        """Returns the sequence's blocks, one list per KV group; not to be changed."""
        return self._tables[sequence].groups

    def ref_count(self, block_id: int) -> int:
        """Returns how many tables, parking lots and pins hold a block."""
        return self._pool.ref_count(block_id)

    # -- start ------------------------------------------------------------------------------------------------------

    def can_allocate(self, sequences: Ordered[Sequence], worst_case_blocks: int) -> AllocStatus:
        """Tells whether the blocks for all known tokens of `sequences`, which start together, can be had.

        `worst_case_blocks` is the number that the group can grow to with nothing shared. The watermark stays free,
        unless nothing else holds any block.
        """
        if worst_case_blocks > self.num_blocks - self.reserved_blocks:
            return AllocStatus.NEVER
        reserve = self.watermark_blocks if self._tables else 0
        return AllocStatus.OK if self.num_needed(sequences) + reserve <= self.num_free else AllocStatus.LATER

    def num_needed(self, sequences: Ordered[Sequence]) -> int:
        """Counts the free blocks that a start of `sequences` would use up: all but those that others hold already."""
        begins = self._lookup.begins(sequences)
        taken = sum(
            self.blocks_for(sequence.num_known) - begin.num_blocks * len(self._windows)
            for sequence, begin in zip(sequences, begins, strict=True)
        )
        found = {block_id for begin in begins for block_id in present(begin.found)}
        return taken + sum(self._pool.ref_count(block_id) == 0 for block_id in found)

    def num_found(self, sequences: Ordered[Sequence]) -> int:
        """Counts the known tokens of `sequences` that would not be computed again."""
        return sum(begin.num_blocks for begin in self._lookup.begins(sequences)) * self.block_size

    def allocate(self, sequences: Ordered[Sequence]) -> list[BlockMove]:
        """Gives sequences of one group, which hold nothing, the blocks of all their known tokens; returns the copies
        that the worker must make.

        Each sequence learns how many tokens it need not compute, and for which of the others it must wait: equal
        beginnings inside a group share blocks, cached or not. Taking all blocks at the start rather than chunk by chunk
        keeps half-prefilled prompts from starving each other.
        """
        begins = self._lookup.begins(sequences)
        # Found blocks are shared before any is taken: those that are free and cached could be taken otherwise.
        for begin in begins:
            self._pool.share(present(begin.found))
        return [
            move
            for sequence, begin in zip(sequences, begins, strict=True)
            for move in self._begin_table(sequence, begin)
        ]

    def _begin_table(self, sequence: Sequence, begin: Begin) -> list[BlockMove]:
        groups = begin.found
        if begin.leader is not None:
            groups = self._shared_with(begin.leader, begin.num_blocks)
            sequence.waits_for = (begin.leader, begin.num_blocks * self.block_size)
        missing = self.blocks_for(sequence.num_known) // len(self._windows) - begin.num_blocks
        table = BlockTable([[*blocks, *self._take(missing)] for blocks in groups], num_indexed=begin.num_blocks)
        self._tables[sequence] = table
        sequence.num_computed = begin.num_blocks * self.block_size
        sequence.shares_last_block = False
        fillers = (self._cache.filler(block_id) for block_id in present(begin.found))
        sequence.builds_on = frozenset(filler for filler in fillers if filler is not None)
        if begin.tail is None:
            return []
        sequence.num_computed += len(begin.tail.token_ids)
        targets = (blocks[begin.num_blocks] for blocks in table.groups)
        return [BlockMove(source, target) for source, target in zip(begin.tail.block_ids, targets, strict=True)]

    def _shared_with(self, leader: Sequence, num_blocks: int) -> list[list[int]]:
        """Returns the first blocks of a leader's tables, as far as windows reach, with a reference added to each."""
        groups = []
        for window, blocks in zip(self._windows, self._tables[leader].groups, strict=True):
            first = first_visible(window, num_blocks * self.block_size, self.block_size)
            groups.append([NULL_BLOCK] * first + blocks[first:num_blocks])
        self._pool.share(present(groups))
        return groups

    # -- grow -------------------------------------------------------------------------------------------------------

    def num_missing(self, sequences: Iterable[Sequence]) -> int:
        """Counts the blocks that one more token for each of `sequences` takes: new ones, and copies of shared ones."""
        missing = 0
        writers: dict[int, int] = defaultdict(int)
        size, ref_count = self.block_size, self._pool.ref_count
        for sequence in sequences:
            groups = self._tables[sequence].groups
            index, offset = divmod(sequence.num_computed, size)
            if offset:
                for blocks in groups:
                    if ref_count(blocks[index]) > 1:
                        writers[blocks[index]] += 1
            elif index >= len(groups[0]):
                missing += len(groups)
        # The last of a block's holders writes to it in place (paper Fig. 8).
        return missing + sum(min(count, ref_count(block_id) - 1) for block_id, count in writers.items())

    def extend(self, sequence: Sequence) -> Growth | None:
        """Makes room for the sequence's next token, in blocks of its own; returns what that changes, None if
        nothing."""
        index, offset = divmod(sequence.num_computed, self.block_size)
        if offset and not sequence.shares_last_block:
            return None
        groups = self._tables[sequence].groups
        if not offset:
            return self._append(sequence, groups) if index >= len(groups[0]) else None
        if all(self._pool.ref_count(blocks[index]) == 1 for blocks in groups):
            return None
        growth = Growth()
        for group, blocks in enumerate(groups):
            if self._pool.ref_count(blocks[index]) > 1:
                self._copy_on_write(sequence, group, index, growth)
        return growth

    def _append(self, sequence: Sequence, groups: list[list[int]]) -> Growth:
        sequence.shares_last_block = False
        new = [self._take(1) for _ in groups]
        for blocks, block_ids in zip(groups, new, strict=True):
            blocks += block_ids
        return Growth(new)

    def _copy_on_write(self, sequence: Sequence, group: int, index: int, growth: Growth) -> None:
        blocks = self._tables[sequence].groups[group]
        shared = blocks[index]
        (blocks[index],) = self._take(1)
        self._pool.release(shared)
        growth.copies.append(BlockMove(shared, blocks[index]))
        growth.remaps.append(Remap(sequence.sequence_id, group, index, blocks[index]))

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Gives `child` a share of all blocks of `parent`."""
        table = self._tables[child] = self._tables[parent].copy()
        parent.shares_last_block = child.shares_last_block = True
        self._pool.share(table.block_ids)

    def index(self, sequence: Sequence, step_id: int) -> list[Remap]:
        """Offers to the prefix cache the blocks that known and computed tokens have filled since the last call.

        `step_id` fills them at the latest. Where an older block holds the same, the sequence's table is pointed at that
        and its own is given up; the returned remaps must reach the worker in a plan after `step_id`.
        """
        table = self._tables[sequence]
        num_full = min(sequence.num_computed, sequence.num_known) // self.block_size
        first, table.num_indexed = table.num_indexed, max(num_full, table.num_indexed)
        if first >= num_full or not (self._prefix_caching or sequence.is_prefix):
            return []
        hashes = block_hashes(sequence, self.block_size)
        return [
            Remap(sequence.sequence_id, group, logical, table.groups[group][logical])
            for logical in range(first, num_full)
            for group in range(len(self._windows))
            if self._index_block(sequence, CachedBlock(hashes[logical], group, logical), step_id)
        ]

    def _index_block(self, sequence: Sequence, content: CachedBlock, step_id: int) -> bool:
        """Offers one block; returns whether another block took its place in the sequence's table."""
        blocks = self._tables[sequence].groups[content.kv_group]
        own = blocks[content.depth]
        if own == NULL_BLOCK or self._cache.insert(content, own, step_id, sequence.sequence_id):
            return False
        older = self._cache.confirmed_block(content.kv_group, content.value)
        # A block that nobody holds is left alone: to take it would need a free block that this step may count on.
        if older is None or older == own or not self._pool.ref_count(older):
            return False
        self._pool.share([older])
        blocks[content.depth] = older
        self.blocks.parked[step_id].append(own)
        return True

    def slide(self, sequence: Sequence, step_id: int) -> None:
        """Gives up blocks that no token after those computed in `step_id` can see.

        A prefix keeps what is seen from the end of its last full block, which is where a hit begins.
        """
        table, position = self._tables[sequence], sequence.num_computed
        if sequence.is_prefix:
            position -= position % self.block_size
        for group in self._windowed:
            blocks, passed = table.groups[group], table.num_passed[group]
            first = min(len(blocks), first_visible(self._windows[group], position, self.block_size))
            for logical in range(passed, first):
                if blocks[logical] != NULL_BLOCK:
                    self.blocks.parked[step_id].append(blocks[logical])
                    blocks[logical] = NULL_BLOCK
            table.num_passed[group] = max(first, passed)

    @property
    def slides(self) -> bool:
        """Tells whether any KV group has a window."""
        return bool(self._windowed)

    # -- distrust ---------------------------------------------------------------------------------------------------

    def distrust(self, sequence_id: int, sequence: Sequence | None) -> None:
        """Keeps everything that was computed of a sequence from being found again in the prefix cache: what outstanding
        steps fill with it and, if it is still held, its whole table; pinned blocks excepted.

        To be called before the step that brought this to light is booked as answered.
        """
        held = self._tables[sequence].block_ids if sequence is not None else []
        self.blocks.distrust({*self._cache.filled_by(sequence_id), *held} - self.pins.block_ids)

    def withdraw(self, sequence_ids: AbstractSet[int], after_step: int) -> None:
        """Takes out of the prefix cache what outstanding steps after `after_step` were to compute of these
        sequences."""
        self._cache.withdraw(sequence_ids, after_step)

    def holds_distrusted(self, sequence: Sequence) -> bool:
        """Tells whether the sequence has held a block since before it was distrusted."""
        return self.blocks.any_distrusted(self._tables[sequence].block_ids)

    # -- give up ----------------------------------------------------------------------------------------------------

    def free(self, sequence: Sequence, outstanding_step_id: int | None = None) -> None:
        """Takes the sequence's blocks back, at once or when `outstanding_step_id` is answered."""
        block_ids = self._tables.pop(sequence).block_ids
        if outstanding_step_id is None:
            self._release(block_ids)
        else:
            self.blocks.parked[outstanding_step_id] += block_ids

    def step_answered(self, step_id: int, *, valid: bool) -> None:
        """Frees the blocks that were parked for this step; the content it wrote is relied on only if it is `valid`."""
        self.blocks.step_answered(step_id, valid=valid)

    # -- pin --------------------------------------------------------------------------------------------------------

    def pin(self, name: str, sequence: Sequence) -> None:
        """Keeps the blocks of a sequence's prompt, all computed, under a name; the sequence holds nothing any more."""
        self.pins.pin(name, sequence, self._tables.pop(sequence))

    # -- invariants -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Asserts that every block is free, in a table, parked or pinned, and counted right."""
        tables = [table.block_ids for table in self._tables.values()]
        self._pool.check([*tables, *self.blocks.parked.values(), *self.pins.by_name.values()])
        self.swapper.space.check()
        self._cache.check()
        # Sequences that wait for a block want what is written to it; others must know that they share one.
        awaited = {sequence.waits_for[0] for sequence in self._tables if sequence.waits_for is not None}
        for sequence, table in self._tables.items():
            index, offset = divmod(sequence.num_computed, self.block_size)
            if offset and not sequence.shares_last_block and sequence not in awaited:
                shared = [blocks[index] for blocks in table.groups if self.ref_count(blocks[index]) > 1]
                assert not shared, f"blocks {shared} would be written to by one of several holders"
