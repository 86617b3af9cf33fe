"""The inputs of a GPU's steps, and the rows that sequences have in tables which stay on the device."""

import logging
from collections.abc import Container, Iterable
from itertools import accumulate, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.triton.attention import TritonStep
from octavo.kernels.triton.inputs import prepare
from octavo.kernels.triton.launch import PromptLengths
from octavo.worker.gpu.transfer import upload
from octavo.worker.models.decoder import LayerCache, PagedStep
from octavo.worker.sequences import WorkerSequence, WorkItem
from octavo.worker.step.forward import Paging

logger = logging.getLogger(__name__)


class SequenceRows:
    """Gives each sequence a row of the tables on the device, from its first step until it is forgotten or others need
    the row more: one that rests has no token that only the device knows, and is told anew when it goes on.

    `tables`: [groups, capacity, width] int32, of which only entries that a step reads need be right; `next_tokens`:
    [capacity] int64. Where steps under way need more rows than there are, both are replaced by larger ones:
    `generation` counts how often, and captured graphs, which read the old ones, are lost. The last row belongs to no
    sequence: writes to be dropped go there.
    """

    def __init__(self, num_groups: int, width: int, device: torch.device, capacity: int) -> None:
        self._device = device
        self._rows: dict[int, int] = {}
        self._owners: dict[int, WorkerSequence] = {}
        self._free = list(range(capacity - 1))
        self.tables = torch.zeros(num_groups, capacity, width, dtype=torch.int32, device=device)
        self.next_tokens = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.generation = 0

    @property
    def nbytes(self) -> int:
        return self.tables.nbytes + self.next_tokens.nbytes

    @property
    def discard_row(self) -> int:
        return self.tables.shape[1] - 1

    def row_of(self, sequence: WorkerSequence) -> int:
        """Returns the row of `sequence`, and assigns one to a sequence that has none."""
        row = self._rows.get(sequence.sequence_id)
        if row is None:
            self.assign([sequence])
            row = self._rows[sequence.sequence_id]
        return row

    def assign(self, sequences: Iterable[WorkerSequence]) -> None:
        """Assigns rows to all of `sequences`, the members of a step, that have none."""
        members = {each.sequence_id: each for each in sequences}
        missing = [each for each in members.values() if each.sequence_id not in self._rows]
        if len(missing) > len(self._free):
            self._take_from_resting(len(missing) - len(self._free), members)
        while len(missing) > len(self._free):
            self._grow()
        for sequence in missing:
            self._rows[sequence.sequence_id] = self._free.pop()
            self._owners[sequence.sequence_id] = sequence
            sequence.num_sent = [0] * len(self.tables)

    def _take_from_resting(self, count: int, members: Container[int]) -> None:
        """Frees up to `count` rows of sequences that are not among `members` and whose tokens are all known: those
        that have had theirs for longest."""
        resting = (
            sequence_id
            for sequence_id, owner in self._owners.items()
            if sequence_id not in members and not owner.has_pending_token
        )
        self.forget(list(islice(resting, count)))

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Frees the rows of these sequences; steps under way still use a row before another sequence can."""
        for sequence_id in sequence_ids:
            row = self._rows.pop(sequence_id, None)
            if row is not None:
                self._free.append(row)
                del self._owners[sequence_id]

    def send_tables(self, sequences: Iterable[WorkerSequence]) -> None:
        """Writes to `tables` the entries of `sequences` that the device has not been sent. All of them must have
        rows."""
        places: list[int] = []
        block_ids: list[int] = []
        _, capacity, width = self.tables.shape
        for sequence in sequences:
            row = self._rows[sequence.sequence_id]
            for group, table in enumerate(sequence.block_tables):
                sent, known = sequence.num_sent[group], len(table)
                if sent < known:
                    first = (group * capacity + row) * width
                    places += range(first + sent, first + known)
                    block_ids += table[sent:]
                    sequence.num_sent[group] = known
        if places:
            packed = upload(np.array([places, block_ids], dtype=np.int64), self._device)
            self.tables.view(-1).index_copy_(0, packed[0], packed[1].int())

    def _grow(self) -> None:
        capacity = self.tables.shape[1]
        logger.warning(
            "more than %d sequences in two steps: tables grow and graphs are captured anew while requests wait; give"
            " the worker the scheduler's --max-num-seqs",
            capacity - 1,
        )
        self._free += range(capacity - 1, 2 * capacity - 1)
        self.tables = torch.cat((self.tables, torch.zeros_like(self.tables)), dim=1)
        self.next_tokens = torch.cat((self.next_tokens, torch.zeros_like(self.next_tokens)))
        self.generation += 1


def decodes_first(items: list[WorkItem]) -> list[WorkItem]:
    """Returns `items` in the order that attention needs: items of one token before the others, each kind in its
    order."""
    return sorted(items, key=lambda item: item.num_tokens > 1)


def token_numbers(items: list[WorkItem], rows: SequenceRows) -> "np.ndarray[Any, np.dtype[np.int32]]":
    """Returns [3, tokens]: known ids (`PENDING_TOKEN` where only the device knows them), positions, and rows."""
    tokens = [token for item in items for token in item.token_ids]
    positions = [position for item in items for position in range(item.start, item.end)]
    places = [row for item in items for row in [rows.row_of(item.sequence)] * item.num_tokens]
    return np.array([tokens, positions, places], dtype=np.int32)


class StepInputs:
    """Makes the inputs of steps over sequences whose `rows` are up to date.

    The inputs of decode steps lie in buffers that stay where they are, as captured graphs need them, for up to
    `max_batch` sequences; those of other steps in memory of their own.
    """

    def __init__(self, paging: Paging, caches: list[LayerCache], rows: SequenceRows, max_batch: int) -> None:
        self._paging = paging
        self._caches = caches
        self._rows = rows
        device = paging.device
        self._input_ids, self._positions = torch.zeros(2, max_batch, dtype=torch.int64, device=device)
        # A capture before the first step must write nowhere.
        self._slots = torch.full((len(paging.groups), max_batch), -1, dtype=torch.int64, device=device)
        self._table_rows, self._context_lens = torch.zeros(2, max_batch, dtype=torch.int32, device=device)
        self._every = torch.arange(max_batch + 1, device=device)
        self._starts = self._every.int()

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the buffers that stay where they are."""
        buffers = (self._input_ids, self._positions, self._slots, self._table_rows, self._context_lens)
        return sum(buffer.nbytes for buffer in (*buffers, self._every, self._starts))

    def decode_step(self, size: int) -> PagedStep:
        """Returns the step over the first `size` places of the buffers, whatever these hold when it is computed.

        It computes one token of each of `size` sequences, or rows of fewer ones; the hidden states of all are wanted.
        """
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
        """Puts `items`, each token as if it were that of a sequence of its own, into the first places of the buffers,
        and padding into the rest of `size`."""
        tokens, positions, rows = upload(token_numbers(items, self._rows), self._paging.device)
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
        """Returns the step over `items`, decodes first, for the hidden states of the rows `wanted`."""
        lengths = [item.num_tokens for item in items]
        num_tokens, num_items = sum(lengths), len(items)
        sections = [
            *token_numbers(items, self._rows),
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
            prompts=PromptLengths(lengths[num_decodes:], [item.end for item in items[num_decodes:]]),
        )

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
