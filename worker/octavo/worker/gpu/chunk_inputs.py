"""The inputs of captured steps in which chunks of prompts stand beside decodes."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from octavo.kernels.triton.attention import TritonStep
from octavo.kernels.triton.inputs import prepare
from octavo.worker.gpu.inputs import SequenceRows, token_numbers
from octavo.worker.gpu.transfer import upload
from octavo.worker.models.decoder import LayerCache, PagedStep
from octavo.worker.sequences import WorkItem
from octavo.worker.step.forward import Paging

# Sequences of several tokens that a captured step has room for.
MOST_CHUNKS = 16


class ChunkInputs:
    """Makes the inputs of steps of up to `max_tokens` tokens, of up to `max_batch` decodes and `MOST_CHUNKS` chunks, in
    buffers that stay where they are. The `rows` of the sequences must be up to date.

    The tokens of decodes come first, those of chunks right behind them, and padding last. Places of sequences that
    there are not have no context and no token; a decode there clears a row that a chunk then writes, or padding has.
    """

    def __init__(
        self, paging: Paging, caches: list[LayerCache], rows: SequenceRows, max_batch: int, max_tokens: int
    ) -> None:
        self._paging = paging
        self._caches = caches
        self._rows = rows
        self._max_batch = max_batch
        device = paging.device
        self._input_ids, self._positions = torch.zeros(2, max_tokens, dtype=torch.int64, device=device)
        # A capture before the first step must write nowhere.
        self._slots = torch.full((len(paging.groups), max_tokens), -1, dtype=torch.int64, device=device)
        # Rows, contexts, first tokens and wanted tokens of all sequences, as the size of a step divides it.
        self._numbers = torch.zeros(4 * (max_batch + MOST_CHUNKS) + 1, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the buffers."""
        return sum(each.nbytes for each in (self._input_ids, self._positions, self._slots, self._numbers))

    def fits(self, items: list[WorkItem]) -> bool:
        """Tells whether there are places for the sequences of `items`."""
        num_decodes = _num_decodes(items)
        return num_decodes <= self._max_batch and len(items) - num_decodes <= MOST_CHUNKS

    def step(self, size: int) -> PagedStep:
        """Returns the step over the first `size` places of the buffers, whatever these hold when it is computed: with
        the hidden states of as many tokens as there are places for sequences."""
        decodes = self._most_decodes(size)
        sequences = decodes + MOST_CHUNKS
        sections = [sequences, sequences, sequences + 1, sequences]
        table_rows, context_lens, query_starts, wanted = torch.split(self._numbers[: sum(sections)], sections)
        paging = self._paging
        groups = [
            TritonStep(
                slot_mapping=self._slots[index, :size],
                block_tables=self._rows.tables[index],
                table_rows=table_rows,
                context_lens=context_lens,
                query_starts=query_starts,
                num_decodes=decodes,
                max_query_len=size,
                num_tokens=size,
                max_context_len=paging.max_model_len,
                window=group.window,
                most_chunk_tokens=size,
            )
            for index, group in enumerate(paging.groups)
        ]
        return PagedStep(self._input_ids[:size], self._positions[:size], wanted, paging.attention, groups, self._caches)

    def fill(self, items: list[WorkItem], wanted: list[int], size: int) -> None:
        """Puts `items`, decodes first, into the buffers, and padding behind them. `wanted` are tokens, at most one of
        each item."""
        num_decodes, decodes = _num_decodes(items), self._most_decodes(size)
        rows = [self._rows.row_of(item.sequence) for item in items]
        ends = [item.end for item in items]
        *starts, total = accumulate((item.num_tokens for item in items), initial=0)
        places = decodes + MOST_CHUNKS
        numbers = np.concatenate(
            (
                self._placed(rows, num_decodes, decodes, 0, 0),
                self._placed(ends, num_decodes, decodes, 0, 0),
                self._placed(starts, num_decodes, decodes, num_decodes, total),
                _int32([total, *wanted]),
                np.zeros(places - len(wanted), dtype=np.int32),
            )
        )
        tokens = token_numbers(items, self._rows)
        packed = upload(np.concatenate((numbers, tokens.reshape(-1))), self._paging.device)
        self._numbers[: len(numbers)].copy_(packed[: len(numbers)])
        token_ids, positions, token_rows = packed[len(numbers) :].view(3, -1)
        prepare(
            token_ids,
            positions,
            token_rows,
            self._rows.next_tokens,
            self._rows.tables,
            self._paging.block_size,
            input_ids=self._input_ids[:size],
            positions_out=self._positions[:size],
            slots=self._slots[:, :size],
        )

    def _most_decodes(self, size: int) -> int:
        return min(self._max_batch, size)

    def _placed(
        self, values: Sequence[int], num_decodes: int, decodes: int, no_decode: int, no_chunk: int
    ) -> "np.ndarray[Any, np.dtype[np.int32]]":
        """Returns the values of all places for sequences: `decodes` and then `MOST_CHUNKS`."""
        chunks = values[num_decodes:]
        return _int32(
            [
                *values[:num_decodes],
                *[no_decode] * (decodes - num_decodes),
                *chunks,
                *[no_chunk] * (MOST_CHUNKS - len(chunks)),
            ]
        )


def _num_decodes(items: list[WorkItem]) -> int:
    return sum(item.num_tokens == 1 for item in items)


def _int32(values: list[int]) -> "np.ndarray[Any, np.dtype[np.int32]]":
    return np.array(values, dtype=np.int32)
