"""What a device keeps of each sequence between steps: its block tables, and the token it sampled last."""

import logging
from collections.abc import Iterable

import numpy as np
import torch

from octavo.worker.gpu.transfer import upload
from octavo.worker.sequences import WorkerSequence

logger = logging.getLogger(__name__)


class SequenceRows:
    """A row for each sequence, from its first step until it is forgotten.

    `tables`: [groups, capacity, width] int32, of which only entries that a step reads need be right; `next_tokens`:
    [capacity] int64. Where more rows are needed than there are, both are replaced by larger ones: `generation` counts
    how often, and captured graphs, which read the old ones, are lost. The last row is nobody's, for what is to be
    written nowhere.
    """

    def __init__(self, num_groups: int, width: int, device: torch.device, capacity: int) -> None:
        self._device = device
        self._rows: dict[int, int] = {}
        self._free = list(range(capacity - 1))
        self.tables = torch.zeros(num_groups, capacity, width, dtype=torch.int32, device=device)
        self.next_tokens = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.generation = 0

    @property
    def nbytes(self) -> int:
        return self.tables.nbytes + self.next_tokens.nbytes

    @property
    def nobody(self) -> int:
        return self.tables.shape[1] - 1

    def row_of(self, sequence: WorkerSequence) -> int:
        """That of `sequence`, which gets one if it has none."""
        row = self._rows.get(sequence.sequence_id)
        if row is None:
            if not self._free:
                self._grow()
            row = self._rows[sequence.sequence_id] = self._free.pop()
            sequence.num_told = [0] * len(self.tables)
        return row

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Their rows are free; steps under way still use them before any other can."""
        for sequence_id in sequence_ids:
            row = self._rows.pop(sequence_id, None)
            if row is not None:
                self._free.append(row)

    def tell(self, sequences: Iterable[WorkerSequence]) -> None:
        """Writes to `tables` what the device has not been told of those of `sequences`, which all have rows."""
        places: list[int] = []
        block_ids: list[int] = []
        _, capacity, width = self.tables.shape
        for sequence in sequences:
            row = self._rows[sequence.sequence_id]
            for group, table in enumerate(sequence.block_tables):
                told, known = sequence.num_told[group], len(table)
                if told < known:
                    first = (group * capacity + row) * width
                    places += range(first + told, first + known)
                    block_ids += table[told:]
                    sequence.num_told[group] = known
        if places:
            packed = upload(np.array([places, block_ids], dtype=np.int64), self._device)
            self.tables.view(-1).index_copy_(0, packed[0], packed[1].int())

    def _grow(self) -> None:
        capacity = self.tables.shape[1]
        logger.warning(
            "more than %d sequences at once: tables grow and graphs are captured anew while requests wait; give the"
            " worker the scheduler's --max-num-seqs",
            capacity - 1,
        )
        self._free = list(range(capacity - 1, 2 * capacity - 1))
        self.tables = torch.cat((self.tables, torch.zeros_like(self.tables)), dim=1)
        self.next_tokens = torch.cat((self.next_tokens, torch.zeros_like(self.next_tokens)))
        self.generation += 1
