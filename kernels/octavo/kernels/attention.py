"""Computes paged attention on any device that torch knows: it gathers the blocks and calls torch's fused attention on
whole groups."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.attention_plan import AttentionPlan, DecodeGroup, PrefillTile, plan_attention
from octavo.kernels.backend import CacheShape, GroupBatch
from octavo.kernels.checks import check_caches, check_new_keys, check_query, check_scores, heads_of


@dataclass(frozen=True, slots=True)
class TorchStep:
    """Holds the inputs that all layers of one KV group share in a step: `slot_mapping`, [tokens] int64 on the device,
    and the `plan` of the calls."""

    slot_mapping: Tensor
    plan: AttentionPlan


class TorchAttention:
    """Implements `octavo.kernels.backend.AttentionBackend` in plain torch for any device, dtype, block size and head
    size."""

    name = "torch"
    # A masked weight of zero times a NaN would be one.
    masks_unwritten = False

    def __init__(self, shape: CacheShape, device: torch.device) -> None:
        self._shape = shape
        self._device = device

    def step(self, batch: GroupBatch) -> TorchStep:
        shape = self._shape
        plan = plan_attention(
            batch.block_tables,
            batch.context_lens,
            batch.query_lens,
            block_size=shape.block_size,
            bytes_per_token=2 * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize,
            dtype=shape.dtype,
            device=self._device,
            window=batch.window,
        )
        return TorchStep(batch.slot_mapping.to(self._device), plan)

    def write(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, step: TorchStep) -> None:
        reshape_and_cache(key, value, key_cache, value_cache, step.slot_mapping)

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        step: TorchStep,
        scale: float,
        *,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return paged_attention(query, key_cache, value_cache, step.plan, scale, softcap=softcap, sinks=sinks)


def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes each token's key and value into its slot, in place. Arguments as in `octavo.kernels.reference`."""
    check_caches(key_cache, value_cache)
    check_new_keys(key, value, heads_of(key_cache), key_cache.dtype, slot_mapping)
    block_size = key_cache.shape[1]
    places = slot_mapping // block_size, slot_mapping % block_size
    for new, cache in ((key, key_cache), (value, value_cache)):
        cache.index_put_(places, new)


@dataclass(frozen=True, slots=True)
class _Scores:
    """Turns products of queries and keys into scores."""

    scale: float
    softcap: float
    sinks: Tensor | None

    @property
    def plain(self) -> bool:
        return self.softcap == 0 and self.sinks is None


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: AttentionPlan,
    scale: float,
    *,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes causal attention over paged keys and values, one call for each part of `plan`.

    `query`: [tokens, query_heads, head_dim]; caches: [num_blocks, block_size, kv_heads, head_dim]; `softcap` and
    `sinks` are those of `octavo.kernels.reference.paged_attention`. Returns a tensor of `query`'s shape and dtype.
    Raises `ValueError` on arguments that do not fit each other or the plan.
    """
    check_caches(key_cache, value_cache)
    check_query(query, heads_of(key_cache), key_cache.dtype, plan.num_tokens)
    check_scores(query, softcap, sinks)
    if key_cache.shape[1] != plan.block_size:
        raise ValueError(f"a plan for blocks of {plan.block_size} slots and a cache of {key_cache.shape[1]}")
    scores = _Scores(scale, softcap, sinks)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for group in plan.decode_groups:
        output.index_copy_(0, group.rows, _decode(query, key_cache, value_cache, group, scores))
    for tile in plan.prefill_tiles:
        output[tile.first_row : tile.last_row] = _prefill(query, key_cache, value_cache, tile, scores)
    return output


def _decode(query: Tensor, key_cache: Tensor, value_cache: Tensor, group: DecodeGroup, scores: _Scores) -> Tensor:
    """Returns the attention of the group's decoding sequences, [batch, query_heads, head_dim].

    The query heads of a KV head stand where torch expects query positions, so that one read of the keys serves all of
    them.
    """
    kv_heads, head_dim = key_cache.shape[2:]
    batch = len(group.rows)
    packed = query.index_select(0, group.rows).view(batch, kv_heads, -1, head_dim)
    keys, values = (
        cache.index_select(0, group.block_ids).view(batch, -1, kv_heads, head_dim).transpose(1, 2)
        for cache in (key_cache, value_cache)
    )
    sinks = None if scores.sinks is None else scores.sinks.view(1, kv_heads, -1, 1).expand(batch, -1, -1, -1)
    attended = _attend(packed, keys, values, group.mask, scores, sinks)
    return attended.reshape(batch, -1, head_dim)


def _prefill(query: Tensor, key_cache: Tensor, value_cache: Tensor, tile: PrefillTile, scores: _Scores) -> Tensor:
    """Returns the attention of the tile's queries, [queries, query_heads, head_dim].

    KV heads stand where torch expects the batch, with their query heads beside each other: keys are shared by a stride
    of zero and one mask serves all heads.
    """
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
    sinks = None if scores.sinks is None else scores.sinks.view(kv_heads, -1, 1, 1).expand(-1, -1, len(rows), -1)
    attended = _attend(grouped, keys, values, tile.mask, scores, sinks)
    return attended.permute(2, 0, 1, 3).flatten(1, 2)


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scores: _Scores, sinks: Tensor | None) -> Tensor:
    """Calls torch's fused attention, or computes its steps one by one where it has no place for a soft cap and sinks
    ([..., 1], for each query's row of scores)."""
    if scores.plain:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scores.scale)
    products = torch.matmul(query.float(), keys.float().transpose(-1, -2)) * scores.scale
    if scores.softcap:
        products = scores.softcap * torch.tanh(products / scores.softcap)
    products = products + mask
    if sinks is not None:
        products = torch.cat((products, sinks.float()), dim=-1)
    weights = products.softmax(dim=-1)[..., : keys.shape[-2]]
    return torch.matmul(weights, values.float()).to(query.dtype)
