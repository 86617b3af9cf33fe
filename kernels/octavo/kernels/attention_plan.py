"""Cuts the attention of a batch into calls, once per step; every layer uses the same cut."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.checks import check_block_ids, check_lengths, check_window

# Gathered keys and values of one call should stay in the cache of a few cores.
_GATHER_BYTES = 8 << 20
# Queries of one prefill call: few enough that most keys after a query are not computed to be masked.
_TILE_QUERIES = 256


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Lists sequences with one query token each, which see about equally many blocks.

    `rows`: [batch], their rows in the query; `block_ids`: [batch * blocks], the blocks each sequence sees, fewer ones
    padded with the first of their own; `mask`: [batch, 1, 1, blocks * block_size], added to the scores.
    """

    rows: Tensor
    block_ids: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """Names consecutive query tokens of one sequence: rows `first_row` to `last_row` (exclusive) of the query.

    `block_ids`: [blocks], those that any of the queries sees; `mask`: [queries, blocks * block_size], added to the
    scores.
    """

    first_row: int
    last_row: int
    block_ids: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Lists all calls of one step's attention over `num_tokens` query rows, for a cache of `block_size` slots per
    block."""

    num_tokens: int
    block_size: int
    decode_groups: list[DecodeGroup]
    prefill_tiles: list[PrefillTile]


@dataclass(frozen=True, slots=True)
class _Query:
    """Describes the query rows of the sequence in row `sequence` of the tables: `length` tokens from row `row` of the
    query on, the last of them at position `context` - 1. None of these tokens sees a block before `first_block`."""

    sequence: int
    row: int
    length: int
    context: int
    first_block: int


@dataclass(frozen=True, slots=True)
class _Planner:
    """Holds the arguments that all calls have in common."""

    block_tables: Tensor
    block_size: int
    window: int
    dtype: torch.dtype
    device: torch.device

    def queries(self, context_lens: Sequence[int], query_lens: Sequence[int]) -> Iterator[_Query]:
        row = 0
        for sequence, (context, length) in enumerate(zip(context_lens, query_lens, strict=True)):
            yield _Query(sequence, row, length, context, self.first_block(context - length))
            row += length

    def first_block(self, position: int) -> int:
        """Returns the first block that a query at `position` sees."""
        return max(0, position + 1 - self.window) // self.block_size if self.window else 0

    def span(self, query: _Query) -> int:
        """Returns the number of tokens in the blocks that `query` sees."""
        return query.context - query.first_block * self.block_size

    def num_blocks(self, query: _Query) -> int:
        return -(-self.span(query) // self.block_size)

    def packed(self, decodes: list[_Query], capacity: int) -> Iterator[list[_Query]]:
        """Runs of `decodes`, longest first, whose padded slots stay within `capacity`."""
        decodes = sorted(decodes, key=self.span, reverse=True)
        start = 0
        while start < len(decodes):
            size = max(1, capacity // (self.num_blocks(decodes[start]) * self.block_size))
            yield decodes[start : start + size]
            start += size

    def decode_group(self, members: list[_Query]) -> DecodeGroup:
        blocks = self.num_blocks(members[0])
        numbers = [(member.sequence, member.first_block, member.context) for member in members]
        sequences, firsts, contexts = torch.tensor(numbers)[..., None].unbind(1)
        logical = firsts + torch.arange(blocks)
        # A neighbour's block in the padding would let its infinities into this row: 0 * inf is not 0.
        own = torch.where(logical * self.block_size < contexts, logical, firsts)
        keys = firsts * self.block_size + torch.arange(blocks * self.block_size)
        return DecodeGroup(
            rows=torch.tensor([member.row for member in members]).to(self.device),
            block_ids=self._readable(self.block_tables[sequences, own].reshape(-1)),
            mask=self._mask(keys, contexts - 1)[:, None, None],
        )

    def tiles(self, query: _Query) -> Iterator[PrefillTile]:
        history = query.context - query.length
        for first in range(0, query.length, _TILE_QUERIES):
            last = min(first + _TILE_QUERIES, query.length)
            begin, end = self.first_block(history + first), -(-(history + last) // self.block_size)
            keys = torch.arange(begin * self.block_size, end * self.block_size)
            positions = torch.arange(history + first, history + last)
            yield PrefillTile(
                first_row=query.row + first,
                last_row=query.row + last,
                block_ids=self._readable(self.block_tables[query.sequence, begin:end]),
                mask=self._mask(keys, positions[:, None]),
            )

    def _readable(self, block_ids: Tensor) -> Tensor:
        check_block_ids(int(block_ids.min()))
        return block_ids.to(self.device)

    def _mask(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Returns the mask that is added to the scores of `keys` and queries at `positions`, two tensors that
        broadcast: 0 or -inf."""
        hidden = keys > positions
        if self.window:
            hidden |= keys <= positions - self.window
        return torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(hidden, float("-inf")).to(self.device)


def plan_attention(
    block_tables: Tensor,
    context_lens: Sequence[int],
    query_lens: Sequence[int],
    *,
    block_size: int,
    bytes_per_token: int,
    dtype: torch.dtype,
    device: torch.device,
    window: int = 0,
) -> AttentionPlan:
    """Groups decode sequences by length and cuts prefill chunks into tiles.

    `block_tables`: [sequences, blocks] int64 on the CPU, rows padded with anything. `context_lens` count the tokens of
    this step too. `bytes_per_token` is the size of one token's key and value in one layer, and `dtype` the query's.
    `window` is that of `octavo.kernels.reference.paged_attention`; blocks that no query sees are not read. Raises
    `ValueError` on lengths that do not fit the tables, and on a table without a block that is to be read.
    """
    check_lengths(block_tables, context_lens, query_lens, block_size)
    check_window(window)
    planner = _Planner(block_tables, block_size, window, dtype, device)
    queries = list(planner.queries(context_lens, query_lens))
    decodes = [query for query in queries if query.length == 1]
    capacity = max(1, _GATHER_BYTES // bytes_per_token)
    return AttentionPlan(
        num_tokens=sum(query_lens),
        block_size=block_size,
        decode_groups=[planner.decode_group(members) for members in planner.packed(decodes, capacity)],
        prefill_tiles=[tile for query in queries if query.length > 1 for tile in planner.tiles(query)],
    )
