"""One replica's KV memory: which blocks each sequence holds, which are shared, and whether more may be had."""

import enum
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from octavo.scheduler.block_pool import BlockPool
from octavo.scheduler.block_table import BlockTable, Growth, first_visible, present
from octavo.scheduler.lost_spans import Span, lost_spans
from octavo.scheduler.prefix_cache import CachedBlock, PrefixCache, block_hashes
from octavo.scheduler.prefix_lookup import Begin, PrefixLookup, Tail
from octavo.scheduler.sequence import Sequence
from octavo.scheduler.swap_space import SwapSpace
from octavo.wire.base import NULL_BLOCK
from octavo.wire.steps import BlockMove, Remap


class AllocStatus(enum.Enum):
    """Whether sequences can be given their blocks: now, once others have freed theirs, or not on this replica."""

    OK = enum.auto()
    LATER = enum.auto()
    NEVER = enum.auto()


@dataclass(frozen=True, slots=True)
class _Pin:
    """What a pinned prefix holds."""

    block_ids: list[int]
    tail: Tail | None


class KVCacheManager:
    """Block tables of the sequences that hold KV on one replica, and the prefix cache over all its blocks.

    `windows`: one per KV group, in tokens, 0 for none. Blocks that a sequence gives up while a step with it is
    outstanding are parked until that step is answered, because until then the worker may still use them.

    A block enters the prefix cache as soon as a plan fills it, before the step is answered: a replica runs its plans in
    order, and writes a step's KV before it reads any, so whoever shares the block finds it filled. If the step fails,
    the entry is withdrawn.
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
        self._pool = BlockPool(num_blocks)
        self._cache = PrefixCache(len(self._windows))
        self._swap_space = SwapSpace(num_cpu_blocks, block_size, self._pool, self._cache)
        self._lookup = PrefixLookup(self._cache, block_size, self._windows)
        self._tables: dict[Sequence, BlockTable] = {}
        # Blocks by the step whose answer frees them.
        self._parked: dict[int, list[int]] = defaultdict(list)
        self._pins: dict[str, _Pin] = {}
        # Blocks that a sequence which was not finite held or filled, and others still do.
        self._distrusted: set[int] = set()
        # Set aside for pinned prefixes, those still to be computed too.
        self.reserved_blocks = 0

    # -- counts -----------------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that may be taken, those with cached content too."""
        return self._pool.num_free

    @property
    def num_cached(self) -> int:
        """Blocks that a prefix hit would find."""
        return len(self._cache)

    @property
    def num_pinned(self) -> int:
        """Blocks that pinned prefixes keep for good."""
        return len(self._all_pinned())

    @property
    def num_parked(self) -> int:
        """Blocks that are free as soon as outstanding steps are answered."""
        parked = Counter(self.parked_block_ids)
        return sum(self._pool.ref_count(block_id) == count for block_id, count in parked.items())

    @property
    def num_cached_free(self) -> int:
        """Free blocks that a prefix hit would find."""
        return len(self.cached_free_block_ids)

    @property
    def num_cpu_blocks(self) -> int:
        return self._swap_space.num_blocks

    @property
    def num_cpu_free(self) -> int:
        return self._swap_space.num_free

    @property
    def capacity_tokens(self) -> int:
        """The most tokens one sequence can hold here."""
        return (self.num_blocks - self.reserved_blocks) // len(self._windows) * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks, of all KV groups together, that hold `num_tokens` tokens of one sequence."""
        return -(-num_tokens // self.block_size) * len(self._windows)

    def holds(self, sequence: Sequence) -> bool:
        """Whether the sequence has blocks on the device."""
        return sequence in self._tables

    def block_table(self, sequence: Sequence) -> list[list[int]]:
        """The sequence's blocks, one list per KV group; to be read."""
        return self._tables[sequence].groups

    def cpu_block_table(self, sequence: Sequence) -> list[list[int]]:
        """The same for a sequence that is swapped out, in CPU blocks."""
        return self._swap_space.table(sequence).groups

    @property
    def cached_free_block_ids(self) -> AbstractSet[int]:
        """Free blocks that a prefix hit would find: a walk over the fewer of all that are free and all that are
        cached."""
        return self._pool.free_block_ids & self._cache.block_ids

    @property
    def parked_block_ids(self) -> list[int]:
        """Blocks that wait for outstanding steps, as often as they do; others may hold them too."""
        return [block_id for block_ids in self._parked.values() for block_id in block_ids]

    @property
    def pinned_block_ids(self) -> dict[str, list[int]]:
        """The blocks of each pinned prefix, by its name."""
        return {name: pin.block_ids for name, pin in self._pins.items()}

    def ref_count(self, block_id: int) -> int:
        """How many tables, parking lots and pins hold a block."""
        return self._pool.ref_count(block_id)

    # -- start ------------------------------------------------------------------------------------------------------

    def can_allocate(self, sequences: Ordered[Sequence], worst_case_blocks: int) -> AllocStatus:
        """Whether the blocks for all known tokens of `sequences`, which start together, can be had.

        `worst_case_blocks` is what the group can grow to with nothing shared. The watermark stays free, unless nothing
        else holds any block.
        """
        if worst_case_blocks > self.num_blocks - self.reserved_blocks:
            return AllocStatus.NEVER
        reserve = self.watermark_blocks if self._tables else 0
        return AllocStatus.OK if self.num_needed(sequences) + reserve <= self.num_free else AllocStatus.LATER

    def num_needed(self, sequences: Ordered[Sequence]) -> int:
        """Free blocks that a start of `sequences` would use up: all but those that others hold already."""
        begins = self._lookup.begins(sequences)
        taken = sum(
            self.blocks_for(sequence.num_known) - begin.num_blocks * len(self._windows)
            for sequence, begin in zip(sequences, begins, strict=True)
        )
        found = {block_id for begin in begins for block_id in present(begin.found)}
        return taken + sum(self._pool.ref_count(block_id) == 0 for block_id in found)

    def num_found(self, sequences: Ordered[Sequence]) -> int:
        """Known tokens of `sequences` that would not be computed again."""
        return sum(begin.num_blocks for begin in self._lookup.begins(sequences)) * self.block_size

    def allocate(self, sequences: Ordered[Sequence]) -> list[BlockMove]:
        """Gives sequences of one group, which hold nothing, the blocks of all their known tokens; what must be copied.

        Each learns how many tokens it need not compute, and for which of the others it must wait: equal beginnings
        inside a group share blocks, cached or not. Taking all blocks at the start rather than chunk by chunk keeps
        half-prefilled prompts from starving each other.
        """
        begins = self._lookup.begins(sequences)
        # Before anything is taken: what is free and cached could be taken otherwise.
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
        if begin.tail is None:
            return []
        sequence.num_computed += len(begin.tail.token_ids)
        targets = (blocks[begin.num_blocks] for blocks in table.groups)
        return [BlockMove(source, target) for source, target in zip(begin.tail.block_ids, targets, strict=True)]

    def _shared_with(self, leader: Sequence, num_blocks: int) -> list[list[int]]:
        """The first blocks of a leader's tables, as far as windows reach; referenced."""
        groups = []
        for window, blocks in zip(self._windows, self._tables[leader].groups, strict=True):
            first = first_visible(window, num_blocks * self.block_size, self.block_size)
            groups.append([NULL_BLOCK] * first + blocks[first:num_blocks])
        self._pool.share(present(groups))
        return groups

    # -- grow -------------------------------------------------------------------------------------------------------

    def num_missing(self, sequences: Iterable[Sequence]) -> int:
        """Blocks that one more token for each of `sequences` takes: new ones, and copies of shared ones."""
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
        """Makes room for the sequence's next token, in blocks of its own; what that changes, if anything."""
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
        """`child` shares all blocks of `parent`."""
        table = self._tables[child] = self._tables[parent].copy()
        parent.shares_last_block = child.shares_last_block = True
        self._pool.share(table.block_ids)

    def index(self, sequence: Sequence, step_id: int) -> list[Remap]:
        """Offers to the prefix cache the blocks that known and computed tokens have filled since the last call.

        `step_id` fills them at the latest. Where an older block holds the same, the sequence's table is pointed at that
        and its own is given up; the worker must be told in a plan after `step_id`.
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
        """Whether another block took the place of the one that was offered."""
        blocks = self._tables[sequence].groups[content.kv_group]
        own = blocks[content.depth]
        if own == NULL_BLOCK or self._cache.insert(content, own, step_id, sequence.sequence_id):
            return False
        older = self._cache.confirmed_block(content.kv_group, content.value)
        # One that nobody holds is left alone: to take it would need a free block that this step may count on.
        if older is None or older == own or not self._pool.ref_count(older):
            return False
        self._pool.share([older])
        blocks[content.depth] = older
        self._parked[step_id].append(own)
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
                    self._parked[step_id].append(blocks[logical])
                    blocks[logical] = NULL_BLOCK
            table.num_passed[group] = max(first, passed)

    @property
    def slides(self) -> bool:
        """Whether any KV group has a window."""
        return bool(self._windowed)

    # -- distrust ---------------------------------------------------------------------------------------------------

    def distrust(self, sequence_id: int, sequence: Sequence | None) -> None:
        """Nothing that was computed of a sequence is found again in the prefix cache: neither what outstanding steps
        fill with it nor, if it is still held, anything in its table; but for what is pinned.

        To be called before the step that brought this to light is booked as answered.
        """
        pinned = self._all_pinned()
        held = self._tables[sequence].block_ids if sequence is not None else []
        for block_id in {*self._cache.filled_by(sequence_id), *held} - pinned:
            self._cache.remove(block_id)
            if self._pool.ref_count(block_id):
                self._distrusted.add(block_id)

    def holds_distrusted(self, sequence: Sequence) -> bool:
        """Whether the sequence has a block from one that is distrusted."""
        return bool(self._distrusted) and not self._distrusted.isdisjoint(self._tables[sequence].block_ids)

    # -- give up ----------------------------------------------------------------------------------------------------

    def free(self, sequence: Sequence, outstanding_step_id: int | None = None) -> None:
        """Takes the sequence's blocks back, at once or when `outstanding_step_id` is answered."""
        block_ids = self._tables.pop(sequence).block_ids
        if outstanding_step_id is None:
            self._release(block_ids)
        else:
            self._parked[outstanding_step_id] += block_ids

    def step_answered(self, step_id: int, *, valid: bool) -> None:
        """Frees what was parked for this step; what it wrote is relied on only if it is `valid`."""
        self._cache.step_answered(step_id, valid=valid)
        self._release(self._parked.pop(step_id, []))

    def _release(self, block_ids: Iterable[int]) -> None:
        """Drops references. Worthless blocks are taken again first, then the longest unused; of those given up together
        the ones with the longest prefix go before the others, so that a chain is eaten from its tail."""
        unused = [block_id for block_id in block_ids if self._pool.release(block_id)]
        self._distrusted.difference_update(unused)
        cached = []
        for block_id in reversed(unused):
            if not self._prefix_caching:
                self._cache.remove(block_id)
            content = self._cache.content(block_id)
            if content is None:
                self._pool.give_back(block_id, first=True)
            else:
                cached.append((-content.depth, block_id))
        for _, block_id in sorted(cached):
            self._pool.give_back(block_id)

    def _take(self, count: int) -> list[int]:
        block_ids = self._pool.allocate(count)
        for block_id in block_ids:
            self._cache.remove(block_id)
        return block_ids

    # -- swap -------------------------------------------------------------------------------------------------------

    def can_swap_out(self, sequences: Ordered[Sequence]) -> bool:
        """Whether CPU memory has room for what `sequences` hold."""
        return self.num_to_swap(sequences) <= self._swap_space.num_free

    def num_to_swap(self, sequences: Ordered[Sequence]) -> int:
        """Blocks that a swap-out of `sequences` moves."""
        return len(self._computed_blocks(sequences))

    def num_own(self, sequences: Ordered[Sequence]) -> int:
        """Of these blocks the ones that nobody else holds."""
        held = self._held_by(sequences)
        return sum(self._pool.ref_count(block_id) == held[block_id] for block_id in self._computed_blocks(sequences))

    def lost_by(self, sequences: Ordered[Sequence], num_taken: int) -> list[Span]:
        """What would have to be computed again of `sequences`, all that their group holds, if they gave up their blocks
        and `num_taken` of these were taken before they came back."""
        held = self._held_by(sequences)
        own = {block_id for block_id, count in held.items() if self._pool.ref_count(block_id) == count}
        tables = [(sequence, self._tables[sequence]) for sequence in sequences]
        return lost_spans(tables, own - self._surviving(own, num_taken), self.block_size)

    def _surviving(self, own: set[int], num_taken: int) -> set[int]:
        """Of blocks that are given up together, those a prefix hit would find after `num_taken` have been taken: what
        is not cached goes first, then chains from their tails."""
        contents = ((self._cache.content(block_id), block_id) for block_id in own if self._prefix_caching)
        cached = sorted((content.depth, block_id) for content, block_id in contents if content is not None)
        return {block_id for _, block_id in cached[: max(0, min(len(cached), len(own) - num_taken))]}

    def _computed_blocks(self, sequences: Ordered[Sequence]) -> set[int]:
        return {block_id for sequence in sequences for block_id in present(self._computed(sequence))}

    def _held_by(self, sequences: Ordered[Sequence]) -> Counter[int]:
        return Counter(block_id for sequence in sequences for block_id in self._tables[sequence].block_ids)

    def swap_out(self, sequences: Ordered[Sequence]) -> list[BlockMove]:
        """Moves the blocks of a whole group to CPU blocks, shared as they were; their device blocks are free at once.

        Only for a group of which no step is outstanding.
        """
        moved: dict[int, int] = {}
        for sequence in sequences:
            self._swap_space.put(sequence, self._computed(sequence), moved)
        self._release(block_id for sequence in sequences for block_id in self._tables.pop(sequence).block_ids)
        return [BlockMove(source, target) for source, target in moved.items()]

    def num_missing_swapped(self, sequences: Ordered[Sequence]) -> int:
        """Device blocks that a swapped group needs to come back and compute one more token for each sequence."""
        return self._swap_space.num_missing(sequences)

    def swap_in(self, sequences: Ordered[Sequence]) -> list[BlockMove]:
        """The way back, but for what others hold by then: that is shared. The tables get room for all known tokens."""
        moved: dict[int, int] = {}
        for sequence in sequences:
            self._tables[sequence] = BlockTable(self._swap_space.bring_back(sequence, moved, self._take))
        for sequence in sequences:
            self._swap_space.drop(sequence)
        return [BlockMove(source, target) for source, target in moved.items()]

    def drop_swapped(self, sequence: Sequence) -> None:
        """The sequence no longer needs its CPU blocks."""
        self._swap_space.drop(sequence)

    def _computed(self, sequence: Sequence) -> list[list[int]]:
        """The blocks with any computed token in them."""
        count = -(-sequence.num_computed // self.block_size)
        return [blocks[:count] for blocks in self._tables[sequence].groups]

    # -- pin --------------------------------------------------------------------------------------------------------

    def pin(self, name: str, sequence: Sequence) -> None:
        """Keeps the blocks of a sequence's prompt, all computed, under a name; the sequence holds nothing any more."""
        table, num_full = self._tables.pop(sequence), sequence.num_prompt // self.block_size
        hashes = block_hashes(sequence, self.block_size)
        for group, blocks in enumerate(table.groups):
            for logical, block_id in enumerate(blocks[:num_full]):
                if block_id != NULL_BLOCK:
                    # Where another block holds the same, this one is to be found, for that one may go.
                    self._cache.replace(CachedBlock(hashes[logical], group, logical), block_id)
        tail = None
        if sequence.num_prompt % self.block_size:
            tokens = sequence.known_tokens(num_full * self.block_size, sequence.num_prompt)
            parent = hashes[num_full - 1] if num_full else sequence.root_hash
            tail = Tail(parent, tokens, [blocks[num_full] for blocks in table.groups])
            self._lookup.tails.append(tail)
        self._pins[name] = _Pin(table.block_ids, tail)

    def unpin(self, name: str) -> None:
        """Gives a pinned prefix's blocks up; as cached content, if that is wanted, they stay until they are taken."""
        pin = self._pins.pop(name)
        if pin.tail is not None:
            self._lookup.tails.remove(pin.tail)
        self._release(pin.block_ids)

    def _all_pinned(self) -> set[int]:
        return {block_id for pin in self._pins.values() for block_id in pin.block_ids}

    def is_pinned(self, name: str) -> bool:
        """Whether the prefix of this name is computed and kept here."""
        return name in self._pins

    # -- invariants -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Asserts that every block is free, in a table, parked or pinned, and counted right."""
        tables = [table.block_ids for table in self._tables.values()]
        self._pool.check([*tables, *self._parked.values(), *(pin.block_ids for pin in self._pins.values())])
        self._swap_space.check()
        self._cache.check()
        # Those that wait for a block want what is written to it; others must know that they share one.
        awaited = {sequence.waits_for[0] for sequence in self._tables if sequence.waits_for is not None}
        for sequence, table in self._tables.items():
            index, offset = divmod(sequence.num_computed, self.block_size)
            if offset and not sequence.shares_last_block and sequence not in awaited:
                shared = [blocks[index] for blocks in table.groups if self.ref_count(blocks[index]) > 1]
                assert not shared, f"blocks {shared} would be written to by one of several holders"
