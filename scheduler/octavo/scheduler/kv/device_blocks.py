"""The blocks on a device and what is known of them: taken, given up, parked until a step is answered, pinned,
distrusted."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from octavo.scheduler.core.sequence import Sequence
from octavo.scheduler.kv.blocks import BlockPool, BlockTable
from octavo.scheduler.kv.prefix_cache import CachedBlock, PrefixCache, Tail, block_hashes, root_hash
from octavo.wire.base import NULL_BLOCK


class DeviceBlocks:
    """Joins a pool with the prefix cache over all its blocks."""

    def __init__(self, num_blocks: int, num_kv_groups: int, *, prefix_caching: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(num_kv_groups)
        self.prefix_caching = prefix_caching
        # Parked blocks by the step whose answer frees them.
        self.parked: dict[int, list[int]] = defaultdict(list)
        # Blocks that a non-finite sequence held or filled, and that others still hold.
        self._distrusted: set[int] = set()

    def take(self, count: int) -> list[int]:
        """Takes `count` free blocks for new content. Raises `ValueError` if fewer are free."""
        block_ids = self.pool.allocate(count)
        for block_id in block_ids:
            self.cache.remove(block_id)
        return block_ids

    def release(self, block_ids: Iterable[int]) -> None:
        """Drops references. Of the blocks that become free those without cached content are taken again first, then the
        longest unused; of those given up together the ones with the longest prefix go before the others, so that a
        chain is eaten from its tail."""
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
        """Returns which blocks of `own`, given up together, a prefix hit would still find after `num_taken` of them
        have been taken: what is not cached goes first, then chains from their tails."""
        contents = ((self.cache.content(block_id), block_id) for block_id in own if self.prefix_caching)
        cached = sorted((content.depth, block_id) for content, block_id in contents if content is not None)
        return {block_id for _, block_id in cached[: max(0, min(len(cached), len(own) - num_taken))]}

    def step_answered(self, step_id: int, *, valid: bool) -> None:
        """Frees the blocks that were parked for this step; the content it wrote is relied on only if it is `valid`."""
        self.cache.step_answered(step_id, valid=valid)
        self.release(self.parked.pop(step_id, []))

    @property
    def parked_block_ids(self) -> list[int]:
        """Returns the blocks that wait for outstanding steps, once for each; sequences may hold them too."""
        return [block_id for block_ids in self.parked.values() for block_id in block_ids]

    @property
    def num_parked(self) -> int:
        """Counts the blocks that will be free as soon as outstanding steps are answered."""
        parked = Counter(self.parked_block_ids)
        return sum(self.pool.ref_count(block_id) == count for block_id, count in parked.items())

    @property
    def cached_free_block_ids(self) -> AbstractSet[int]:
        """Returns the free blocks that a prefix hit would find: a walk over the fewer of all that are free and all that
        are cached."""
        return self.pool.free_block_ids & self.cache.block_ids

    def distrust(self, block_ids: Iterable[int]) -> None:
        """Makes sure that none of these blocks is found again in the prefix cache."""
        for block_id in block_ids:
            self.cache.remove(block_id)
            if self.pool.ref_count(block_id):
                self._distrusted.add(block_id)

    def any_distrusted(self, block_ids: Iterable[int]) -> bool:
        """Tells whether one of these blocks has been held since before it was distrusted."""
        return bool(self._distrusted) and not self._distrusted.isdisjoint(block_ids)


# -- pins -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Pin:
    """Holds the blocks of a pinned prefix, the last of them as a tail if it is partly filled."""

    block_ids: list[int]
    tail: Tail | None


class PinnedBlocks:
    """Holds the blocks of pinned prefixes by their names. `tails` collects the tails of all pins, for prefix
    lookups."""

    def __init__(self, blocks: DeviceBlocks, block_size: int, tails: list[Tail]) -> None:
        self._blocks = blocks
        self._block_size = block_size
        self._tails = tails
        self._pins: dict[str, _Pin] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._pins

    @property
    def by_name(self) -> dict[str, list[int]]:
        """Returns the blocks of each prefix."""
        return {name: pin.block_ids for name, pin in self._pins.items()}

    @property
    def block_ids(self) -> set[int]:
        """Returns all blocks that any prefix keeps."""
        return {block_id for pin in self._pins.values() for block_id in pin.block_ids}

    def pin(self, name: str, sequence: Sequence, table: BlockTable) -> None:
        """Takes over the blocks of a sequence's prompt, all computed."""
        size, num_full = self._block_size, sequence.num_prompt // self._block_size
        hashes = block_hashes(sequence, size)
        for group, blocks in enumerate(table.groups):
            for logical, block_id in enumerate(blocks[:num_full]):
                if block_id != NULL_BLOCK:
                    # Where another block holds the same, this one is to be found, for that one may go.
                    self._blocks.cache.replace(CachedBlock(hashes[logical], group, logical), block_id)
        tail = None
        if sequence.num_prompt % size:
            tokens = sequence.known_tokens(num_full * size, sequence.num_prompt)
            parent = hashes[num_full - 1] if num_full else root_hash(sequence.cache_key)
            tail = Tail(parent, tokens, [blocks[num_full] for blocks in table.groups])
            self._tails.append(tail)
        self._pins[name] = _Pin(table.block_ids, tail)

    def unpin(self, name: str) -> None:
        """Gives a prefix's blocks up; with prefix caching they stay as cached content until they are taken. Raises
        `KeyError` for an unknown name."""
        pin = self._pins.pop(name)
        if pin.tail is not None:
            self._tails.remove(pin.tail)
        self._blocks.release(pin.block_ids)
