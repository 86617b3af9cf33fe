"""Whole blocks as bytes, for a disk: what all layers of a KV group keep of a block's tokens, of a draft model too."""

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.worker.kv_store.loan import Parts, Payload
from octavo.worker.runner import BlockContents
from octavo.worker.step.followed_slots import FollowedSlots
from octavo.worker.step.kv_cache import KVCache
from octavo.worker.step.layer_pool import LayerPool

# What is copied from a device for one step.
_MOST_BYTES = 64 << 20


class BlockBytes:
    """Reads device blocks and fills CPU blocks of `caches`, which share their block ids: of each block the bytes of all
    pools of all caches, a part each, one after the other; and of a draft model's blocks how far they are `followed`."""

    def __init__(self, caches: Sequence[KVCache], followed: FollowedSlots | None = None) -> None:
        self._kv_caches = caches
        pools = [pool for cache in caches for pool in cache.pools]
        self._pools: list[LayerPool | FollowedSlots] = [*pools, *([followed] if followed is not None else [])]
        self._follows = followed is not None
        self._sizes = [each.bytes_per_block for each in self._pools]
        self.num_bytes = sum(self._sizes)

    @property
    def layout(self) -> str:
        """Names the order of a block's bytes, in which they are whatever pools there are."""
        order = "tokens-first" if self._pools[0].is_here else "heads-first"
        parts = [f"{each.layout.dtype}{list(each.layout.shape)}" for each in self._kv_caches]
        parts += ["followed slots"] * self._follows
        return f"{order} {' + '.join(parts)}"

    @torch.inference_mode()
    def read(self, block_ids: Sequence[int]) -> BlockContents:
        here = self._pools[0].is_here
        wanted = block_ids if here else block_ids[: max(1, _MOST_BYTES // self.num_bytes)]
        rows = list(zip(*(pool.read(wanted) for pool in self._pools), strict=True))
        return BlockContents(here, lambda: map(_parts, rows), self.is_sound)

    @torch.inference_mode()
    def peek(self, block_ids: Sequence[int], *, in_cpu: bool) -> list[Payload] | None:
        """Returns the bytes of blocks where they lie, or copies of what lies apart; None if there are no such blocks in
        this process's memory."""
        rows = [pool.rows(in_cpu=in_cpu) for pool in self._pools]
        if any(each is None or max(block_ids) >= len(each) for each in rows):
            return None
        parts = [[each[block_id] for each in rows if each is not None] for block_id in block_ids]
        return [(each[0] if len(each) == 1 else torch.cat(each)).numpy().data for each in parts]

    @torch.inference_mode()
    def fill(self, block_id: int, payload: Payload) -> None:
        content = torch.frombuffer(payload, dtype=torch.uint8)
        for pool, part in zip(self._pools, torch.split(content, self._sizes), strict=True):
            pool.fill(block_id, part)

    def is_sound(self, parts: Parts) -> bool:
        """Tells whether the parts of a block are finite numbers all."""
        return all(
            pool.is_finite(torch.frombuffer(part, dtype=torch.uint8))
            for pool, part in zip(self._pools, parts, strict=True)
        )


def _parts(row: tuple[Tensor, ...]) -> Parts:
    return [part.numpy().data for part in row]
