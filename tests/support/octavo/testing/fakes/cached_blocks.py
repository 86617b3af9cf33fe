"""A replica's prefix cache, filled and emptied by hand, and counted in a census."""

from collections.abc import Sequence as Ordered

from octavo.scheduler.core.sequence import Sequence
from octavo.scheduler.kv.census import BlockCensus, short_hashes
from octavo.scheduler.kv.prefix_cache import CachedBlock, PrefixCache, block_hashes
from octavo.wire import history
from octavo.wire.requests import NO_CACHE_KEY, CacheKey


def sequence_of(token_ids: list[int], key: CacheKey = NO_CACHE_KEY) -> Sequence:
    """A sequence of which nothing but the prompt is known."""
    return Sequence(0, token_ids, [], history.EMPTY, key)


class CachedBlocks:
    """Holds blocks of `block_size` tokens, each in a block of its own."""

    def __init__(self, census: BlockCensus, block_size: int = 2, windows: Ordered[int] = (0,)) -> None:
        self.cache = PrefixCache(len(windows))
        self.cache.watch = census.join(self.cache, block_size, windows)
        self._size = block_size
        self._num_blocks = self._num_steps = 0

    def fill(self, token_ids: list[int], first: int = 0, kv_group: int = 0, key: CacheKey = NO_CACHE_KEY) -> int:
        """Has a step fill the full blocks of these tokens from `first` on; returns the step."""
        sequence = sequence_of(token_ids, key)
        self._num_steps += 1
        for depth, value in enumerate(block_hashes(sequence, self._size)[first:], first):
            self._num_blocks += 1
            self.cache.insert(CachedBlock(value, kv_group, depth), self._num_blocks, (self._num_steps, self._num_steps))
        assert self.cache.watch is not None
        self.cache.watch.filled(sequence, first)
        return self._num_steps

    def hold(self, token_ids: list[int], first: int = 0, kv_group: int = 0, key: CacheKey = NO_CACHE_KEY) -> None:
        """Has them filled, and the step answered."""
        self.cache.step_answered(self.fill(token_ids, first, kv_group, key), valid=True)

    def drop(self, token_ids: list[int], first: int = 0, kv_group: int = 0) -> None:
        """Takes the full blocks of these tokens out, from `first` on."""
        for value in block_hashes(sequence_of(token_ids), self._size)[first:]:
            block_id = self.cache.block(kv_group, value)
            assert block_id is not None
            self.cache.remove(block_id)

    def hashes(self, token_ids: list[int]) -> list[int]:
        """The hashes of the full blocks of these tokens, as others know them."""
        return short_hashes(block_hashes(sequence_of(token_ids), self._size))
