"""From work items to a step on the device: few numbers go there, and the rest is made of what it holds already."""

from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.triton.attention import TritonStep
from octavo.kernels.triton.inputs import prepare
from octavo.worker.gpu.rows import SequenceRows
from octavo.worker.gpu.transfer import upload
from octavo.worker.models.decoder import PagedStep
from octavo.worker.sequences import WorkItem
from octavo.worker.step.forward import Paging
from octavo.worker.step.kv_cache import LayerCache


def decodes_first(items: list[WorkItem]) -> list[WorkItem]:
    """`items` as attention wants them: those of one token before the others, each kind in its order."""
    return sorted(items, key=lambda item: item.num_tokens > 1)


class StepInputs:
    """Makes the inputs of steps over sequences whose `rows` are up to date.

    Those of decode steps lie in buffers that stay where they are, as captured graphs need them, for up to `max_batch`
    sequences; those of others in memory of their own.
    """

    def __init__(self, paging: Paging, caches: list[LayerCache], rows: SequenceRows, max_batch: int) -> None:
        self._paging = paging
        self._caches = caches
        self._rows = rows
        device = paging.device
        self._input_ids, self._positions = torch.zeros(2, max_batch, dtype=torch.int64, device=device)
        # What is computed before the first step must write nowhere.
        self._slots = torch.full((len(paging.groups), max_batch), -1, dtype=torch.int64, device=device)
        self._table_rows, self._context_lens = torch.zeros(2, max_batch, dtype=torch.int32, device=device)
        self._every = torch.arange(max_batch + 1, device=device)
        self._starts = self._every.int()

    @property
    def nbytes(self) -> int:
        """Of the buffers that stay where they are."""
        buffers = (self._input_ids, self._positions, self._slots, self._table_rows, self._context_lens)
        return sum(buffer.nbytes for buffer in (*buffers, self._every, self._starts))

    def decode_step(self, size: int) -> PagedStep:
        """The step over the first `size` places of the buffers, whatever they hold when it is computed: a token of as
        many sequences, all of whose hidden states are wanted."""
        return self._step(
            self._input_ids[:size],
            self._positions[:size],
            self._slots[:, :size],
            self._every[:size],
            table_rows=self._table_rows[:size],
            context_lens=self._context_lens[:size],
            query_starts=self._starts[: size + 1],
            num_decodes=size,
            max_query_len=0,
            max_context_len=self._paging.max_model_len,
        )

    def fill(self, items: list[WorkItem], size: int) -> None:
        """Puts `items` of one token each into the first places of the buffers, and padding into the rest of `size`."""
        tokens, positions, rows = upload(self._numbers(items), self._paging.device)
        prepare(
            tokens,
            positions,
            rows,
            self._rows.next_tokens,
            self._rows.tables,
            self._paging.block_size,
            input_ids=self._input_ids[:size],
            positions_out=self._positions[:size],
            slots=self._slots[:, :size],
            decode=(self._table_rows[:size], self._context_lens[:size]),
        )

    def step(self, items: list[WorkItem], wanted: list[int]) -> PagedStep:
        """The step over `items`, decodes first, for the hidden states of the rows `wanted`."""
        lengths = [item.num_tokens for item in items]
        num_tokens, num_items = sum(lengths), len(items)
        sections = [
            *self._numbers(items),
            np.array([self._rows.row_of(item.sequence) for item in items], dtype=np.int32),
            np.array([item.end for item in items], dtype=np.int32),
            np.array(list(accumulate(lengths, initial=0)), dtype=np.int32),
            np.array(wanted, dtype=np.int32),
        ]
        device = self._paging.device
        packed = upload(np.concatenate(sections), device)
        tokens, positions, rows, table_rows, context_lens, query_starts, wanted_rows = torch.split(
            packed, [len(section) for section in sections]
        )
        input_ids, positions_out = torch.empty(2, num_tokens, dtype=torch.int64, device=device)
        slots = torch.empty(len(self._paging.groups), num_tokens, dtype=torch.int64, device=device)
        prepare(
            tokens,
            positions,
            rows,
            self._rows.next_tokens,
            self._rows.tables,
            self._paging.block_size,
            input_ids=input_ids,
            positions_out=positions_out,
            slots=slots,
        )
        num_decodes = lengths.count(1)
        return self._step(
            input_ids,
            positions_out,
            slots,
            wanted_rows.long(),
            table_rows=table_rows,
            context_lens=context_lens,
            query_starts=query_starts,
            num_decodes=num_decodes,
            max_query_len=max(lengths) if num_decodes < num_items else 0,
            max_context_len=max(item.end for item in items),
        )

    def _numbers(self, items: list[WorkItem]) -> "np.ndarray[Any, np.dtype[np.int32]]":
        """[3, tokens]: known ids (`PENDING_TOKEN` where only the device knows them), positions, and rows."""
        tokens = [token for item in items for token in item.sequence.token_ids[item.start : item.end]]
        positions = [position for item in items for position in range(item.start, item.end)]
        rows = [row for item in items for row in [self._rows.row_of(item.sequence)] * item.num_tokens]
        return np.array([tokens, positions, rows], dtype=np.int32)

    def _step(self, input_ids: Tensor, positions: Tensor, slots: Tensor, wanted: Tensor, **lengths: Any) -> PagedStep:
        paging = self._paging
        groups = [
            TritonStep(
                slot_mapping=slots[index],
                block_tables=self._rows.tables[index],
                num_tokens=len(input_ids),
                window=group.window,
                **lengths,
            )
            for index, group in enumerate(paging.groups)
        ]
        return PagedStep(input_ids, positions, wanted, paging.attention, groups, self._caches)
