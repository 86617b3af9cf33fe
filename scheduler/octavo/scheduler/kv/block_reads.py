"""Reads: CPU blocks of one replica into which content is brought from elsewhere, its disk or another replica, who waits
for it, and what of it has come."""

from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from octavo.scheduler.core.sequence import BlockRead
from octavo.scheduler.kv.blocks import CachedBlocks
from octavo.scheduler.kv.prefix_cache import CachedBlock
from octavo.wire.steps import MAX_FETCHED_BLOCKS

# What takes longer is waited for by nobody.
READ_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class Fetch:
    """Holds what is read for one group: contents, each into a CPU block."""

    read: BlockRead
    contents: list[tuple[CachedBlock, int]]


class BlockReads:
    """Holds the reads of one replica. Their blocks are taken until they end; what has come by then is found in the CPU
    blocks from there on."""

    def __init__(self, cpu: CachedBlocks) -> None:
        self._cpu = cpu
        self._open: list[Fetch] = []
        # Who reads a content that may still be found; what is no longer in here reaches nobody.
        self._readers: dict[CachedBlock, BlockRead] = {}
        # CPU blocks that reads have filled and nobody has taken up, with what filled them: the content, and the worker
        # that it was read from; none for a disk.
        self._landed: dict[int, tuple[CachedBlock, str]] = {}

    @property
    def held(self) -> list[int]:
        """Returns the CPU blocks into which something is to be read."""
        return [cpu_block for fetch in self._open for _, cpu_block in fetch.contents]

    def under_way(self, contents: Iterable[CachedBlock]) -> tuple[list[BlockRead], list[CachedBlock]]:
        """Returns the reads that bring some of these contents, and the contents that none does."""
        reads: dict[BlockRead, None] = {}
        missing = []
        for content in contents:
            if (read := self._readers.get(content)) is None:
                missing.append(content)
            elif not read.is_over:
                reads[read] = None
        return [*reads], missing

    def begin(
        self, contents: Ordered[CachedBlock], keep: list[int], *, source: str = "", timeout_s: float = READ_TIMEOUT_S
    ) -> Fetch | None:
        """Takes CPU blocks for contents that nobody reads, besides the blocks to `keep`, half of all at most: for the
        first ones if there is no room for all; None if there is room for none."""
        self._cpu.pool.share(keep)
        room = min(self._cpu.pool.num_free, self._cpu.pool.num_blocks // 2 - len(self.held), MAX_FETCHED_BLOCKS)
        wanted = contents[: max(0, room)]
        cpu_blocks = self._cpu.take(len(wanted))
        self._cpu.release(keep)
        if not wanted:
            return None
        fetch = Fetch(BlockRead(len(wanted), source, timeout_s), list(zip(wanted, cpu_blocks, strict=True)))
        self._open.append(fetch)
        self._readers.update(dict.fromkeys(wanted, fetch.read))
        return fetch

    def end(self, fetch: Fetch, found: list[bool]) -> list[tuple[CachedBlock, bool]]:
        """Ends a read of which so much was found; returns that of each content that is still wanted."""
        wanted = []
        for (content, cpu_block), is_found in zip(fetch.contents, found, strict=True):
            if self._readers.get(content) is not fetch.read:
                continue
            del self._readers[content]
            wanted.append((content, is_found))
            if is_found and self._cpu.cache.insert(content, cpu_block, None):
                self._landed[cpu_block] = content, fetch.read.source
        self._cpu.release(cpu_block for _, cpu_block in fetch.contents)
        self._open.remove(fetch)
        fetch.read.end(is_complete=all(found))
        return wanted

    def source(self, cpu_block: int) -> str | None:
        """Returns the worker from which what this block holds was read, none for a disk, if nobody has begun with it
        since; else None."""
        content, source = self._landed.get(cpu_block, (None, ""))
        return source if content is not None and content == self._cpu.cache.content(cpu_block) else None

    def took(self, cpu_block: int) -> None:
        """Notes that somebody begins with what this block holds."""
        self._landed.pop(cpu_block, None)

    def forget(self, contents: Iterable[CachedBlock]) -> None:
        """Lets what is read of these contents reach nobody."""
        for content in contents:
            self._readers.pop(content, None)

    def reset(self, salt: str | None) -> None:
        """Lets what is read reach nobody, as far as it is behind a salt; for None all."""
        self.forget([content for content in self._readers if salt is None or content.salt == salt])

    def close(self) -> None:
        """Ends all reads: the replica is gone."""
        for fetch in self._open:
            fetch.read.end(is_complete=False)
