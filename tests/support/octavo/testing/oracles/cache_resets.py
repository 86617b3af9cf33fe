"""Judges resets of the prefix cache from outside: what was computed before one is found by nobody, and neither is what
running requests make of it."""

from octavo.scheduler.core.events import CacheReset, Event
from octavo.scheduler.core.replica import Replica
from octavo.scheduler.core.scheduler import Scheduler
from octavo.scheduler.core.sequence import PrefixGroup, Sequence, SequenceGroup
from octavo.scheduler.kv.manager import KVCacheManager


class CacheResetWatch:
    """To be shown every event before it is handled, and the core after every event and every turn."""

    def __init__(self) -> None:
        # Those that held blocks at a reset which concerned them, and have not started over since.
        self._old: set[SequenceGroup] = set()

    def before_event(self, core: Scheduler, event: Event) -> None:
        """Notes whom a reset concerns."""
        if isinstance(event, CacheReset):
            for replica in core.replicas.values():
                self._old.update(group for group in _held(replica) if event.salt in (None, _salt(group)))

    def after_event(self, core: Scheduler, event: Event) -> None:
        """Asserts that a reset has left nothing to be found."""
        if isinstance(event, CacheReset):
            for replica in core.replicas.values():
                assert not replica.kv.cached_behind(event.salt), "a reset has left cached blocks"
                assert event.salt is not None or not replica.kv.pinned, "a reset has left a pinned prefix"
                prefixes = [group for group in replica.running if isinstance(group, PrefixGroup)]
                assert self._old.isdisjoint(prefixes), "a prefix is pinned that was half computed before a reset"
        self.look(core)

    def look(self, core: Scheduler) -> None:
        """Asserts that nobody can find what belongs to those that are older than a reset."""
        if not self._old:
            return
        self._old &= {group for replica in core.replicas.values() for group in _held(replica)}
        for replica in core.replicas.values():
            for group in self._old.intersection(replica.running):
                for sequence in group.holders:
                    assert not _to_be_found(replica, sequence), f"{group.request_id} is older than a reset, and found"


def _to_be_found(replica: Replica, sequence: Sequence) -> set[int]:
    """Returns the sequence's own blocks that a prefix hit would find, but for those of a prefix before its salt."""
    kv, key = replica.kv, sequence.cache_key
    assert isinstance(kv, KVCacheManager)
    first = key.salted_from // kv.block_size if key.salt else 0
    own = {block_id for blocks in kv.block_table(sequence) for block_id in blocks[first:]}
    return own.intersection(kv.cached_behind(None))


def _held(replica: Replica) -> list[SequenceGroup]:
    return [*replica.running, *replica.swapped]


def _salt(group: SequenceGroup) -> str:
    return group.request.cache_key.salt
