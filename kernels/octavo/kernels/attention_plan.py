"""How a batch's attention is cut into calls: once per step, used by every layer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.checks import check_lengths

# Gathered keys and values of one call should stay in the cache of a few cores.
_GATHER_BYTES = 8 << 20
# Queries of one prefill call: few enough that most keys after a query are not computed to be masked.
_TILE_QUERIES = 256


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one query token each, of similar context length.

    `rows`: [batch], their rows in the query; `block_ids`: [batch * blocks], each sequence's blocks, short ones padded
    with their own first block; `mask`: [batch, 1, 1, blocks * block_size], added to the scores.
    """

    rows: Tensor
    block_ids: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """Consecutive query tokens of one sequence: rows `first_row` to `last_row` (exclusive) of the query.

    `block_ids`: [blocks], those up to the last of them; `mask`: [queries, blocks * block_size], added to the scores.
    """

    first_row: int
    last_row: int
    block_ids: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """All calls of one step's attention over `num_tokens` query rows, for a cache of `block_size` slots per block."""

    num_tokens: int
    block_size: int
    decode_groups: list[DecodeGroup]
    prefill_tiles: list[PrefillTile]


@dataclass(frozen=True, slots=True)
class _Query:
    row: int
    length: int
    context: int
    table: Tensor


def plan_attention(
    block_tables: Tensor,
    context_lens: Sequence[int],
    query_lens: Sequence[int],
    *,
    block_size: int,
    bytes_per_token: int,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionPlan:
    """Groups decode sequences by length and cuts prefill chunks into tiles.

    `block_tables`: [sequences, blocks] int64 on the CPU, rows padded with anything; `context_lens` count the tokens of
    this step too. `bytes_per_token` is what one layer's key and value of one token take; `dtype` that of the query.
    Raises `ValueError` on lengths that do not fit the tables.
    """
    check_lengths(block_tables, context_lens, query_lens, block_size)
    queries = list(_queries(block_tables, context_lens, query_lens))
    decodes = sorted((query for query in queries if query.length == 1), key=lambda query: -query.context)
    capacity = max(1, _GATHER_BYTES // bytes_per_token)
    return AttentionPlan(
        num_tokens=sum(query_lens),
        block_size=block_size,
        decode_groups=[
            _decode_group(members, block_size, dtype, device) for members in _packed(decodes, block_size, capacity)
        ],
        prefill_tiles=[
            tile for query in queries if query.length > 1 for tile in _tiles(query, block_size, dtype, device)
        ],
    )


def _queries(block_tables: Tensor, context_lens: Sequence[int], query_lens: Sequence[int]) -> Iterator[_Query]:
    row = 0
    for table, context, length in zip(block_tables, context_lens, query_lens, strict=True):
        yield _Query(row, length, context, table)
        row += length


def _packed(decodes: list[_Query], block_size: int, capacity: int) -> Iterator[list[_Query]]:
    """Runs of `decodes` (longest first) whose padded slots stay within `capacity`."""
    start = 0
    while start < len(decodes):
        slots = _num_blocks(decodes[start].context, block_size) * block_size
        size = max(1, capacity // slots)
        yield decodes[start : start + size]
        start += size


def _decode_group(members: list[_Query], block_size: int, dtype: torch.dtype, device: torch.device) -> DecodeGroup:
    blocks = _num_blocks(members[0].context, block_size)
    contexts = torch.tensor([member.context for member in members])
    tables = torch.stack([member.table[:blocks] for member in members])
    # A neighbour's block in the padding would let its infinities into this row: 0 * inf is not 0.
    unused = torch.arange(blocks) * block_size >= contexts[:, None]
    tables = torch.where(unused, tables[:, :1], tables)
    hidden = torch.arange(blocks * block_size) >= contexts[:, None]
    return DecodeGroup(
        rows=torch.tensor([member.row for member in members]).to(device),
        block_ids=tables.reshape(-1).to(device),
        mask=_additive(hidden, dtype)[:, None, None].to(device),
    )


def _tiles(query: _Query, block_size: int, dtype: torch.dtype, device: torch.device) -> Iterator[PrefillTile]:
    history = query.context - query.length
    for first in range(0, query.length, _TILE_QUERIES):
        last = min(first + _TILE_QUERIES, query.length)
        blocks = _num_blocks(history + last, block_size)
        positions = torch.arange(history + first, history + last)
        hidden = torch.arange(blocks * block_size) > positions[:, None]
        yield PrefillTile(
            first_row=query.row + first,
            last_row=query.row + last,
            block_ids=query.table[:blocks].to(device),
            mask=_additive(hidden, dtype).to(device),
        )


def _additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))


def _num_blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)
