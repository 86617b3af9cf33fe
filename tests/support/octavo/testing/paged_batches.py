"""Random attention problems over a paged cache whose blocks lie in a shuffled order."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """One step's attention: arguments of `octavo.kernels.reference.paged_attention`, filled."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    context_lens: list[int]
    query_lens: list[int]
    scale: float


def random_paged_batch(
    lengths: Sequence[tuple[int, int]],
    *,
    block_size: int,
    kv_heads: int = 2,
    group: int = 3,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> PagedBatch:
    """Sequences of `lengths` (query tokens, context tokens). What no sequence may read holds NaN, except slots after a
    sequence's last token in its own blocks: the cache keeps those finite."""
    generator = torch.Generator().manual_seed(seed)
    widths = [-(-context // block_size) for _, context in lengths]
    order = torch.randperm(sum(widths) + 3, generator=generator)
    tables = torch.full((len(lengths), max(widths) + 1), int(order[-1]))
    caches = torch.full((2, len(order), block_size, kv_heads, head_dim), torch.nan, dtype=dtype)
    for row, (width, block_ids) in enumerate(zip(widths, torch.split(order[: sum(widths)], widths), strict=True)):
        tables[row, :width] = block_ids
        filled = torch.randn((2, width, block_size, kv_heads, head_dim), generator=generator)
        caches[:, block_ids] = filled.to(dtype)
    query_lens = [query for query, _ in lengths]
    query = torch.randn((sum(query_lens), kv_heads * group, head_dim), generator=generator).to(dtype)
    contexts = [context for _, context in lengths]
    return PagedBatch(query, caches[0], caches[1], tables, contexts, query_lens, head_dim**-0.5)
