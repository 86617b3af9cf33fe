"""The blocks on a device and what is known of them: taken, given up, parked until a step is answered, distrusted."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from octavo.scheduler.kv.blocks import BlockPool
from octavo.scheduler.kv.prefix_cache import PrefixCache


class DeviceBlocks:
    """A pool and the prefix cache over all its blocks."""

    def __init__(self, num_blocks: int, num_kv_groups: int, *, prefix_caching: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(num_kv_groups)
        self.prefix_caching = prefix_caching
        # Blocks by the step whose answer frees them.
        self.parked: dict[int, list[int]] = defaultdict(list)
        # Blocks that a sequence which was not finite held or filled, and others still do.
        self._distrusted: set[int] = set()

    def take(self, count: int) -> list[int]:
        """Free blocks, for something new."""
        block_ids = self.pool.allocate(count)
        for block_id in block_ids:
            self.cache.remove(block_id)
        return block_ids

    def release(self, block_ids: Iterable[int]) -> None:
        """Drops references. Worthless blocks are taken again first, then the longest unused; of those given up together
        the ones with the longest prefix go before the others, so that a chain is eaten from its tail."""
        unused = [block_id for block_id in block_ids if self.pool.release(block_id)]
        self._distrusted.difference_update(unused)
        cached = []
        for block_id in reversed(unused):
            if not self.prefix_caching:
                self.cache.remove(block_id)
            content = self.cache.content(block_id)
            if content is None:
                self.pool.give_back(block_id, first=True)
            else:
                cached.append((-content.depth, block_id))
        for _, block_id in sorted(cached):
            self.pool.give_back(block_id)

    def surviving(self, own: set[int], num_taken: int) -> set[int]:
        """Of blocks that are given up together, those a prefix hit would find after `num_taken` have been taken: what
        is not cached goes first, then chains from their tails."""
        contents = ((self.cache.content(block_id), block_id) for block_id in own if self.prefix_caching)
        cached = sorted((content.depth, block_id) for content, block_id in contents if content is not None)
        return {block_id for _, block_id in cached[: max(0, min(len(cached), len(own) - num_taken))]}

    def step_answered(self, step_id: int, *, valid: bool) -> None:
        """Frees what was parked for this step; what it wrote is relied on only if it is `valid`."""
        self.cache.step_answered(step_id, valid=valid)
        self.release(self.parked.pop(step_id, []))

    @property
    def parked_block_ids(self) -> list[int]:
        """Blocks that wait for outstanding steps, as often as they do; others may hold them too."""
        return [block_id for block_ids in self.parked.values() for block_id in block_ids]

    @property
    def num_parked(self) -> int:
        """Blocks that are free as soon as outstanding steps are answered."""
        parked = Counter(self.parked_block_ids)
        return sum(self.pool.ref_count(block_id) == count for block_id, count in parked.items())

    @property
    def cached_free_block_ids(self) -> AbstractSet[int]:
        """Free blocks that a prefix hit would find: a walk over the fewer of all that are free and all that are
        cached."""
        return self.pool.free_block_ids & self.cache.block_ids

    def distrust(self, block_ids: Iterable[int]) -> None:
        """None of these is found again in the prefix cache."""
        for block_id in block_ids:
            self.cache.remove(block_id)
            if self.pool.ref_count(block_id):
                self._distrusted.add(block_id)

    def any_distrusted(self, block_ids: Iterable[int]) -> bool:
        """Whether one of these is held since before it was distrusted."""
        return bool(self._distrusted) and not self._distrusted.isdisjoint(block_ids)
