"""How far a draft model has followed the model in each block: as many of the leading slots hold its keys and values."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.wire.steps import BlockMove, BlockMoves

# A number of slots for each block, and its bytes.
Counts = NDArray[np.uint16]
_NUM_BYTES = 2


class FollowedSlots:
    """Counts the slots of `num_blocks` blocks of the device, and of `num_cpu_blocks`, that hold what a draft model has
    computed of the tokens that they hold of the model. Counts move with their blocks, and are written and read as a
    part of these (`octavo.worker.step.block_bytes`): so a block says of itself what there is, wherever it comes from.
    """

    is_here = True
    bytes_per_block = _NUM_BYTES

    def __init__(self, num_blocks: int, num_cpu_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._counts: Counts = np.zeros(num_blocks, dtype=np.uint16)
        self._cpu_counts: Counts = np.zeros(num_cpu_blocks, dtype=np.uint16)
        self._rows, self._cpu_rows = _bytes(self._counts), _bytes(self._cpu_counts)

    def move(self, moves: BlockMoves) -> None:
        """Moves counts as their blocks are moved."""
        _move(self._counts, self._cpu_counts, moves.swap_out)
        _move(self._cpu_counts, self._counts, moves.swap_in)
        _move(self._counts, self._counts, moves.copy)

    def written(self, table: Sequence[int], start: int, end: int) -> None:
        """Notes that the model has written the positions `start` to `end` - 1 of a table: what blocks held behind
        `start` is gone."""
        for block_id, offset, _ in self._spans(table, start, end):
            self._counts[block_id] = min(self._counts[block_id], offset)

    def followed(self, table: Sequence[int], start: int, end: int) -> None:
        """Notes that the draft model has computed the positions `start` to `end` - 1 of a table, and all before them
        in the same block."""
        for block_id, _, last in self._spans(table, start, end):
            self._counts[block_id] = last

    def reached(self, table: Sequence[int], end: int, first_block: int = 0) -> int:
        """Returns the first position from logical block `first_block` of a table on that the draft model has not
        computed; `end` if there is none before that."""
        num_full, offset = divmod(end, self._block_size)
        counts = self._counts[np.array(table[first_block : num_full + (offset > 0)], dtype=np.int64)]
        gaps = np.flatnonzero(counts[: num_full - first_block] < self._block_size)
        if len(gaps):
            return (first_block + int(gaps[0])) * self._block_size + int(counts[gaps[0]])
        return num_full * self._block_size + (min(offset, int(counts[num_full - first_block])) if offset else 0)

    def _spans(self, table: Sequence[int], start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yields each block of these positions, and the slots in it that are the first one and behind the last."""
        size = self._block_size
        for index in range(start // size, -(-end // size)):
            yield table[index], max(0, start - index * size), min(size, end - index * size)

    # -- as a part of blocks ------------------------------------------------------------------------------------------

    def read(self, block_ids: Sequence[int]) -> list[Tensor]:
        """Returns the counts of device blocks as bytes."""
        return [self._rows[block_id] for block_id in block_ids]

    def rows(self, *, in_cpu: bool) -> Tensor:
        """Returns the counts of all blocks as bytes, [blocks, bytes] uint8."""
        return self._cpu_rows if in_cpu else self._rows

    def fill(self, block_id: int, content: Tensor) -> None:
        """Sets the count of a CPU block from its bytes; one that no block can have counts for nothing."""
        self._cpu_rows[block_id].copy_(content)
        if self._cpu_counts[block_id] > self._block_size:
            self._cpu_counts[block_id] = 0

    def is_finite(self, content: Tensor) -> bool:
        """Tells whether a count is a finite number, which all are."""
        return True


def _bytes(counts: Counts) -> Tensor:
    """Returns the bytes of each count, [blocks, bytes] uint8, which stay those of the counts."""
    return torch.from_numpy(counts.view(np.uint8)).view(-1, _NUM_BYTES)


def _move(source: Counts, target: Counts, moves: Iterable[BlockMove]) -> None:
    pairs = [(move.source, move.target) for move in moves]
    if pairs:
        sources, targets = zip(*pairs, strict=True)
        target[list(targets)] = source[list(sources)]
