"""What a router knows of a cell that publishes KV events, beside what the cell's replicas hold."""

import hashlib
from array import array
from collections.abc import Collection, Iterable

from octavo.scheduler.core.scheduler import Scheduler
from octavo.scheduler.core.sequence import Sequence
from octavo.scheduler.kv.census import AllBlocksCleared, BlockCensus, BlockRemoved, BlockStored, KVEvent
from octavo.scheduler.kv.manager import KVCacheManager
from octavo.scheduler.kv.prefix_cache import CachedBlock, root_hash
from octavo.wire.requests import CacheKey
from octavo.wire.steps import MAX_KV_GROUPS

# A KV group and a hash.
Key = tuple[int, int]


class RouterIndex:
    """Follows the events of one cell. Asserts that none is told twice or in vain, that parents come before their
    children, and that a block's hash is that of the tokens told, so that no router takes a salted one for another's."""

    def __init__(self) -> None:
        self.held: set[Key] = set()
        # The whole hash of all that is held.
        self._hash_of: dict[int, bytes] = {}
        # The cell's scheduler is another than the one that told what is held here.
        self._is_stale = False
        # Known of all sequences that there were: whose content is salted, and what comes before a content.
        self._salted: set[bytes] = set()
        self._parent_of: dict[bytes, bytes | None] = {}
        # Sequences that there were when last looked at, for one may grow before it ends.
        self._sequences: list[Sequence] = []
        self._known: set[CachedBlock] = set()

    def cell_restarted(self) -> None:
        """A new scheduler begins, which knows nothing of what was told."""
        self._is_stale = True

    def follow(self, events: Iterable[KVEvent]) -> None:
        for event in events:
            match event:
                case AllBlocksCleared():
                    self.held.clear()
                    self._hash_of.clear()
                    self._is_stale = False
                case BlockRemoved(kv_group, hashes):
                    assert hashes, "nothing is removed"
                    for value in hashes:
                        self.held.remove((kv_group, value))
                        if not any((other, value) in self.held for other in range(MAX_KV_GROUPS)):
                            del self._hash_of[value]
                case BlockStored():
                    self._store(event)

    def _store(self, event: BlockStored) -> None:
        assert event.hashes, "nothing is stored"
        assert len(event.token_ids) == len(event.hashes) * event.block_size, "tokens are missing"
        begin = root_hash(CacheKey(adapter=event.adapter))
        whole = begin if event.parent is None else self._hash_of[event.parent]
        for index, value in enumerate(event.hashes):
            tokens = array("i", event.token_ids[index * event.block_size :][: event.block_size])
            whole = hashlib.sha256(whole + tokens.tobytes()).digest()
            assert int.from_bytes(whole[-8:], "big") == value, "a block is told with another's tokens"
            assert (event.kv_group, value) not in self.held, "a block is told twice"
            self.held.add((event.kv_group, value))
            self._hash_of[value] = whole

    def look(self, core: Scheduler, census: BlockCensus) -> None:
        """Takes in what has changed, and asserts that it is what the core's replicas hold now."""
        self.follow(census.take())
        replicas = core.replicas.values()
        running = [group for replica in replicas for group in replica.running]
        self.see([sequence for group in (*core.groups, *running) for sequence in group.sequences])
        self.check([replica.kv for replica in replicas if isinstance(replica.kv, KVCacheManager)])

    def see(self, sequences: list[Sequence]) -> None:
        """Learns of the content of all sequences that there are, and of those that there were before."""
        for sequence in dict.fromkeys([*self._sequences, *sequences]):
            key = sequence.cache_key
            for block_size, hashes in sequence.block_hashes.items():
                self._parent_of.update(zip(hashes, [None, *hashes], strict=False))
                if key.salt:
                    self._salted.update(hashes[key.salted_from // block_size :])
        self._sequences = sequences

    def check(self, memories: Collection[KVCacheManager]) -> None:
        """Asserts that exactly that is known which some memory holds for certain, but for what is salted, and what has
        come while its parent was not known."""
        if self._is_stale:
            assert not memories, "a cell that began anew has not cleared what was told before"
            return
        held = {content for memory in memories for content in computed(memory) if content.value not in self._salted}
        known = {content for content in held if content in self._known}
        for content in sorted(held, key=lambda content: content.depth):
            if (parent := self._parent_of[content.value]) is None or any(parent == other.value for other in known):
                known.add(content)
        self._known = known
        expected = {(content.kv_group, int.from_bytes(content.value[-8:], "big")): content for content in known}
        assert self.held <= expected.keys(), f"told of {self.held - expected.keys()}"
        assert expected.keys() <= self.held, f"not told of {[expected[key] for key in expected.keys() - self.held]}"


def computed(memory: KVCacheManager) -> Iterable[CachedBlock]:
    """Yields the content of the blocks that a hit would find, and whose step has been answered."""
    cache = memory.blocks.cache
    for block_id in cache.block_ids:
        content = cache.content(block_id)
        if content is not None and cache.filler(block_id) is None:
            yield content
