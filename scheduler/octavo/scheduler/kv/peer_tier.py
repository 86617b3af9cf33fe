"""The prefix caches of other replicas as a tier of one's own: what they hold for certain is copied into CPU blocks
here, from where it goes on as anything that is there."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from octavo.scheduler.core.sequence import BlockRead, Sequence, SequenceGroup
from octavo.scheduler.kv.block_reads import BlockReads, Fetch
from octavo.scheduler.kv.blocks import CachedBlocks
from octavo.scheduler.kv.prefix_cache import CachedBlock, PrefixLookup
from octavo.wire.steps import BlockMove


@dataclass(frozen=True, slots=True, eq=False)
class PeerCopy:
    """Blocks of another replica, CPU blocks if `from_cpu`, that are copied here, as a `fetch`: they are on `loan` there
    for as long."""

    fetch: Fetch
    loan: list[int]
    from_cpu: bool

    @property
    def read(self) -> BlockRead:
        """Returns what groups wait for."""
        return self.fetch.read

    @property
    def moves(self) -> list[BlockMove]:
        """Returns what the worker here copies, each from the other's block to one of its own."""
        contents = self.fetch.contents
        return [BlockMove(source, target) for source, (_, target) in zip(self.loan, contents, strict=True)]


@dataclass(frozen=True, slots=True)
class Missing:
    """Names what a group begins with and another has: contents that no block here holds and nothing brings yet, and
    the runs of tokens, each after a context, that would be computed without them. `reads` bring others of them;
    `keep` are CPU blocks that the group begins with."""

    contents: list[CachedBlock]
    runs: list[tuple[int, int]]
    reads: list[BlockRead]
    keep: list[int]


class PeerTier:
    """Lends blocks of one replica's prefix cache to others, and takes from theirs, as its `reads`.

    Only what is there for certain is given, of the `device` if others can read it (`has_device`), else of `cpu` memory.
    It is on loan until the other worker has answered, so nobody takes its blocks; and it counts there only if it can
    still be found here then. Half of the blocks that are free here are lent at most.
    """

    def __init__(
        self, device: CachedBlocks, cpu: CachedBlocks, lookup: PrefixLookup, reads: BlockReads, *, has_device: bool
    ) -> None:
        self._device, self._cpu, self._lookup, self._reads = device, cpu, lookup, reads
        self._has_device = has_device
        # Blocks on loan, and to how many copies.
        self.lent = Counter[int]()
        self.cpu_lent = Counter[int]()

    # -- take -------------------------------------------------------------------------------------------------------

    def missing(self, group: SequenceGroup, others: "list[PeerTier]") -> "tuple[PeerTier, Missing] | None":
        """Returns which of the others has most of what the group begins with and is not here, and what that is; None if
        none has anything."""
        leaders = group.leaders()
        begins = self._lookup.begins(leaders)
        # What sequences begin with together counts once.
        own = [(each, begin.num_blocks) for each, begin in zip(leaders, begins, strict=True) if begin.leader is None]
        counts = [(other, other._num_more(own)) for other in others]
        source, num_more = max(counts, key=lambda each: sum(each[1]), default=(self, []))
        if not any(num_more):
            return None
        found = list(zip(own, num_more, strict=True))
        contents = [
            content
            for (sequence, num_blocks), more in found
            for content in self._lookup.beyond(sequence, num_blocks, num_blocks + more)
        ]
        reads, contents = self._reads.under_way(dict.fromkeys(contents))
        size = self._lookup.block_size
        runs = [(num_blocks * size, more * size) for (_, num_blocks), more in found if more]
        keep = [cpu_block for begin in begins for cpu_block in begin.loads.values()]
        return source, Missing(contents, runs, reads, keep)

    def num_given(self, sequence: Sequence) -> int:
        """Counts the blocks of a sequence's beginning that are here for certain."""
        return self._lookup.num_held(sequence, self._gives)

    def num_found(self, sequence: Sequence) -> int:
        """Counts the blocks with which a sequence would begin here."""
        return self._lookup.begins([sequence])[0].num_blocks

    def _num_more(self, begun: list[tuple[Sequence, int]]) -> list[int]:
        """Counts the blocks that are here for certain of each sequence, beyond those with which it begins elsewhere."""
        return [max(0, self.num_given(each) - num_blocks) for each, num_blocks in begun]

    def copy(self, missing: Missing, source: "PeerTier", worker_id: str, timeout_s: float) -> Iterator[PeerCopy]:
        """Takes CPU blocks for what is missing, as far as there is room, and has the other replica, that of the worker
        `worker_id`, lend what they are to hold: yields a copy of device blocks, and one of CPU blocks."""
        places = {content: place for content in missing.contents if (place := source._place(content))}
        for from_cpu in (False, True):
            contents = [content for content, (is_in_cpu, _) in places.items() if is_in_cpu is from_cpu]
            given = contents[: source._num_lendable([places[content][1] for content in contents], from_cpu)]
            fetch = self._reads.begin(given, missing.keep, source=worker_id, timeout_s=timeout_s)
            if fetch is not None:
                loan = [places[content][1] for content, _ in fetch.contents]
                source._lend(loan, from_cpu)
                yield PeerCopy(fetch, loan, from_cpu)

    def copied(self, copy: PeerCopy, found: list[bool]) -> int:
        """Books what came of a copy; returns how many blocks can be found here for it."""
        return sum(is_found for _, is_found in self._reads.end(copy.fetch, found))

    # -- give -------------------------------------------------------------------------------------------------------

    def _gives(self, kv_group: int, value: bytes) -> bool:
        return self._block(kv_group, value) is not None

    def _block(self, kv_group: int, value: bytes) -> tuple[bool, int] | None:
        """Returns whether a CPU block holds this content for certain, or one of the device, and the block; None if none
        does."""
        if self._has_device and (block_id := self._device.cache.confirmed_block(kv_group, value)) is not None:
            return False, block_id
        cpu_block = self._cpu.cache.confirmed_block(kv_group, value)
        return (True, cpu_block) if cpu_block is not None else None

    def _place(self, content: CachedBlock) -> tuple[bool, int] | None:
        return self._block(content.kv_group, content.value)

    def _num_lendable(self, block_ids: list[int], from_cpu: bool) -> int:
        """Counts the first of the blocks that may be lent now."""
        pool = (self._cpu if from_cpu else self._device).pool
        num_left = pool.num_free // 2
        for number, block_id in enumerate(block_ids):
            num_left -= pool.ref_count(block_id) == 0
            if num_left < 0:
                return number
        return len(block_ids)

    def _lend(self, block_ids: list[int], from_cpu: bool) -> None:
        (self._cpu if from_cpu else self._device).pool.share(block_ids)
        (self.cpu_lent if from_cpu else self.lent).update(block_ids)

    def take_back(self, copy: PeerCopy) -> list[bool]:
        """Ends a loan: returns which of its blocks still hold, for certain, what they were lent for."""
        blocks = self._cpu if copy.from_cpu else self._device
        lent = self.cpu_lent if copy.from_cpu else self.lent
        contents = zip(copy.loan, copy.fetch.contents, strict=True)
        is_sound = [blocks.cache.confirmed_content(block_id) == content for block_id, (content, _) in contents]
        for block_id in copy.loan:
            lent[block_id] -= 1
            if not lent[block_id]:
                del lent[block_id]
        blocks.release(copy.loan)
        return is_sound
