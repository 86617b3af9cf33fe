"""Whole blocks as bytes, for a disk: what all layers of a KV group keep of a block's tokens, of a draft model too."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from octavo.worker.runner import BlockCopies, Payload
from octavo.worker.step.kv_cache import KVCache

# What is copied from a device for one step.
_MOST_BYTES = 64 << 20


class BlockBytes:
    """Reads device blocks and fills CPU blocks of `caches`, which share their block ids: of each block the bytes of all
    caches, one after the other."""

    def __init__(self, caches: Sequence[KVCache]) -> None:
        self._caches = caches
        self._sizes = [cache.layout.bytes_per_block for cache in caches]
        self.num_bytes = sum(self._sizes)

    @property
    def layout(self) -> str:
        """Names the order of a block's bytes."""
        order = "tokens-first" if self._caches[0].is_here else "heads-first"
        parts = (f"{each.layout.dtype}{list(each.layout.shape(1)[1:])}" for each in self._caches)
        return f"{order} {' + '.join(parts)}"

    @torch.inference_mode()
    def read(self, block_ids: Sequence[int]) -> BlockCopies:
        here = self._caches[0].is_here
        wanted = block_ids if here else block_ids[: max(1, _MOST_BYTES // self.num_bytes)]
        rows = list(zip(*(cache.read(wanted) for cache in self._caches), strict=True))
        return BlockCopies(here, lambda: self._payloads(rows))

    @torch.inference_mode()
    def peek(self, block_ids: Sequence[int], *, in_cpu: bool) -> list[Payload] | None:
        """Returns the bytes of blocks where they lie, or copies of what lies apart; None if there are no such blocks in
        this process's memory."""
        rows = [cache.rows(in_cpu=in_cpu) for cache in self._caches]
        if any(each is None or max(block_ids) >= len(each) for each in rows):
            return None
        parts = [[each[block_id] for each in rows if each is not None] for block_id in block_ids]
        return [(each[0] if len(each) == 1 else torch.cat(each)).numpy().data for each in parts]

    @torch.inference_mode()
    def fill(self, block_id: int, payload: Payload) -> None:
        content = torch.frombuffer(payload, dtype=torch.uint8)
        for cache, part in zip(self._caches, torch.split(content, self._sizes), strict=True):
            cache.fill(block_id, part)

    def _payloads(self, rows: list[tuple[Tensor, ...]]) -> Iterator[Payload | None]:
        for parts in rows:
            if not all(cache.is_finite(part) for cache, part in zip(self._caches, parts, strict=True)):
                yield None
            elif len(parts) == 1:
                yield parts[0].numpy().data
            else:
                yield torch.cat(parts).numpy().data
