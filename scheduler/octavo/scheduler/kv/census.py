"""The census of a cell's cached blocks: which any replica holds, and what of that others are to be told.

To whoever routes requests a cell is one place, for its scheduler finds the replica that holds a prompt's beginning. So
a block is stored when the first replica holds it, and removed when the last has dropped it.

While steps are planned and booked, a replica's prefix cache only notes where it may have changed; what that comes to
is found out when somebody asks.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Ordered
from struct import unpack

from octavo.scheduler.core.sequence import Sequence
from octavo.scheduler.kv.prefix_cache import PrefixCache, block_hashes
from octavo.wire.base import Value

_HASH_BYTES = 8


class BlockStored(Value, frozen=True):
    """Blocks of one KV group that are now held, each the next of the one before it, the first that of `parent` (None:
    it begins a sequence); `token_ids` are those of all. A `window` of 0 tokens is none, an `adapter` of "" none."""

    kv_group: int
    window: int
    adapter: str
    block_size: int
    parent: int | None
    hashes: list[int]
    token_ids: list[int]


class BlockRemoved(Value, frozen=True):
    """Blocks of one KV group that are held no more."""

    kv_group: int
    hashes: list[int]


class AllBlocksCleared(Value, frozen=True):
    """Takes back whatever was told before."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class BlockCensus:
    """Knows what was told of the replicas' caches, and tells what has changed since. A block is told of once its step
    has been answered; one whose parent is not told is not either, for nobody would find it, until its parent is. Blocks
    behind a salt are nobody else's to know of."""

    def __init__(self) -> None:
        # By KV group, the hashes of the blocks that were told; and those that a cache has dropped since: another may
        # hold them still, or they may be back.
        self.told: list[set[bytes]] = []
        self.dropped: list[list[bytes]] = []
        self._replicas: list[ReplicaWatch] = []
        self._is_cleared = False

    def join(self, cache: PrefixCache, block_size: int, windows: Ordered[int]) -> "ReplicaWatch":
        """Returns the watch of a replica that joins, whose cache is empty. Where no replica was, others forget what
        they may have been told before."""
        while len(self.told) < len(windows):
            self.told.append(set())
            self.dropped.append([])
        self._is_cleared |= not self._replicas
        watch = ReplicaWatch(self, cache, block_size, windows)
        self._replicas.append(watch)
        return watch

    def leave(self, watch: "ReplicaWatch") -> None:
        """Takes a replica's cache out."""
        self._replicas.remove(watch)
        for content in watch.cache.confirmed:
            self.dropped[content.kv_group].append(content.value)

    def take(self) -> list[KVEvent]:
        """Returns what has changed since the last call: what is gone first, then what is new, parents before
        children."""
        events: list[KVEvent] = [
            BlockRemoved(kv_group, short_hashes(gone))
            for kv_group, dropped in enumerate(self.dropped)
            if dropped and (gone := self._take_dropped(kv_group))
        ]
        if self._is_cleared:
            self._is_cleared = False
            for told in self.told:
                told.clear()
            events = [AllBlocksCleared()]
        count = -1
        # Again where a parent may have come behind its child.
        while count < len(events):
            count = len(events)
            for watch in self._replicas:
                if watch.unsettled:
                    events += watch.take()
        return events

    def _take_dropped(self, kv_group: int) -> list[bytes]:
        told, dropped = self.told[kv_group], self.dropped[kv_group]
        gone = told.intersection(dropped)
        dropped.clear()
        for watch in self._replicas:
            gone -= watch.cache.confirmed_among(kv_group, gone)
        told -= gone
        return list(gone)


class ReplicaWatch:
    """Is the `CacheWatch` of one replica, whose KV groups have these `windows`."""

    def __init__(self, census: BlockCensus, cache: PrefixCache, block_size: int, windows: Ordered[int]) -> None:
        self.cache = cache
        self.dropped = census.dropped
        # Sequences of which blocks may have to be told, from one on.
        self.unsettled: dict[Sequence, int] = {}
        self._census = census
        self._block_size = block_size
        self._windows = windows

    def filled(self, sequence: Sequence, first: int) -> None:
        if first < self.unsettled.setdefault(sequence, first):
            self.unsettled[sequence] = first

    def closed(self) -> None:
        self._census.leave(self)

    def take(self) -> list[BlockStored]:
        """Returns an event for each run of blocks that follow one another and are to be told now. What is still to be
        computed, or lacks its parent, stays for later."""
        unsettled, self.unsettled = self.unsettled, {}
        events: list[BlockStored] = []
        for sequence, first in unsettled.items():
            hashes, key = block_hashes(sequence, self._block_size), sequence.cache_key
            if key.salt:
                hashes = hashes[: key.salted_from // self._block_size]
            for kv_group in range(len(self._windows)):
                for begin, run in self._runs(sequence, hashes, first, kv_group):
                    events.append(self._event(sequence, hashes, kv_group, begin, run))
        return events

    def _runs(
        self, sequence: Sequence, hashes: list[bytes], first: int, kv_group: int
    ) -> Iterator[tuple[int, list[bytes]]]:
        """Yields the first block, and all contents, of each run from `first` on."""
        told, values, run = self._census.told[kv_group], hashes[first:], list[bytes]()
        for depth, (value, is_confirmed) in enumerate(
            zip(values, self.cache.are_confirmed(kv_group, values), strict=True), first
        ):
            if is_confirmed and value not in told and (run or not depth or self._is_told(hashes[depth - 1])):
                told.add(value)
                run.append(value)
                continue
            # What is told while it is provisional here is held elsewhere, and may be dropped there.
            if is_confirmed is False or (is_confirmed and value not in told):
                self.filled(sequence, depth)
            if run:
                yield depth - len(run), run
                run = []
        if run:
            yield len(hashes) - len(run), run

    def _is_told(self, value: bytes) -> bool:
        """Tells whether a block was told, of whichever KV group: where a window has passed, its own may lack it."""
        return any(value in told for told in self._census.told)

    def _event(
        self, sequence: Sequence, hashes: list[bytes], kv_group: int, first: int, run: list[bytes]
    ) -> BlockStored:
        size = self._block_size
        return BlockStored(
            kv_group,
            self._windows[kv_group],
            sequence.cache_key.adapter,
            size,
            short_hashes(hashes[first - 1 : first])[0] if first else None,
            short_hashes(run),
            sequence.known_tokens(first * size, (first + len(run)) * size),
        )


def short_hashes(values: list[bytes]) -> list[int]:
    """Returns blocks' hashes as others know them: the last 64 bits of each."""
    return list(unpack(f">{len(values)}Q", b"".join([value[-_HASH_BYTES:] for value in values])))
