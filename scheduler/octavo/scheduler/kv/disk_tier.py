"""The third tier of the prefix cache: what device blocks hold is written behind to their worker's disk, beyond that
worker's life, and comes back into CPU blocks, from where it goes on as anything that is there."""

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from itertools import takewhile

from octavo.scheduler.core.sequence import BlockRead, Tier
from octavo.scheduler.kv.block_reads import BlockReads, Fetch
from octavo.scheduler.kv.blocks import CachedBlocks
from octavo.scheduler.kv.prefix_cache import CachedBlock, TierUse
from octavo.wire.steps import BlockContent, DiskMoves, DiskUse, KVDisk, WorkerHello

# Blocks that one step copies for the disk: what is computed in it waits for that.
_MAX_STORED = 64
# Contents that are remembered as being on the disk, and as such that nobody may find there.
_MAX_REMEMBERED = 1 << 16


def disk_pays(hello: WorkerHello) -> bool:
    """Tells whether to read a block's tokens from the worker's disk takes less time than to compute them; that is so
    where the worker has not measured."""
    costs, disk = hello.costs, hello.kv_disk
    if costs is None or disk is None:
        return disk is not None
    read_s = len(hello.kv_groups) * (disk.block_read_s + costs.swap.block_in_s)
    return read_s < hello.block_size * costs.prefill.token_s


class _Recent:
    """Holds contents, those added last if there are too many."""

    def __init__(self) -> None:
        self._contents: OrderedDict[CachedBlock, None] = OrderedDict()

    def __deepcopy__(self, memo: dict[int, object]) -> "_Recent":
        double = _Recent()
        double._contents = self._contents.copy()
        return double

    def __contains__(self, content: CachedBlock) -> bool:
        return content in self._contents

    def add(self, content: CachedBlock) -> None:
        self._contents[content] = None
        self._contents.move_to_end(content)
        if len(self._contents) > _MAX_REMEMBERED:
            self._contents.popitem(last=False)

    def discard(self, content: CachedBlock) -> None:
        self._contents.pop(content, None)

    def clear(self) -> None:
        self._contents.clear()


class DiskTier:
    """Says what plans have the disk of one replica do, and which `reads` they have it begin.

    Stored is what is taken from the device, what was found there again and, with a mirror, all that steps have filled:
    contents that are there for certain alone, and so that no failed step and no distrusted sequence is behind them.
    Writing is nobody's promise, so what is asked for may be missing: `answered` says what came. A read ends with that,
    with the failure of the step that was to begin it, or, for those who wait, when the disk takes too long; its CPU
    blocks are the disk's until it answers.
    """

    def __init__(self, device: CachedBlocks, reads: BlockReads, description: KVDisk) -> None:
        self.mirrors, self._place = description.mirror, description.place
        # What the worker said last.
        self.use = DiskUse(0, 0, 0)
        self._device, self._reads = device, reads
        # Device blocks to be stored, as long as they hold these contents.
        self._to_store: dict[int, CachedBlock] = {}
        self._clears = False
        # Contents that the disk has, as far as is known; and those that a distrusted sequence has left there.
        self._known, self._refused = _Recent(), _Recent()
        # By outstanding step: what it stores, and what is read once it is done; then what is being read.
        self._stored: dict[int, list[CachedBlock]] = {}
        self._to_fetch: list[Fetch] = []
        self._planned: dict[int, list[Fetch]] = {}
        self._under_way: dict[int, list[Fetch]] = {}
        # Totals of blocks.
        self.num_stored = self.num_asked = self.num_found = 0

    @property
    def wants_plan(self) -> bool:
        """Tells whether the disk is to do something that no plan has told it yet."""
        return bool(self._clears or self._to_store or self._to_fetch)

    @property
    def _fetches(self) -> list[Fetch]:
        later = (*self._planned.values(), *self._under_way.values())
        return [*self._to_fetch, *(fetch for fetches in later for fetch in fetches)]

    @property
    def tier(self) -> TierUse:
        """Returns what the disk holds and has done."""
        use, moved = self.use, {Tier.CPU: self.num_found}
        missed = self.num_asked - self.num_found
        return TierUse(Tier.DISK, use.num_blocks, use.capacity, use.num_evicted, moved, missed, self._place)

    # -- write ------------------------------------------------------------------------------------------------------

    def keep(self, block_ids: Iterable[int]) -> None:
        """Has the contents of device blocks stored with the next plan, those that are there for certain then."""
        for block_id in block_ids:
            content = self._device.cache.content(block_id)
            if content is not None and content not in self._known:
                self._to_store[block_id] = content

    def _stores(self) -> list[tuple[int, CachedBlock]]:
        """Returns the blocks to be stored now: first those that are being taken, the ones used last if these are too
        many. The others can wait for a later plan."""
        taken = [(block_id, content) for block_id, content in self._device.evicted if content not in self._known]
        stores = taken[-_MAX_STORED:]
        for block_id in list(self._to_store):
            if len(stores) == _MAX_STORED:
                break
            content, cache = self._to_store[block_id], self._device.cache
            is_held = content not in self._known and cache.content(block_id) == content
            if is_held and cache.confirmed_content(block_id) is None:
                # The step that fills it is outstanding.
                continue
            del self._to_store[block_id]
            if is_held:
                stores.append((block_id, content))
        return stores

    # -- read -------------------------------------------------------------------------------------------------------

    def fetch(self, contents: Ordered[CachedBlock], keep: list[int], *, goes_on: bool) -> list[BlockRead]:
        """Has what a group begins with read, as far as there is room in CPU memory besides the blocks to `keep`;
        returns the reads to wait for. Where it is not known that the first is there, that alone is asked for: most
        often it is missing, and then all are. With `goes_on` it is likely to be there."""
        if any(fetch.read.is_late for fetch in self._fetches):
            return []
        reads, missing = self._reads.under_way(takewhile(lambda content: content not in self._refused, contents))
        if missing and not goes_on and missing[0] not in self._known:
            missing = [] if reads else missing[:1]
        if missing and (fetch := self._reads.begin(missing, keep)):
            self._to_fetch.append(fetch)
            reads.append(fetch.read)
        return reads

    def answered(self, step_id: int, found: list[bool]) -> bool:
        """Books what came of the reads of a step, which is done; from then on it is found in the CPU blocks. Returns
        False, and does nothing, if that was not asked."""
        fetches = self._under_way.get(step_id, [])
        if len(found) != sum(len(fetch.contents) for fetch in fetches) or not fetches:
            return False
        del self._under_way[step_id]
        self.num_asked += len(found)
        self.num_found += sum(found)
        rest = iter(found)
        for fetch in fetches:
            self._end(fetch, [next(rest) for _ in fetch.contents])
        return True

    def _end(self, fetch: Fetch, found: list[bool]) -> None:
        for content, is_found in self._reads.end(fetch, found):
            if is_found:
                self._known.add(content)
            else:
                self._known.discard(content)

    def look(self, now: float) -> None:
        """Lets nobody wait any longer for reads that take too long; those whose step is not done have not begun."""
        for fetches in self._under_way.values():
            for fetch in fetches:
                fetch.read.look(now)

    # -- steps ------------------------------------------------------------------------------------------------------

    def moves(self, step_id: int) -> DiskMoves | None:
        """Returns what step `step_id` has the disk do, now that all its blocks are taken; None for nothing."""
        stores = self._stores()
        if not (self._clears or stores or self._to_fetch):
            return None
        self._stored[step_id] = [content for _, content in stores]
        for _, content in stores:
            self._known.add(content)
        self.num_stored += len(stores)
        fetches, self._to_fetch = self._to_fetch, []
        if fetches:
            self._planned[step_id] = fetches
        clears, self._clears = self._clears, False
        return DiskMoves(
            clears,
            [_named(content, block_id) for block_id, content in stores],
            [_named(content, cpu_block) for fetch in fetches for content, cpu_block in fetch.contents],
        )

    def step_answered(self, step_id: int, *, valid: bool) -> None:
        """Notes whether the step is done, and so has stored what it was to, and begun to read."""
        stored, fetches = self._stored.pop(step_id, []), self._planned.pop(step_id, [])
        if valid:
            if fetches:
                self._under_way[step_id] = fetches
            return
        for content in stored:
            self._known.discard(content)
        for fetch in fetches:
            self._end(fetch, [False] * len(fetch.contents))

    # -- forget -----------------------------------------------------------------------------------------------------

    def forget(self, contents: list[CachedBlock]) -> None:
        """Lets nobody find these contents here any more."""
        for content in contents:
            self._refused.add(content)

    def reset(self) -> None:
        """Forgets everything, on the disk too: it cannot tell what is behind a salt."""
        self._known.clear()
        self._refused.clear()
        self._clears = True


def _named(content: CachedBlock, block_id: int) -> BlockContent:
    return BlockContent(content.value, content.kv_group, block_id)
