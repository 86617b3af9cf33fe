"""How much of a sequence is computed already: what the prefix cache holds, what is pinned, what its group shares."""

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from octavo.scheduler.block_table import first_visible
from octavo.scheduler.prefix_cache import PrefixCache, block_hashes, root_hash
from octavo.scheduler.sequence import Sequence
from octavo.wire.base import NULL_BLOCK


@dataclass(frozen=True, slots=True)
class Tail:
    """The partly filled last block of a pinned prefix, one per KV group: the hash of all before it, and its tokens."""

    parent: bytes
    token_ids: list[int]
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class Begin:
    """How a sequence's tables begin: with `num_blocks` full blocks that hold its first tokens, found in the cache (one
    list per KV group) or shared with a `leader` that starts beside it; then with a copy of `tail`."""

    num_blocks: int
    found: list[list[int]]
    leader: Sequence | None = None
    tail: Tail | None = None


class PrefixLookup:
    """Reads the cache for sequences that are about to start."""

    def __init__(self, cache: PrefixCache, block_size: int, windows: Ordered[int]) -> None:
        self.tails: list[Tail] = []
        self._cache = cache
        self._block_size = block_size
        self._windows = windows
        self._windowed = [group for group, window in enumerate(windows) if window]

    def begins(self, sequences: Ordered[Sequence]) -> list[Begin]:
        """For each of the sequences of a group, which start together: equal beginnings share blocks, cached or not."""
        begins: list[Begin] = []
        for index, sequence in enumerate(sequences):
            begin = self._find(sequence)
            for leader, other in zip(sequences[:index], begins, strict=True):
                common = self._num_common_blocks(sequence, leader)
                # A leader that starts later in a window lacks what is before it.
                if common > begin.num_blocks and (not self._windowed or other.num_blocks <= common):
                    begin = Begin(common, [[] for _ in self._windows], leader)
            begins.append(begin)
        return begins

    def _num_common_blocks(self, sequence: Sequence, leader: Sequence) -> int:
        """Full blocks that begin both; never up to the last known token, whose logits are needed."""
        hashes, others = (block_hashes(each, self._block_size) for each in (sequence, leader))
        limit = min(self._limit(sequence), len(others))
        return next((i for i in range(limit) if hashes[i] != others[i]), limit)

    def _limit(self, sequence: Sequence) -> int:
        """Blocks that may be found computed: a hit never covers the last known token, whose logits are needed."""
        return 0 if sequence.bypasses_cache else (sequence.num_known - 1) // self._block_size

    def _find(self, sequence: Sequence) -> Begin:
        """The longest beginning of the sequence that all KV groups hold."""
        limit = self._limit(sequence) if len(self._cache) else 0
        hashes = block_hashes(sequence, self._block_size) if limit else []
        for group, window in enumerate(self._windows):
            if not window:
                limit = self._num_held(group, hashes, limit)
        limit = self._agree_on_windows(hashes, limit)
        tail = self._find_tail(sequence, limit)
        position = limit * self._block_size + (len(tail.token_ids) if tail is not None else 0)
        found = []
        for group, window in enumerate(self._windows):
            first = min(limit, first_visible(window, position, self._block_size))
            blocks = (self._cache.block(group, value) for value in hashes[first:limit])
            found.append([NULL_BLOCK] * first + [block_id for block_id in blocks if block_id is not None])
        return Begin(limit, found, tail=tail)

    def _num_held(self, group: int, hashes: list[bytes], limit: int) -> int:
        return next((i for i in range(limit) if self._cache.block(group, hashes[i]) is None), limit)

    def _agree_on_windows(self, hashes: list[bytes], limit: int) -> int:
        """At most `limit` blocks, so many that every windowed group holds those that its window reaches from there."""
        agreed = False
        while not agreed:
            agreed = True
            for group in self._windowed:
                longest = self._longest_in_window(group, hashes, limit)
                agreed, limit = agreed and longest == limit, longest
        return limit

    def _longest_in_window(self, group: int, hashes: list[bytes], limit: int) -> int:
        end = index = limit
        while index > self._first_visible(self._windows[group], end):
            index -= 1
            if self._cache.block(group, hashes[index]) is None:
                end = index
        return end

    def _find_tail(self, sequence: Sequence, num_blocks: int) -> Tail | None:
        """The longest partly filled pinned block that goes on with the sequence's tokens after `num_blocks`."""
        if not self.tails or sequence.bypasses_cache:
            return None
        start, stop = num_blocks * self._block_size, sequence.num_known - 1
        if sequence.cache_key.salt:
            stop = min(stop, sequence.cache_key.salted_from)
        hashes = block_hashes(sequence, self._block_size)
        parent = hashes[num_blocks - 1] if num_blocks else root_hash(sequence.cache_key)
        tails = [
            tail
            for tail in self.tails
            if tail.parent == parent
            and start + len(tail.token_ids) <= stop
            and tail.token_ids == sequence.known_tokens(start, start + len(tail.token_ids))
        ]
        return max(tails, key=lambda tail: len(tail.token_ids), default=None)

    def _first_visible(self, window: int, num_blocks: int) -> int:
        """The first logical block that the token after `num_blocks` full ones can see."""
        return first_visible(window, num_blocks * self._block_size, self._block_size)
