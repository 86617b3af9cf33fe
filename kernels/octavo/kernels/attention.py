"""Paged attention on any device torch knows: gather the blocks, then torch's fused attention on whole groups."""

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.attention_plan import AttentionPlan, DecodeGroup, PrefillTile
from octavo.kernels.checks import check_caches, check_new_keys, check_query


def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes each token's key and value into its slot, in place. Arguments as in `octavo.kernels.reference`."""
    check_caches(key_cache, value_cache)
    check_new_keys(key, value, key_cache, slot_mapping)
    for new, cache in ((key, key_cache), (value, value_cache)):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slot_mapping, new)


def paged_attention(query: Tensor, key_cache: Tensor, value_cache: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """Causal attention over paged keys and values, as `plan` cuts it up.

    `query`: [tokens, query_heads, head_dim]; caches: [num_blocks, block_size, kv_heads, head_dim]. Returns the
    shape and dtype of `query`. Raises `ValueError` on arguments that do not fit each other or the plan.
    """
    check_caches(key_cache, value_cache)
    check_query(query, key_cache, plan.num_tokens)
    if key_cache.shape[1] != plan.block_size:
        raise ValueError(f"a plan for blocks of {plan.block_size} slots and a cache of {key_cache.shape[1]}")
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for group in plan.decode_groups:
        output.index_copy_(0, group.rows, _decode(query, key_cache, value_cache, group, scale))
    for tile in plan.prefill_tiles:
        output[tile.first_row : tile.last_row] = _prefill(query, key_cache, value_cache, tile, scale)
    return output


def _decode(query: Tensor, key_cache: Tensor, value_cache: Tensor, group: DecodeGroup, scale: float) -> Tensor:
    """[batch, query_heads, head_dim]. The query heads of a KV head stand where torch expects query positions: one read
    of the keys serves them all."""
    kv_heads, head_dim = key_cache.shape[2:]
    batch = len(group.rows)
    packed = query.index_select(0, group.rows).view(batch, kv_heads, -1, head_dim)
    keys, values = (
        cache.index_select(0, group.block_ids).view(batch, -1, kv_heads, head_dim).transpose(1, 2)
        for cache in (key_cache, value_cache)
    )
    attended = F.scaled_dot_product_attention(packed, keys, values, attn_mask=group.mask, scale=scale)
    return attended.reshape(batch, -1, head_dim)


def _prefill(query: Tensor, key_cache: Tensor, value_cache: Tensor, tile: PrefillTile, scale: float) -> Tensor:
    """[queries, query_heads, head_dim]. KV heads stand where torch expects the batch, their query heads beside each
    other: keys are shared by a stride of zero and one mask serves all."""
    kv_heads, head_dim = key_cache.shape[2:]
    rows = query[tile.first_row : tile.last_row]
    grouped = rows.view(len(rows), kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    keys, values = (
        cache.index_select(0, tile.block_ids)
        .view(-1, kv_heads, head_dim)
        .transpose(0, 1)[:, None]
        .expand(-1, grouped.shape[1], -1, -1)
        for cache in (key_cache, value_cache)
    )
    attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=tile.mask, scale=scale)
    return attended.permute(2, 0, 1, 3).flatten(1, 2)
