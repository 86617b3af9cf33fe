"""The census of a cell's cached blocks: on how many replicas each is held, and what of that others are to be told.

To whoever routes requests a cell is one place, for its scheduler finds the replica that holds a prompt's beginning. So
a block is stored when the first replica holds it, and removed when the last has dropped it.
"""

from octavo.scheduler.kv.prefix_cache import CachedBlock, FilledBlock
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
    """Whatever was told before no longer holds."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class BlockCensus:
    """Counts the replicas that hold a block, told by the prefix caches of all of them, and collects what changes until
    it is taken. What comes and goes in between is not told; nor is a block whose parent is not, for nobody would find
    it, until its parent is."""

    def __init__(self) -> None:
        self._num_holders: dict[CachedBlock, int] = {}
        # What is held and was not told yet.
        self._untold: dict[CachedBlock, FilledBlock] = {}
        # What was told and is held no more, in order; the values mean nothing.
        self._removed: dict[CachedBlock, None] = {}
        self._num_groups = 0
        self._is_cleared = False
        self._has_changed = False

    def joined(self, num_groups: int) -> None:
        """Books a replica that joins, with so many KV groups, and holds nothing yet: where none holds anything, others
        forget what they may have been told before."""
        self._num_groups = max(self._num_groups, num_groups)
        if not self._num_holders:
            self._removed.clear()
            self._is_cleared = self._has_changed = True

    def stored(self, block: FilledBlock) -> None:
        """Books that one more replica holds a block."""
        content = block.content
        count = self._num_holders[content] = self._num_holders.get(content, 0) + 1
        if count == 1:
            self._has_changed = True
            if content in self._removed:
                del self._removed[content]
            else:
                self._untold[content] = block

    def removed(self, content: CachedBlock) -> None:
        """Books that one replica less holds a block; one that no replica holds is ignored."""
        count = self._num_holders.get(content, 0)
        if count > 1:
            self._num_holders[content] = count - 1
        elif count == 1:
            self._has_changed = True
            del self._num_holders[content]
            if self._untold.pop(content, None) is None:
                self._removed[content] = None

    def take(self) -> list[KVEvent]:
        """Returns what has changed since the last call: what is gone first, then what is new, parents before
        children."""
        if not self._has_changed:
            return []
        events: list[KVEvent] = [AllBlocksCleared()] if self._is_cleared else []
        events += _removals(self._removed)
        events += _runs(self._take_untold())
        self._removed = {}
        self._is_cleared = self._has_changed = False
        return events

    def _take_untold(self) -> list[FilledBlock]:
        """Takes the blocks that are to be told now, all but those whose parents are not."""
        told: list[FilledBlock] = []
        count = -1
        # Again where a parent may have come behind its child.
        while self._untold and count < len(told):
            count = len(told)
            for content, block in list(self._untold.items()):
                if block.parent is None or self._is_told(block.parent, content.depth - 1):
                    del self._untold[content]
                    told.append(block)
        return told

    def _is_told(self, value: bytes, depth: int) -> bool:
        """Tells whether a block was told, of whichever KV group: where a window has passed, its own may lack it."""
        contents = (CachedBlock(value, kv_group, depth) for kv_group in range(self._num_groups))
        return any(content in self._num_holders and content not in self._untold for content in contents)


def _removals(contents: dict[CachedBlock, None]) -> list[BlockRemoved]:
    of_group: dict[int, list[int]] = {}
    for content in contents:
        of_group.setdefault(content.kv_group, []).append(short_hash(content.value))
    return [BlockRemoved(kv_group, hashes) for kv_group, hashes in of_group.items()]


def _runs(blocks: list[FilledBlock]) -> list[BlockStored]:
    """Returns an event for each run of blocks that follow one another."""
    runs: list[BlockStored] = []
    # By the KV group and the content of its last block.
    ending_in: dict[tuple[int, bytes | None], BlockStored] = {}
    for block in blocks:
        content = block.content
        run = ending_in.pop((content.kv_group, block.parent), None)
        if run is None:
            parent = None if block.parent is None else short_hash(block.parent)
            run = BlockStored(content.kv_group, block.window, block.adapter, len(block.token_ids), parent, [], [])
            runs.append(run)
        run.hashes.append(short_hash(content.value))
        run.token_ids.extend(block.token_ids)
        ending_in[content.kv_group, content.value] = run
    return runs


def short_hash(value: bytes) -> int:
    """Returns a block's hash as others know it: its last 64 bits."""
    return int.from_bytes(value[-_HASH_BYTES:], "big")
