"""Blocks and block tables: a pool counts references to blocks, a table maps a sequence's logical blocks to physical
ones, and cached blocks are those of a pool with what is known of them: cached, parked, distrusted."""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, KeysView
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final

from octavo.scheduler.kv.prefix_cache import CachedBlock, PrefixCache
from octavo.wire.base import NULL_BLOCK

# Evictions that are remembered of each replica.
MOST_EVICTIONS: Final = 1 << 14


class Evictions:
    """Remembers which contents made way last, and when. `now` is the time of the step that is being planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self._evicted: deque[tuple[CachedBlock, float]] = deque(maxlen=MOST_EVICTIONS)

    def __deepcopy__(self, memo: dict[int, object]) -> "Evictions":
        """Makes one without a memory: what becomes of a copy is nobody's business."""
        return Evictions()

    def add(self, content: CachedBlock) -> None:
        """Notes that this content makes way now."""
        self._evicted.append((content, self.now))

    def last(self, value: bytes, before: float) -> float | None:
        """Returns when the content of this hash made way last, not later than `before`; None if that is not
        remembered."""
        return next((at for each, at in reversed(self._evicted) if each.value == value and at <= before), None)

    def clear(self) -> None:
        """Forgets all."""
        self._evicted.clear()


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

    def used(self, block_id: int) -> None:
        """Lets a block, if it is free, be taken after all that are free now."""
        if block_id in self._free:
            self._free.move_to_end(block_id)

    def check(self, holders: Iterable[Iterable[int]]) -> None:
        """Asserts that `holders` (tables, parking lots, pins) account for each reference and the free list for the
        rest."""
        expected = [0] * self.num_blocks
        for block_ids in holders:
            for block_id in block_ids:
                expected[block_id] += 1
        assert expected == self._ref_counts, "reference counts differ from the tables that hold the blocks"
        assert sorted(self._free) == [i for i, count in enumerate(expected) if count == 0], "free list is wrong"


class CachedBlocks:
    """Joins a pool with the prefix cache over all its blocks. Cached content that is there for certain when its block
    is taken is noted in `evictions`; with `keeps_evicted` the block is listed with it, as `evicted`, too."""

    def __init__(
        self,
        num_blocks: int,
        num_kv_groups: int,
        *,
        prefix_caching: bool,
        keeps_evicted: bool = False,
        evictions: Evictions | None = None,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(num_kv_groups)
        self.prefix_caching = prefix_caching
        self.evicted: list[tuple[int, CachedBlock]] = []
        self.evictions = evictions or Evictions()
        self.num_evicted = 0
        self.keeps_evicted = keeps_evicted
        # Parked blocks by the step whose answer frees them.
        self.parked: dict[int, list[int]] = defaultdict(list)
        # Blocks that a non-finite sequence held or filled, and that others still hold.
        self._distrusted: set[int] = set()

    def take(self, count: int) -> list[int]:
        """Takes `count` free blocks for new content. Raises `ValueError` if fewer are free."""
        block_ids = self.pool.allocate(count)
        for block_id in block_ids:
            if (content := self.cache.remove(block_id)) is not None:
                self.evictions.add(content)
                self.num_evicted += 1
                if self.keeps_evicted:
                    self.evicted.append((block_id, content))
        return block_ids

    def use(self, block_ids: Iterable[int]) -> None:
        """Lets blocks, as far as they are free, be taken after all others that are free now, in the order in which
        `release` would have given them up together."""
        block_ids = list(block_ids)
        self.pool.share(block_ids)
        self.release(block_ids)

    def park(self, step_id: int, block_ids: list[int]) -> None:
        """Keeps blocks that are given up until this step is answered."""
        if block_ids:
            self.parked[step_id] += block_ids

    def release(self, block_ids: Iterable[int]) -> None:
        """Drops references. Of the blocks that become free those without cached content are taken again first, then the
        longest unused; of those given up together the ones with the longest prefix go before the others, so that a
        chain is eaten from its tail."""
        unused = [block_id for block_id in block_ids if self.pool.release(block_id)]
        self._distrusted.difference_update(unused)
        cached = []
        for block_id in reversed(unused):
            if not self.prefix_caching:
                self.cache.remove(block_id)
            content = self.cache.content(block_id)
            if content is None:
                self.pool.give_back(block_id, first=True)
            else:
                cached.append((-content.depth, block_id))
        for _, block_id in sorted(cached):
            self.pool.give_back(block_id)

    def surviving(self, own: set[int], num_taken: int) -> set[int]:
        """Returns which blocks of `own`, given up together, a prefix hit would still find after `num_taken` of them
        have been taken: what is not cached goes first, then chains from their tails."""
        contents = ((self.cache.content(block_id), block_id) for block_id in own if self.prefix_caching)
        cached = sorted((content.depth, block_id) for content, block_id in contents if content is not None)
        return {block_id for _, block_id in cached[: max(0, min(len(cached), len(own) - num_taken))]}

    def step_answered(self, step_id: int, *, valid: bool) -> list[int]:
        """Frees the blocks that were parked for this step; the content it wrote is relied on only if it is `valid`.
        Returns the blocks that it has filled, or was to."""
        filled = self.cache.step_answered(step_id, valid=valid)
        if (parked := self.parked.pop(step_id, None)) is not None:
            self.release(parked)
        return filled

    @property
    def parked_block_ids(self) -> list[int]:
        """Returns the blocks that wait for outstanding steps, once for each; sequences may hold them too."""
        return [block_id for block_ids in self.parked.values() for block_id in block_ids]

    @property
    def num_parked(self) -> int:
        """Counts the blocks that will be free as soon as outstanding steps are answered."""
        parked = Counter(self.parked_block_ids)
        return sum(self.pool.ref_count(block_id) == count for block_id, count in parked.items())

    @property
    def cached_free_block_ids(self) -> AbstractSet[int]:
        """Returns the free blocks that a prefix hit would find: a walk over the fewer of all that are free and all that
        are cached."""
        return self.pool.free_block_ids & self.cache.block_ids

    def distrust(self, block_ids: Iterable[int]) -> list[CachedBlock]:
        """Makes sure that none of these blocks is found again in the prefix cache; returns what they held for it."""
        contents = []
        for block_id in block_ids:
            if (content := self.cache.content(block_id)) is not None:
                contents.append(content)
            self.cache.remove(block_id)
            if self.pool.ref_count(block_id):
                self._distrusted.add(block_id)
        return contents

    def any_distrusted(self, block_ids: Iterable[int]) -> bool:
        """Tells whether one of these blocks has been held since before it was distrusted."""
        return bool(self._distrusted) and not self._distrusted.isdisjoint(block_ids)


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence, one list per KV group, all of one length; `NULL_BLOCK` where a window has passed.

    The first `num_indexed` have been offered to the prefix cache. The first `num_passed` of each windowed group are
    null. `shares_last`: the last blocks may be another's too, for the sequence has been forked, or is a fork.
    `is_private`: the prefix cache was reset since the sequence began, and nobody is to find what is computed of it.
    """

    groups: list[list[int]]
    num_indexed: int = 0
    num_passed: list[int] = field(default_factory=list)
    shares_last: bool = False
    is_private: bool = False

    def __post_init__(self) -> None:
        if not self.num_passed:
            self.num_passed = [_leading_nulls(blocks) for blocks in self.groups]

    def __len__(self) -> int:
        return len(self.groups[0])

    def __deepcopy__(self, memo: dict[int, object]) -> "BlockTable":
        return self.copy()

    def copy(self) -> "BlockTable":
        groups = [list(blocks) for blocks in self.groups]
        return BlockTable(groups, self.num_indexed, list(self.num_passed), self.shares_last, self.is_private)

    @property
    def block_ids(self) -> list[int]:
        """Returns all blocks of all groups, without null entries."""
        return present(self.groups)


def present(groups: Iterable[Iterable[int]]) -> list[int]:
    """Returns all entries that are blocks."""
    return [block_id for blocks in groups for block_id in blocks if block_id != NULL_BLOCK]


def _leading_nulls(blocks: list[int]) -> int:
    return next((i for i, block_id in enumerate(blocks) if block_id != NULL_BLOCK), len(blocks))
