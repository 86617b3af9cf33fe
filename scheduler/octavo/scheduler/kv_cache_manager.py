"""One replica's KV memory: which blocks each sequence holds, which are shared, and whether more may be had."""

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass

from octavo.scheduler.block_pool import BlockPool
from octavo.scheduler.prefix_cache import PrefixCache, block_hashes
from octavo.scheduler.sequence import Sequence, SequenceGroup


class AllocStatus(enum.Enum):
    """Whether a sequence group can be given its blocks: now, once others have freed theirs, or not on this replica."""

    OK = enum.auto()
    LATER = enum.auto()
    NEVER = enum.auto()


@dataclass(slots=True)
class BlockTable:
    """One sequence's blocks, logical to physical; the first `num_indexed` have been offered to the prefix cache."""

    block_ids: list[int]
    num_indexed: int = 0


class KVCacheManager:
    """Block tables of the sequences that hold KV on one replica, and the prefix cache over all its blocks.

    Blocks of a sequence that ends while a step with it is outstanding are parked until that step is answered, because
    until then the worker may still write to them.

    A block enters the prefix cache as soon as a plan fills it, before the step is answered: a replica runs its plans in
    order, and writes a step's KV before it reads any, so whoever shares the block finds it filled. If the step fails,
    the entry is withdrawn.
    """

    def __init__(self, num_blocks: int, block_size: int, watermark: float, *, prefix_caching: bool) -> None:
        self.block_size = block_size
        self._prefix_caching = prefix_caching
        self._pool = BlockPool(num_blocks)
        self._cache = PrefixCache()
        self._tables: dict[int, BlockTable] = {}
        # Blocks by the step whose answer frees them.
        self._parked: dict[int, list[int]] = {}
        self._watermark_blocks = math.ceil(num_blocks * watermark)

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
    def capacity_tokens(self) -> int:
        """The most tokens one sequence can hold here."""
        return self.num_blocks * self.block_size

    def can_allocate(self, group: SequenceGroup) -> AllocStatus:
        """Whether the blocks for all known tokens of `group` fit, shared ones counted once they are held by others.

        The watermark stays free, unless nothing else holds any block.
        """
        if group.worst_case_tokens > self.capacity_tokens:
            return AllocStatus.NEVER
        needed = sum(self._num_needed(sequence) for sequence in group.live)
        reserve = self._watermark_blocks if self._tables else 0
        return AllocStatus.OK if needed + reserve <= self.num_free else AllocStatus.LATER

    def allocate(self, sequence: Sequence) -> tuple[list[int], int]:
        """Gives a sequence that holds nothing the blocks of all its known tokens, and says how many tokens of them are
        computed already, found in the prefix cache.

        Taking all blocks at admission rather than chunk by chunk keeps half-prefilled prompts from starving each other.
        """
        assert sequence.sequence_id not in self._tables
        hits = self._find(sequence)
        # Before anything is taken: what is free and cached could be taken otherwise.
        self._pool.share(hits)
        block_ids = hits + self._take(self._blocks_for(sequence.num_known) - len(hits))
        self._tables[sequence.sequence_id] = BlockTable(block_ids, num_indexed=len(hits))
        return list(block_ids), len(hits) * self.block_size

    def num_missing(self, sequence: Sequence) -> int:
        """Blocks the table lacks to hold all tokens of the sequence, those in flight too."""
        return max(0, self._blocks_for(sequence.num_tokens) - len(self._tables[sequence.sequence_id].block_ids))

    def append(self, sequence: Sequence, num_blocks: int) -> list[int]:
        """Grows the table by `num_blocks` blocks; their ids."""
        block_ids = self._take(num_blocks)
        self._tables[sequence.sequence_id].block_ids += block_ids
        return block_ids

    def index(self, sequence: Sequence) -> None:
        """Offers to the prefix cache the blocks that known and computed tokens have filled since the last call."""
        table = self._tables[sequence.sequence_id]
        num_full = min(sequence.num_computed, sequence.num_known) // self.block_size
        if num_full == table.num_indexed or not self._prefix_caching:
            return
        hashes = block_hashes(sequence, self.block_size)
        for logical in range(table.num_indexed, num_full):
            self._cache.insert(hashes[logical], table.block_ids[logical])
        table.num_indexed = num_full

    def withdraw(self, sequence: Sequence) -> None:
        """A step with the sequence has failed: nothing in its blocks is to be found any more."""
        self._forget_content(self._tables[sequence.sequence_id].block_ids)

    def free(self, sequence: Sequence, outstanding_step_id: int | None = None) -> None:
        """Takes the sequence's blocks back, at once or when `outstanding_step_id` is answered."""
        block_ids = self._tables.pop(sequence.sequence_id).block_ids
        if outstanding_step_id is None:
            self._give_back(block_ids)
        else:
            self._parked.setdefault(outstanding_step_id, []).extend(block_ids)

    def step_answered(self, step_id: int, *, valid: bool) -> None:
        """Frees what was parked for this step; what it wrote is relied on only if it is `valid`."""
        block_ids = self._parked.pop(step_id, [])
        if not valid:
            self._forget_content(block_ids)
        self._give_back(block_ids)

    def check(self) -> None:
        """Asserts that every block is free, in a table or parked, and counted right."""
        self._pool.check([*(table.block_ids for table in self._tables.values()), *self._parked.values()])
        self._cache.check()

    def _find(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the sequence's first tokens. Never its last known token: its logits are needed."""
        if not self._prefix_caching:
            return []
        return self._cache.find(block_hashes(sequence, self.block_size)[: (sequence.num_known - 1) // self.block_size])

    def _num_needed(self, sequence: Sequence) -> int:
        """Free blocks that admission would use up: all but those that others hold already."""
        held = sum(self._pool.is_held(block_id) for block_id in self._find(sequence))
        return self._blocks_for(sequence.num_known) - held

    def _take(self, count: int) -> list[int]:
        block_ids = self._pool.allocate(count)
        self._forget_content(block_ids)
        return block_ids

    def _give_back(self, block_ids: list[int]) -> None:
        """Worthless blocks are taken again first, then the longest unused; of one sequence's, the last first, so that a
        chain is eaten from its tail."""
        for block_id in reversed(block_ids):
            self._pool.free(block_id, first=block_id not in self._cache)

    def _forget_content(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self._cache.remove(block_id)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
