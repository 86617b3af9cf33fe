"""One replica's KV memory: which blocks each sequence holds, and whether more may be had."""

import enum
import math

from octavo.scheduler.block_pool import BlockPool
from octavo.scheduler.sequence import Sequence, SequenceGroup


class AllocStatus(enum.Enum):
    """Whether a sequence group can be given its blocks: now, once others have freed theirs, or not on this replica."""

    OK = enum.auto()
    LATER = enum.auto()
    NEVER = enum.auto()


class KVCacheManager:
    """Block tables of the sequences that hold KV on one replica.

    Blocks of a sequence that ends while a step with it is outstanding are parked until that step is answered, because
    until then the worker may still write to them.
    """

    def __init__(self, num_blocks: int, block_size: int, watermark: float) -> None:
        self.block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._tables: dict[int, list[int]] = {}
        # Blocks by the step whose answer frees them.
        self._parked: dict[int, list[int]] = {}
        self._watermark_blocks = math.ceil(num_blocks * watermark)

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def capacity_tokens(self) -> int:
        """The most tokens one sequence can hold here."""
        return self.num_blocks * self.block_size

    def can_allocate(self, group: SequenceGroup) -> AllocStatus:
        """Whether the blocks for all known tokens of `group` fit.

        The watermark stays free, unless nothing else holds any block.
        """
        if group.worst_case_tokens > self.capacity_tokens:
            return AllocStatus.NEVER
        needed = sum(self._blocks_for(sequence.num_known) for sequence in group.live)
        reserve = self._watermark_blocks if self._tables else 0
        return AllocStatus.OK if needed + reserve <= self.num_free else AllocStatus.LATER

    def allocate(self, sequence: Sequence) -> list[int]:
        """Gives a sequence that holds nothing the blocks of all its known tokens, computed or not.

        Taking them at admission rather than chunk by chunk keeps two half-prefilled prompts from starving each other.
        """
        assert sequence.sequence_id not in self._tables
        block_ids = self._pool.allocate(self._blocks_for(sequence.num_known))
        self._tables[sequence.sequence_id] = block_ids
        return list(block_ids)

    def num_missing(self, sequence: Sequence) -> int:
        """Blocks the table lacks to hold all tokens of the sequence, those in flight too."""
        return max(0, self._blocks_for(sequence.num_tokens) - len(self._tables[sequence.sequence_id]))

    def append(self, sequence: Sequence, num_blocks: int) -> list[int]:
        """Grows the table by `num_blocks` blocks; their ids."""
        block_ids = self._pool.allocate(num_blocks)
        self._tables[sequence.sequence_id] += block_ids
        return block_ids

    def free(self, sequence: Sequence, outstanding_step_id: int | None = None) -> None:
        """Takes the sequence's blocks back, at once or when `outstanding_step_id` is answered."""
        block_ids = self._tables.pop(sequence.sequence_id)
        if outstanding_step_id is None:
            self._pool.free(block_ids)
        else:
            self._parked.setdefault(outstanding_step_id, []).extend(block_ids)

    def step_answered(self, step_id: int) -> None:
        """Frees what was parked for this step."""
        self._pool.free(self._parked.pop(step_id, ()))

    def check(self) -> None:
        """Asserts that every block is free, in a table or parked, and counted right."""
        self._pool.check([*self._tables.values(), *self._parked.values()])

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
