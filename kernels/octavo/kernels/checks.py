"""Checks the arguments of every kernel: a wrong shape or dtype would read or write a neighbour's memory."""

from collections.abc import Sequence

import torch
from torch import Tensor


def check_caches(key_cache: Tensor, value_cache: Tensor) -> None:
    """Raises `ValueError` unless both are [num_blocks, block_size, kv_heads, width], alike in strides too, and a
    head's elements lie side by side."""
    if key_cache.dim() != 4:
        raise ValueError(f"a cache is [num_blocks, block_size, kv_heads, head_dim], not {list(key_cache.shape)}")
    if not (key_cache.shape == value_cache.shape and key_cache.dtype == value_cache.dtype):
        raise ValueError(f"key cache {_describe(key_cache)} and value cache {_describe(value_cache)} differ")
    if not (key_cache.stride() == value_cache.stride() and key_cache.stride(3) == 1):
        raise ValueError(
            f"caches of strides {key_cache.stride()} and {value_cache.stride()}; they must be alike, and the last one 1"
        )


def heads_of(cache: Tensor) -> tuple[int, int]:
    """Returns (kv_heads, head_dim) of a cache that holds nothing but elements."""
    return cache.shape[2], cache.shape[3]


def check_new_keys(
    key: Tensor, value: Tensor, heads: tuple[int, int], dtype: torch.dtype, slot_mapping: Tensor
) -> None:
    """Raises `ValueError` unless `key` and `value` are [tokens, *heads] of `dtype`, one slot each; `heads` is
    (kv_heads, head_dim)."""
    expected = (len(slot_mapping), *heads)
    for name, tensor in (("key", key), ("value", value)):
        if not (tensor.shape == expected and tensor.dtype == dtype):
            raise ValueError(f"{name} is {_describe(tensor)}, expected {list(expected)} {dtype}")
    if not (slot_mapping.dim() == 1 and slot_mapping.dtype == torch.int64):
        raise ValueError(f"slot_mapping is {_describe(slot_mapping)}, expected [tokens] torch.int64")


def check_query(query: Tensor, heads: tuple[int, int], dtype: torch.dtype, num_tokens: int) -> None:
    """Raises `ValueError` unless `query` is [num_tokens, query_heads, head_dim] of `dtype` with whole groups per KV
    head; `heads` is (kv_heads, head_dim)."""
    if query.dim() != 3:
        raise ValueError(f"query is [tokens, query_heads, head_dim], not {list(query.shape)}")
    tokens, query_heads, head_dim = query.shape
    kv_heads, expected = heads
    if tokens != num_tokens:
        raise ValueError(f"query has {tokens} rows for sequences of {num_tokens} query tokens in all")
    if not (head_dim == expected and query.dtype == dtype):
        raise ValueError(f"query {_describe(query)} does not fit a cache for heads of {expected} and {dtype}")
    if query_heads % kv_heads != 0:
        raise ValueError(f"{query_heads} query heads do not share {kv_heads} KV heads evenly")


def check_lengths(
    block_tables: Tensor, context_lens: Sequence[int], query_lens: Sequence[int], block_size: int
) -> None:
    """Raises `ValueError` unless each sequence has 1 <= query <= context <= slots of its row of `block_tables`."""
    if not (block_tables.dim() == 2 and len(block_tables) == len(context_lens) == len(query_lens)):
        raise ValueError(
            f"block tables {list(block_tables.shape)} for {len(context_lens)} contexts and {len(query_lens)} queries"
        )
    slots = block_tables.shape[1] * block_size
    for context, query in zip(context_lens, query_lens, strict=True):
        if not (1 <= query <= context <= slots):
            raise ValueError(f"{query} query tokens, {context} context tokens, {slots} slots in the row")


def check_window(window: int) -> None:
    """Raises `ValueError` on a negative attention window."""
    if window < 0:
        raise ValueError(f"a window of {window} tokens; 0 means none")


def check_scores(query: Tensor, softcap: float, sinks: Tensor | None) -> None:
    """Raises `ValueError` on a negative soft cap, and on `sinks` that are not one per head of `query`."""
    if softcap < 0:
        raise ValueError(f"a soft cap of {softcap}; 0 means none")
    if not (sinks is None or sinks.shape == query.shape[1:2]):
        raise ValueError(f"sinks {list(sinks.shape) if sinks is not None else None} for a query {list(query.shape)}")


def check_slopes(query: Tensor, alibi_slopes: Tensor | None) -> None:
    """Raises `ValueError` unless `alibi_slopes` are one fp32 per head of `query`, or none."""
    if alibi_slopes is not None and not (
        alibi_slopes.shape == query.shape[1:2] and alibi_slopes.dtype == torch.float32
    ):
        raise ValueError(f"alibi slopes {_describe(alibi_slopes)} for a query {list(query.shape)}")


def check_block_ids(lowest: int) -> None:
    """Raises `ValueError` if `lowest`, the least block id that is to be read, stands for no block."""
    if lowest < 0:
        raise ValueError("a block table has no block where a query looks")


def check_moves(source: Tensor, target: Tensor, moves: Sequence[tuple[int, int]]) -> None:
    """Raises `ValueError` unless the caches are [num_blocks, layers, 2, ...], of 6 dimensions, alike but for
    `num_blocks`, and each of the `moves` leads from a block of `source` to one of `target` that no other leads to."""
    for cache in (source, target):
        if cache.dim() != 6:
            raise ValueError(f"a cache is [num_blocks, layers, 2, ...], 6 dimensions, not {list(cache.shape)}")
    if source.dtype != target.dtype or source.shape[1:] != target.shape[1:]:
        raise ValueError(f"blocks cannot move from {_describe(source)} to {_describe(target)}")
    for read, written in moves:
        if not (0 <= read < len(source) and 0 <= written < len(target)):
            raise ValueError(f"block {read} of {len(source)} cannot move to block {written} of {len(target)}")
    if len({written for _, written in moves}) != len(moves):
        raise ValueError("a block is the target of two moves")


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype}"
