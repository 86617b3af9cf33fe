"""The batch of a step, made from work items: all tokens lie in one row, sequence after sequence; only block tables are
padded."""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.worker.sequences import Chooser, WorkerSequence, WorkItem

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Names the prompt tokens of one sequence, `length` from position `start` on, whose logprobs are wanted."""

    sequence: WorkerSequence
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class LogitRows:
    """Names the rows of a step whose last hidden states are needed, and their uses.

    `rows` holds first the `num_choosing` rows that tokens are chosen from, those of a sequence with a draft one after
    the other, then the last row of each of the `watched` sequences, which choose nothing yet, then the rows before the
    tokens of each of the `prompt_spans`. `chooser_rows` holds, for each of the `choosers`, the index of its row among
    the first `num_choosing`.
    """

    rows: list[int]
    num_choosing: int
    choosers: list[Chooser]
    chooser_rows: list[int]
    watched: list[WorkerSequence]
    prompt_spans: list[PromptSpan]

    @property
    def first_of_prompts(self) -> int:
        """Returns the index in `rows` at which the rows of the prompt spans begin."""
        return self.num_choosing + len(self.watched)


@dataclass(frozen=True, slots=True)
class Batch:
    """Holds the tensors of one step.

    On the device, int64: `input_ids` and `positions` ([tokens]) and `fresh_blocks` (blocks whose first slot this step
    writes). On the CPU: `slot_mappings` (for each KV group [tokens] int64; slot = block id * block size + offset), and
    by sequence `block_tables` (for each KV group [sequences, blocks] int64, rows padded with zeros), `context_lens`
    (tokens in the cache once this step has written its own) and `query_lens` (tokens of this step).
    """

    input_ids: Tensor
    positions: Tensor
    slot_mappings: list[Tensor]
    fresh_blocks: Tensor
    logit_rows: LogitRows
    block_tables: list[Tensor]
    context_lens: list[int]
    query_lens: list[int]


def build_batch(items: list[WorkItem], num_groups: int, block_size: int, device: torch.device) -> Batch:
    """Builds the batch of `items`, at least one, in their order.

    Every position of an item must have its block in each of the sequence's `num_groups` tables.
    """
    query_lens = [item.num_tokens for item in items]
    context_lens = [item.end for item in items]
    positions = [position for item in items for position in _positions(item)]
    slot_mappings = [_slots(items, group, block_size) for group in range(num_groups)]
    fresh = [
        slot // block_size
        for slots in slot_mappings
        for slot, position in zip(slots, positions, strict=True)
        if position % block_size == 0
    ]
    width = -(-max(context_lens) // block_size)
    return Batch(
        input_ids=_integers([token_id for item in items for token_id in item.token_ids], device),
        positions=_integers(positions, device),
        slot_mappings=[torch.tensor(slots) for slots in slot_mappings],
        fresh_blocks=_integers(fresh, device),
        logit_rows=logit_rows(items),
        block_tables=[torch.from_numpy(_block_tables(items, group, width)) for group in range(num_groups)],
        context_lens=context_lens,
        query_lens=query_lens,
    )


def _positions(item: WorkItem) -> range:
    return range(item.start, item.end)


def _slots(items: list[WorkItem], group: int, block_size: int) -> list[int]:
    """Returns the slots of all tokens in the KV group `group`.

    It uses lists, not arrays: a decode step has few tokens, and each array operation costs more than they do.
    """
    return [
        block_ids[position // block_size] * block_size + position % block_size
        for item in items
        for block_ids in (item.sequence.block_tables[group],)
        for position in _positions(item)
    ]


def _block_tables(items: list[WorkItem], group: int, width: int) -> Integers:
    tables = np.zeros((len(items), width), dtype=np.int64)
    for row, item in zip(tables, items, strict=True):
        block_ids = item.sequence.block_tables[group][:width]
        row[: len(block_ids)] = block_ids
    return tables


def logit_rows(items: list[WorkItem]) -> LogitRows:
    """Selects the rows of a step over the tokens of `items`: the last row of every item, those before it that a draft
    follows, and every row before a prompt token whose logprob is wanted.

    A sequence with broken keys or values shows that in its last row, so that every sequence is checked in every step.
    """
    first_rows = accumulate((item.num_tokens for item in items[:-1]), initial=0)
    placed = list(zip(items, first_rows, strict=True))
    rows: list[int] = []
    choosers: list[Chooser] = []
    chooser_rows: list[int] = []
    for item, first in placed:
        if item.choosers:
            for num_drafted in range(len(item.draft) + 1):
                choosers += [Chooser(sequence, item.draft, num_drafted) for sequence in item.choosers]
                chooser_rows += [len(rows)] * len(item.choosers)
                rows.append(first + item.num_known - 1 + num_drafted)
    num_choosing = len(rows)
    watched = [(item.sequence, first + item.num_tokens - 1) for item, first in placed if not item.choosers]
    spans = [(span, first) for item, first in placed if (span := _prompt_span(item))]
    rows += [row for _, row in watched]
    rows += [row for span, first in spans for row in range(first, first + span.length)]
    return LogitRows(
        rows, num_choosing, choosers, chooser_rows, [each for each, _ in watched], [span for span, _ in spans]
    )


def _prompt_span(item: WorkItem) -> PromptSpan | None:
    sequence = item.sequence
    length = min(item.num_known, sequence.prompt_length - 1 - item.start)
    if sequence.sampling.prompt_logprobs is None or length < 1:
        return None
    return PromptSpan(sequence, item.start + 1, length)


def _integers(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
