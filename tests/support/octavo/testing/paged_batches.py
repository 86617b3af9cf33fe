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
    window: int
    softcap: float = 0.0
    sinks: Tensor | None = None


def random_paged_batch(
    lengths: Sequence[tuple[int, int]],
    *,
    block_size: int,
    kv_heads: int = 2,
    group: int = 3,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int = 0,
    seed: int = 0,
) -> PagedBatch:
    """Sequences of `lengths` (query tokens, context tokens). What no sequence may read holds NaN, except slots after a
    sequence's last token in its own blocks: the cache keeps those finite. Of the blocks that a `window` has passed some
    hold NaN, and others are none at all."""
    generator = torch.Generator().manual_seed(seed)
    widths = [-(-context // block_size) for _, context in lengths]
    order = torch.randperm(sum(widths) + 3, generator=generator)
    tables = torch.full((len(lengths), max(widths) + 1), int(order[-1]))
    caches = torch.full((2, len(order), block_size, kv_heads, head_dim), torch.nan, dtype=dtype)
    for row, (width, block_ids) in enumerate(zip(widths, torch.split(order[: sum(widths)], widths), strict=True)):
        tables[row, :width] = block_ids
        filled = torch.randn((2, width, block_size, kv_heads, head_dim), generator=generator)
        caches[:, block_ids] = filled.to(dtype)
        passed = _passed_blocks(lengths[row], window, block_size)
        caches[:, block_ids[:passed]] = torch.nan
        tables[row, :passed][torch.rand(passed, generator=generator) < 0.5] = -1
    query_lens = [query for query, _ in lengths]
    query = torch.randn((sum(query_lens), kv_heads * group, head_dim), generator=generator).to(dtype)
    contexts = [context for _, context in lengths]
    return PagedBatch(query, caches[0], caches[1], tables, contexts, query_lens, head_dim**-0.5, window)


def _passed_blocks(lengths: tuple[int, int], window: int, block_size: int) -> int:
    """How many blocks lie wholly before the window of the first query."""
    query, context = lengths
    return max(0, context - query + 1 - window) // block_size if window else 0
