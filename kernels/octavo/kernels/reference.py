"""Computes paged attention from its mathematics, one token at a time, in fp32: the oracle of all other implementations.

Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (2023), §4.1 and §5.1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.checks import (
    check_block_ids,
    check_caches,
    check_lengths,
    check_moves,
    check_new_keys,
    check_query,
    check_scores,
    check_slopes,
    check_window,
    heads_of,
)


def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes each token's key and value into its slot, in place.

    `key`, `value`: [tokens, kv_heads, head_dim]; caches: [num_blocks, block_size, kv_heads, head_dim];
    `slot_mapping`: [tokens] int64, slot = block id * block size + offset in the block. Raises `ValueError` on other
    shapes or dtypes.
    """
    check_caches(key_cache, value_cache)
    check_new_keys(key, value, heads_of(key_cache), key_cache.dtype, slot_mapping)
    block_size = key_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        block, offset = divmod(slot, block_size)
        key_cache[block, offset] = key[token]
        value_cache[block, offset] = value[token]


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Sequence[int],
    query_lens: Sequence[int],
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Computes causal attention of each sequence's last `query_lens` tokens over its first `context_lens` cached
    tokens.

    `query`: [sum(query_lens), query_heads, head_dim], sequence after sequence; `block_tables`: [sequences, blocks],
    logical to physical, rows padded with anything. Query head h reads KV head h // (query_heads / kv_heads). With a
    `window` (0: none) the token at position p sees positions p - window + 1 to p, and blocks wholly before that may be
    negative in the table. A `softcap` c (0: none) makes c * tanh(s / c) of a score s (Gemma 2). `sinks` ([query_heads])
    are scores of one more key per head, whose value is zero (GPT-OSS). `alibi_slopes` ([query_heads] fp32) add slope *
    (key position - query position) to a score (Press et al., "Train Short, Test Long", 2021). Returns a tensor of
    `query`'s shape and dtype. Raises `ValueError` on arguments that do not fit each other.
    """
    check_caches(key_cache, value_cache)
    check_query(query, heads_of(key_cache), key_cache.dtype, sum(query_lens))
    check_lengths(block_tables, context_lens, query_lens, key_cache.shape[1])
    check_window(window)
    check_scores(query, softcap, sinks)
    check_slopes(query, alibi_slopes)
    output = torch.empty_like(query)
    row = 0
    for table, context, length in zip(block_tables.tolist(), context_lens, query_lens, strict=True):
        for position in range(context - length, context):
            visible = range(max(0, position + 1 - window) if window else 0, position + 1)
            scores = _Scores(scale, softcap, sinks, alibi_slopes)
            output[row] = _attend(query[row].float(), key_cache, value_cache, table, visible, scores)
            row += 1
    return output


@dataclass(frozen=True)
class _Scores:
    """Turns products of queries and keys into scores."""

    scale: float
    softcap: float
    sinks: Tensor | None
    alibi_slopes: Tensor | None

    def __call__(self, products: Tensor, distances: Tensor) -> Tensor:
        """Returns the scores of `products` ([query_heads, keys]); `distances`: [keys], key position - query
        position."""
        scores = products * self.scale
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        return scores if self.alibi_slopes is None else scores + self.alibi_slopes[:, None] * distances


def _attend(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, table: list[int], visible: range, score: _Scores
) -> Tensor:
    """Computes the attention of one token, [query_heads, head_dim], block by block: o = sum_j exp(q K_j) V_j / sum_j
    exp(q K_j).

    The sum runs over the `visible` positions; keys after the token take no part. (Eq. 4 as it is often printed has the
    ones vector inside exp; the sum over a block's keys belongs outside.)
    """
    block_size = key_cache.shape[1]
    group = query.shape[0] // key_cache.shape[2]
    largest = torch.full((query.shape[0], 1), float("-inf"), device=query.device)
    total = torch.zeros_like(largest)
    if score.sinks is not None:
        largest, total = score.sinks.float()[:, None], torch.ones_like(largest)
    output = torch.zeros_like(query)
    for logical in range(visible.start // block_size, (visible.stop - 1) // block_size + 1):
        check_block_ids(table[logical])
        begin = logical * block_size
        slots = slice(max(visible.start - begin, 0), min(visible.stop - begin, block_size))
        keys, values = (
            cache[table[logical], slots].float().repeat_interleave(group, dim=1) for cache in (key_cache, value_cache)
        )
        distances = torch.arange(begin + slots.start, begin + slots.stop, device=query.device) - (visible.stop - 1)
        scores = score(torch.einsum("hd,shd->hs", query, keys), distances)
        # Softmax is invariant to a shift: the running maximum keeps exp in range.
        shift = torch.maximum(largest, scores.amax(dim=1, keepdim=True))
        weights = torch.exp(scores - shift)
        rescale = torch.exp(largest - shift)
        total = total * rescale + weights.sum(dim=1, keepdim=True)
        output = output * rescale + torch.einsum("hs,shd->hd", weights, values)
        largest = shift
    return output / total


def move_blocks(source: Tensor, target: Tensor, moves: Sequence[tuple[int, int]]) -> None:
    """Copies whole blocks from `source` to `target` (which may be one cache), in place, as if all were read first.

    Caches: [num_blocks, layers, 2, ...], alike but for `num_blocks` and the device, and of six dimensions; `moves`:
    pairs of a block id in `source` and one in `target`. Raises `ValueError` on caches that differ, on ids out of range,
    and on a target that is named twice.
    """
    check_moves(source, target, moves)
    before = source.clone()
    for read, written in moves:
        target[written] = before[read]
