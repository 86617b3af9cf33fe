"""A step's work as the kernels of attention see it, on the device but for what decides how they are launched."""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.backend import GroupBatch
from octavo.kernels.checks import check_block_ids, check_lengths, check_window


@dataclass(frozen=True, slots=True)
class TritonStep:
    """What the layers of one KV group need in one step.

    `slot_mapping`: [tokens] int64, slot = block id * block size + offset, -1: nothing is written; `block_tables`:
    [rows, width] int32, entries that no query looks at may be anything; `table_rows`: [sequences] int32, the row of
    each; `context_lens`: [sequences] int32, tokens in the cache once this step has written its own, 0: padding, whose
    output is zeros; `query_starts`: [sequences + 1] int32, where each one's rows of the query begin.

    Of the host: the first `num_decodes` sequences have one query token each; `max_query_len` is at least the longest
    query of the others, 0 if there is none, `max_context_len` at least the longest context; `window` 0: none.
    """

    slot_mapping: Tensor
    block_tables: Tensor
    table_rows: Tensor
    context_lens: Tensor
    query_starts: Tensor
    num_decodes: int
    max_query_len: int
    num_tokens: int
    max_context_len: int
    window: int

    @property
    def num_sequences(self) -> int:
        return len(self.table_rows)

    @classmethod
    def of(cls, batch: GroupBatch, block_size: int, device: torch.device) -> "TritonStep":
        """Raises `ValueError` on lengths that do not fit the tables, and if a block that is to be read is missing."""
        check_lengths(batch.block_tables, batch.context_lens, batch.query_lens, block_size)
        check_window(batch.window)
        lengths = torch.tensor((batch.context_lens, batch.query_lens), dtype=torch.int32).view(2, -1)
        check_block_ids(_lowest_block(batch, lengths, block_size))
        num_decodes = _leading_ones(lengths[1])
        return cls(
            slot_mapping=batch.slot_mapping.to(device),
            block_tables=batch.block_tables.to(torch.int32).to(device),
            table_rows=torch.arange(lengths.shape[1], dtype=torch.int32, device=device),
            context_lens=lengths[0].to(device),
            query_starts=torch.nn.functional.pad(lengths[1].cumsum(0, dtype=torch.int32), (1, 0)).to(device),
            num_decodes=num_decodes,
            max_query_len=max(batch.query_lens[num_decodes:], default=0),
            num_tokens=sum(batch.query_lens),
            max_context_len=max(batch.context_lens, default=0),
            window=batch.window,
        )


def _lowest_block(batch: GroupBatch, lengths: Tensor, block_size: int) -> int:
    """The least block id that a query looks at."""
    contexts, queries = lengths[..., None]
    first = (contexts - queries + 1 - batch.window).clamp(min=0) if batch.window else torch.zeros_like(contexts)
    ends = torch.arange(1, batch.block_tables.shape[1] + 1) * block_size
    seen = (ends > first) & (ends - block_size < contexts)
    return int(batch.block_tables[seen].min()) if seen.any() else 0


def _leading_ones(query_lens: Tensor) -> int:
    return int((query_lens == 1).cumprod(0).sum())
