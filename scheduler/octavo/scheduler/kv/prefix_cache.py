"""The prefix cache: full blocks by their content, a chained hash of a block's tokens and all before them.

Equal hash, equal history, so one sequence's block can serve another. SHA-256, because a collision would show one client
another's context. Whatever must be equal besides the tokens goes into the chain where it begins to count: an adapter
before the first block, a client's salt before the first block with a token behind the pinned prefix that the request
continues, if it does. The KV group a block belongs to is part of the key.
"""

import hashlib
import sys
from array import array
from collections.abc import Callable, Iterator, KeysView
from collections.abc import Sequence as Ordered
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Protocol

from octavo.scheduler.core.sequence import CacheUse, Sequence, Tier
from octavo.wire.base import NULL_BLOCK, Value
from octavo.wire.requests import CacheKey

_LITTLE_ENDIAN = sys.byteorder == "little"


def root_hash(key: CacheKey) -> bytes:
    """Returns the hash to which the first block is chained; a salt is not in it."""
    return _mixed(b"", b"adapter", key.adapter)


def _mixed(parent: bytes, kind: bytes, label: str) -> bytes:
    """Mixes `label` into a parent's hash; returns the parent if the label is empty. The hash function is not that of
    blocks: no label passes for tokens."""
    return hashlib.blake2b(label.encode(), digest_size=32, key=parent, person=kind).digest() if label else parent


def block_hashes(sequence: Sequence, block_size: int) -> list[bytes]:
    """Returns the hashes of all blocks of `block_size` that the sequence's known tokens fill, first to last.

    They are kept with the sequence, so each block is hashed once in its life.
    """
    hashes = sequence.block_hashes.setdefault(block_size, [])
    start, stop = len(hashes) * block_size, sequence.num_known // block_size * block_size
    if start < stop:
        key = sequence.cache_key
        first_salted = key.salted_from // block_size
        parent = hashes[-1] if hashes else root_hash(key)
        content, width = _content(sequence, start, stop), 4 * block_size
        for offset in range(0, len(content), width):
            if len(hashes) == first_salted:
                parent = _mixed(parent, b"salt", key.salt)
            parent = hashlib.sha256(parent + content[offset : offset + width]).digest()
            hashes.append(parent)
    return hashes


def _content(sequence: Sequence, start: int, stop: int) -> bytes:
    """Encodes known tokens as little-endian int32."""
    tokens = array("i", sequence.known_tokens(start, stop))
    if not _LITTLE_ENDIAN:
        tokens.byteswap()
    return tokens.tobytes()


def first_visible(window: int, position: int, block_size: int) -> int:
    """Returns the first logical block that the token at `position` can see, in a KV group of this `window` in tokens
    (0: all)."""
    return max(0, position - window + 1) // block_size if window else 0


def salt_of(key: CacheKey, depth: int, block_size: int) -> str:
    """Returns the salt that counts in the block with `depth` blocks before it; empty for none."""
    return key.salt if depth >= key.salted_from // block_size else ""


class CachedBlock(Value, frozen=True):
    """Content of a block: `depth` blocks come before it in its chain; `salt` is the one that counts in it, empty for
    none. (A `Value`, for the garbage collector has nothing to do with these, and there is one per cached block.)"""

    value: bytes
    kv_group: int
    depth: int
    salt: str = ""

    def __deepcopy__(self, memo: dict[int, object]) -> "CachedBlock":
        return self


class CacheWatch(Protocol):
    """Is told where the content of a cache may have changed."""

    # By KV group: hashes of blocks that were not provisional, and that the cache has dropped.
    dropped: list[list[bytes]]

    def filled(self, sequence: Sequence, first: int) -> None:
        """Notes that blocks of the sequence from `first` on are in the cache, or will be."""

    def closed(self) -> None:
        """Notes that the cache is gone."""


class PrefixCache:
    """Maps content to the block that holds it. A block stays indexed while it is free, until it is taken for something
    else.

    An entry made by a step that is still outstanding is provisional: groups planned later may share it, for a replica
    runs its plans in order; it goes if the step fails, or what the step was to compute there is skipped.
    """

    def __init__(self, num_kv_groups: int) -> None:
        self.watch: CacheWatch | None = None
        self._block_of: list[dict[bytes, int]] = [{} for _ in range(num_kv_groups)]
        self._content_of: dict[int, CachedBlock] = {}
        # Blocks that an outstanding step fills, those steps, and the sequences (by id) that it computes there.
        self._filled_by: dict[int, tuple[int, int]] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> "PrefixCache":
        """Copies the cache without its watch: what becomes of a copy is nobody's business."""
        double = PrefixCache(0)
        double._block_of = [dict(blocks) for blocks in self._block_of]
        double._content_of, double._filled_by = dict(self._content_of), dict(self._filled_by)
        return double

    def __len__(self) -> int:
        return len(self._content_of)

    @property
    def block_ids(self) -> KeysView[int]:
        """Returns all blocks with indexed content."""
        return self._content_of.keys()

    def content(self, block_id: int) -> CachedBlock | None:
        """Returns the indexed content of the block; None if it has none."""
        return self._content_of.get(block_id)

    def confirmed_content(self, block_id: int) -> CachedBlock | None:
        """Returns the indexed content of the block, if the step that filled it has been answered; else None."""
        return None if block_id in self._filled_by else self._content_of.get(block_id)

    def block(self, kv_group: int, value: bytes) -> int | None:
        """Returns the block with this content; None if there is none."""
        return self._block_of[kv_group].get(value)

    def confirmed_block(self, kv_group: int, value: bytes) -> int | None:
        """Returns the block with this content, if the step that filled it has been answered; else None."""
        block_id = self._block_of[kv_group].get(value)
        return None if block_id in self._filled_by else block_id

    def are_confirmed(self, kv_group: int, values: Ordered[bytes]) -> list[bool | None]:
        """Tells of each content whether the step that filled its block has been answered; None where there is none."""
        block_of, filled_by = self._block_of[kv_group], self._filled_by
        return [None if (block_id := block_of.get(value)) is None else block_id not in filled_by for value in values]

    def confirmed_among(self, kv_group: int, values: AbstractSet[bytes]) -> set[bytes]:
        """Returns those of the contents of which there is a block whose step has been answered."""
        block_of = self._block_of[kv_group] if kv_group < len(self._block_of) else {}
        return {value for value in values & block_of.keys() if block_of[value] not in self._filled_by}

    def filler(self, block_id: int) -> tuple[int, int] | None:
        """Returns the outstanding step that fills the block, and the sequence (by id) that it computes there; None if
        none does."""
        return self._filled_by.get(block_id)

    def filled_by(self, sequence_id: int) -> list[int]:
        """Returns the indexed blocks that outstanding steps fill with what they compute of this sequence."""
        return [block_id for block_id, (_, owner) in self._filled_by.items() if owner == sequence_id]

    def insert(self, content: CachedBlock, block_id: int, filler: tuple[int, int] | None) -> bool:
        """Indexes the block, which holds this content, or will once its `filler` has: a step, and the sequence (by id)
        that it computes there. Returns False, and changes nothing, where another block holds it already."""
        blocks = self._block_of[content.kv_group]
        if content.value in blocks:
            return False
        blocks[content.value] = block_id
        self._content_of[block_id] = content
        if filler is not None:
            self._filled_by[block_id] = filler
        return True

    def replace(self, content: CachedBlock, block_id: int) -> None:
        """Makes the block, which holds this content for certain, the one to be found."""
        former = self._block_of[content.kv_group].get(content.value)
        if former != block_id:
            if former is not None:
                self.remove(former)
            self.remove(block_id)
            self._block_of[content.kv_group][content.value] = block_id
            self._content_of[block_id] = content

    def step_answered(self, step_id: int, *, valid: bool) -> list[int]:
        """Confirms the entries of a step, or takes them out; returns their blocks."""
        if not self._filled_by:
            return []
        block_ids = [block_id for block_id, (filler, _) in self._filled_by.items() if filler == step_id]
        for block_id in block_ids:
            if not valid:
                self.remove(block_id)
            else:
                del self._filled_by[block_id]
        return block_ids

    def withdraw(self, sequence_ids: AbstractSet[int], after_step: int) -> None:
        """Takes out what outstanding steps after `after_step` were to fill with these sequences."""
        for block_id, (step_id, owner) in list(self._filled_by.items()):
            if step_id > after_step and owner in sequence_ids:
                self.remove(block_id)

    def behind(self, salt: str | None) -> list[int]:
        """Returns the blocks with indexed content in which this salt counts; for None all."""
        contents = self._content_of.items()
        return [block_id for block_id, content in contents if salt is None or content.salt == salt]

    def remove(self, block_id: int) -> CachedBlock | None:
        """Takes out a block that will hold something else, and returns its content if the step that filled it has been
        answered. Unknown blocks are ignored."""
        content = self._content_of.pop(block_id, None)
        if content is None:
            return None
        del self._block_of[content.kv_group][content.value]
        if self._filled_by.pop(block_id, None) is not None:
            return None
        if self.watch is not None:
            self.watch.dropped[content.kv_group].append(content.value)
        return content

    def close(self) -> None:
        """Tells the watch that all is gone."""
        if self.watch is not None:
            self.watch.closed()
            self.watch = None

    @property
    def confirmed(self) -> Iterator[CachedBlock]:
        """Yields the content of all blocks whose step has been answered."""
        return (content for block_id, content in self._content_of.items() if block_id not in self._filled_by)

    def check(self) -> None:
        """Asserts that blocks and contents name each other."""
        contents = {(content.kv_group, content.value): block_id for block_id, content in self._content_of.items()}
        assert contents == {(g, value): b for g, blocks in enumerate(self._block_of) for value, b in blocks.items()}


# -- tiers ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TierUse:
    """Counts what a tier of the prefix cache holds, in blocks, and what it has done since its replica registered:
    `num_held` have content that requests find, where there is room for `num_blocks`. Content of `num_evicted` made way
    for other content; `num_missed` were asked for in vain; and so many have `moved` to other tiers. Replicas whose
    tiers have the same `place` share them."""

    tier: Tier
    num_held: int
    num_blocks: int
    num_evicted: int
    moved: dict[Tier, int]
    num_missed: int = 0
    place: str = ""


# -- lookup -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tail:
    """A partly filled last block of a pinned prefix, one per KV group: the hash of all before it, and its tokens."""

    parent: bytes
    token_ids: list[int]
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class Begin:
    """The beginning of a sequence's tables: `num_blocks` full blocks that hold its first tokens, found in the cache
    (one list per KV group) or shared with a `leader` that starts beside it; then a copy of `tail`.

    Of `loads`, by KV group and index in `found`, CPU blocks have what no block of the device has.
    """

    num_blocks: int
    found: list[list[int]]
    leader: Sequence | None = None
    tail: Tail | None = None
    loads: dict[tuple[int, int], int] = field(default_factory=dict)


# Tells whether a KV group holds the content with this hash.
Holds = Callable[[int, bytes], bool]


class PrefixLookup:
    """Looks up in the cache, and behind it in that of CPU blocks, how sequences begin that are about to start."""

    def __init__(self, cache: PrefixCache, cpu_cache: PrefixCache, block_size: int, windows: Ordered[int]) -> None:
        # Of pinned prefixes, by their names.
        self.tails: dict[str, Tail] = {}
        self._cache = cache
        self._cpu_cache = cpu_cache
        self.block_size = block_size
        self._windows = windows
        self._windowed = [group for group, window in enumerate(windows) if window]

    def begins(self, sequences: Ordered[Sequence]) -> list[Begin]:
        """Returns the beginning of each sequence of a group, which start together: equal beginnings share blocks,
        cached or not."""
        begins: list[Begin] = []
        for index, sequence in enumerate(sequences):
            begin = self._find(sequence)
            for leader, other in zip(sequences[:index], begins, strict=True):
                common = self._num_common_blocks(sequence, leader)
                # A leader that starts later in a window lacks the blocks before it.
                if common > begin.num_blocks and (not self._windowed or other.num_blocks <= common):
                    begin = Begin(common, [[] for _ in self._windows], leader)
            begins.append(begin)
        return begins

    def _num_common_blocks(self, sequence: Sequence, leader: Sequence) -> int:
        """Counts the full blocks that begin both; never up to the last known token, whose logits are needed."""
        hashes, others = (block_hashes(each, self.block_size) for each in (sequence, leader))
        limit = min(self._limit(sequence), len(others))
        return next((i for i in range(limit) if hashes[i] != others[i]), limit)

    def beyond(self, sequence: Sequence, num_blocks: int, limit: int | None = None) -> list[CachedBlock]:
        """Returns what the sequence begins with after `num_blocks` blocks and no block holds, in order, as far as that
        may be found, and not beyond the first `limit` blocks; of windowed KV groups what is seen from the end of
        that."""
        size = self.block_size
        limit = self._limit(sequence) if limit is None else min(limit, self._limit(sequence))
        hashes = block_hashes(sequence, size) if num_blocks < limit else []
        return [
            CachedBlock(hashes[index], group, index, salt_of(sequence.cache_key, index, size))
            for index in range(num_blocks, limit)
            for group, window in enumerate(self._windows)
            if index >= self._first_visible(window, limit) and not self._holds(group, hashes[index])
        ]

    def _limit(self, sequence: Sequence) -> int:
        """Counts the blocks that may be found computed: a hit never covers the last known token, whose logits are
        needed."""
        return 0 if sequence.cache_use is CacheUse.BYPASSED else (sequence.num_known - 1) // self.block_size

    def _find(self, sequence: Sequence) -> Begin:
        """Finds the longest beginning of the sequence that all KV groups hold."""
        limit = self._limit(sequence) if len(self._cache) or len(self._cpu_cache) else 0
        hashes = block_hashes(sequence, self.block_size) if limit else []
        limit = self._num_found(hashes, limit, self._holds)
        tail = self._find_tail(sequence, limit)
        position = limit * self.block_size + (len(tail.token_ids) if tail is not None else 0)
        begin = Begin(limit, [], tail=tail)
        for group, window in enumerate(self._windows):
            first = min(limit, first_visible(window, position, self.block_size))
            blocks = [NULL_BLOCK] * first
            for index in range(first, limit):
                block_id = self._cache.block(group, hashes[index])
                if block_id is None:
                    cpu_block = self._cpu_cache.block(group, hashes[index])
                    assert cpu_block is not None, f"block {index} of KV group {group} is not held"
                    begin.loads[group, index] = cpu_block
                blocks.append(NULL_BLOCK if block_id is None else block_id)
            begin.found.append(blocks)
        return begin

    def _holds(self, group: int, value: bytes) -> bool:
        return self._cache.block(group, value) is not None or self._cpu_cache.block(group, value) is not None

    def num_held(self, sequence: Sequence, holds: Holds) -> int:
        """Counts the full blocks that begin the sequence and that all KV groups hold by another measure; not up to the
        last known token."""
        return self._num_found(block_hashes(sequence, self.block_size), self._limit(sequence), holds)

    def _num_found(self, hashes: list[bytes], limit: int, holds: Holds) -> int:
        for group, window in enumerate(self._windows):
            if not window:
                limit = next((i for i in range(limit) if not holds(group, hashes[i])), limit)
        return self._agree_on_windows(hashes, limit, holds)

    def _agree_on_windows(self, hashes: list[bytes], limit: int, holds: Holds) -> int:
        """Returns the most blocks, `limit` at most, for which every windowed group holds those that its window reaches
        from there."""
        agreed = False
        while not agreed:
            agreed = True
            for group in self._windowed:
                longest = self._longest_in_window(group, hashes, limit, holds)
                agreed, limit = agreed and longest == limit, longest
        return limit

    def _longest_in_window(self, group: int, hashes: list[bytes], limit: int, holds: Holds) -> int:
        end = index = limit
        while index > self._first_visible(self._windows[group], end):
            index -= 1
            if not holds(group, hashes[index]):
                end = index
        return end

    def _find_tail(self, sequence: Sequence, num_blocks: int) -> Tail | None:
        """Finds the longest partly filled pinned block that goes on with the sequence's tokens after `num_blocks`."""
        if not self.tails or sequence.cache_use is CacheUse.BYPASSED:
            return None
        start, stop = num_blocks * self.block_size, sequence.num_known - 1
        if sequence.cache_key.salt:
            stop = min(stop, sequence.cache_key.salted_from)
        hashes = block_hashes(sequence, self.block_size)
        parent = hashes[num_blocks - 1] if num_blocks else root_hash(sequence.cache_key)
        tails = [
            tail
            for tail in self.tails.values()
            if tail.parent == parent
            and start + len(tail.token_ids) <= stop
            and tail.token_ids == sequence.known_tokens(start, start + len(tail.token_ids))
        ]
        return max(tails, key=lambda tail: len(tail.token_ids), default=None)

    def _first_visible(self, window: int, num_blocks: int) -> int:
        """Returns the first logical block that the token after `num_blocks` full ones can see."""
        return first_visible(window, num_blocks * self.block_size, self.block_size)
