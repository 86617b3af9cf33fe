"""Random attention problems over a paged cache whose blocks lie in a shuffled order."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.kernels import reference


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Holds one step's attention: arguments of `octavo.kernels.reference.paged_attention`, filled."""

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
    alibi_slopes: Tensor | None = None

    def slots(self, row: int, start: int) -> Tensor:
        """[tokens] int64: where the tokens of a sequence lie from position `start` on."""
        block_size = self.key_cache.shape[1]
        positions = torch.arange(start, self.context_lens[row])
        return self.block_tables[row, positions // block_size] * block_size + positions % block_size

    def attended(self) -> Tensor:
        """Returns the oracle's attention."""
        return reference.paged_attention(
            self.query,
            self.key_cache,
            self.value_cache,
            self.block_tables,
            self.context_lens,
            self.query_lens,
            self.scale,
            self.window,
            self.softcap,
            self.sinks,
            self.alibi_slopes,
        )


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
    """Draws sequences of `lengths` (query tokens, context tokens). Whatever no sequence may read holds NaN, except
    slots after a sequence's last token in its own blocks: the cache keeps those finite. Of the blocks that a `window`
    has passed some hold NaN, and others are none at all."""
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


def on_a_gpu(batch: PagedBatch, device: torch.device, cache_dtype: torch.dtype | None = None) -> PagedBatch:
    """The same with its caches one layer of a block-major pool on `device`, as strided views of it: all that holds no
    token is NaN there, slots after a sequence's last token too. With a `cache_dtype` keys and values are rounded to
    that. Only the tables stay where they are."""
    num_blocks, block_size, kv_heads, head_dim = batch.key_cache.shape
    pool = torch.full((num_blocks, 3, 2, kv_heads, block_size, head_dim), torch.nan)
    layer = pool[:, 1].transpose(2, 3)
    for row, (context, length) in enumerate(zip(batch.context_lens, batch.query_lens, strict=True)):
        slots = batch.slots(row, max(0, context - length + 1 - batch.window) if batch.window else 0)
        for part, cache in enumerate((batch.key_cache, batch.value_cache)):
            places = slots // block_size, slots % block_size
            layer[:, part].index_put_(places, cache[places].float())
    layer = pool.to(device, cache_dtype or batch.query.dtype)[:, 1].transpose(2, 3)
    return replace(
        batch,
        query=batch.query.to(device),
        key_cache=layer[:, 0],
        value_cache=layer[:, 1],
        sinks=None if batch.sinks is None else batch.sinks.to(device),
        alibi_slopes=None if batch.alibi_slopes is None else batch.alibi_slopes.to(device),
    )


def _passed_blocks(lengths: tuple[int, int], window: int, block_size: int) -> int:
    """Counts the blocks that lie wholly before the window of the first query."""
    query, context = lengths
    return max(0, context - query + 1 - window) // block_size if window else 0
