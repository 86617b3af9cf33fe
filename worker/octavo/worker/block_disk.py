"""Carries out what plans have a worker's disk do: it names blocks, lends them to be written, and reads them by way of
memory of its own.

What is to be written is read where it lies, in a device block, sometime: a step that will write to that block takes it
back first. What a disk reads arrives whenever it does, and the CPU blocks that it is for may have another life by then.
So reads go into private buffers, a few of them, and what is in them goes to a CPU block only while that still waits for
it.
"""

import logging
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from octavo.wire.steps import BlockContent, DiskUse, KVDisk, StepPlan
from octavo.worker.kv_store.identity import StoreIdentity, block_name
from octavo.worker.kv_store.loan import Loan, Parts, Payload
from octavo.worker.kv_store.store import KVStore, StoreStats, Ticket
from octavo.worker.runner import BlockContents

logger = logging.getLogger(__name__)

# The bytes, and the blocks at most, of a piece, which is read at once; and the pieces under way. On a CPU nobody looks
# at what was read before a step is done: so much is waiting then that many requests can start at once.
_PIECE_BYTES, _PIECE_BLOCKS, _PIECES = 4 << 20, 256, 24
_LONGEST_PLACE = 4096
_MEASURED_BLOCKS, _MEASURE_TIMEOUT_S = 8, 2.0


class BlockStore(Protocol):
    """Keeps blocks by their names, and waits for no disk (`octavo.worker.kv_store.store.KVStore`)."""

    def lend(self, blocks: Iterable[tuple[bytes, Parts]], is_sound: Callable[[Parts], bool]) -> list[Loan | None]: ...

    def take_back(self, loan: Loan) -> None: ...

    def read(self, names: Sequence[bytes], buffers: Sequence[Payload]) -> Ticket: ...

    def poll(self) -> list[Ticket]: ...

    def fileno(self) -> int: ...

    def clear(self) -> None: ...

    def stats(self) -> StoreStats: ...


@dataclass(eq=False)
class _Fetch:
    """What one step fetches: the next of its `contents` to read, and how many are not `found` or missed yet. Until it
    `may_fill`, what has `arrived` waits in its buffers."""

    step_id: int
    contents: Sequence[BlockContent]
    found: list[bool] = field(init=False)
    next: int = 0
    is_dropped: bool = False
    may_fill: bool = False
    arrived: list[tuple["_Piece", list[bool]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.found = [False] * len(self.contents)
        self.num_open = len(self.contents)


@dataclass(frozen=True)
class _Piece:
    """A part of a fetch that is being read, from its content `first` on."""

    fetch: _Fetch
    first: int
    buffers: list[bytearray]


class BlockDisk:
    """Stores and fetches blocks in `store`, and calls `fill` with a CPU block and what it is to hold."""

    def __init__(
        self, store: BlockStore, description: KVDisk, block_bytes: int, fill: Callable[[int, Payload], None]
    ) -> None:
        self.description = description
        self._store = store
        self._fill = fill
        # What may still be read of device blocks.
        self._lent: dict[int, Loan] = {}
        self._fetches: deque[_Fetch] = deque()
        # By step that is not done, what may fill no block yet; and the steps of which all has been read.
        self._early: dict[int, _Fetch] = {}
        self._done: list[_Fetch] = []
        self._under_way: dict[Ticket, _Piece] = {}
        size = max(1, min(_PIECE_BYTES // block_bytes, _PIECE_BLOCKS))
        self._spare = [[bytearray(block_bytes) for _ in range(size)] for _ in range(_PIECES)]

    def fileno(self) -> int:
        """Returns a descriptor that is readable while `fetched` has something to do."""
        return self._store.fileno()

    def stats(self) -> StoreStats:
        return self._store.stats()

    def use(self) -> DiskUse:
        """Returns what the scheduler is told of the disk."""
        stats = self._store.stats()
        return DiskUse(stats.blocks, stats.capacity_blocks, stats.counts.get("evicted", 0))

    def clear(self) -> None:
        """Forgets all that is kept."""
        self._store.clear()

    def store(self, contents: Sequence[BlockContent], blocks: BlockContents) -> None:
        """Keeps these blocks, of which there may be fewer, if they are sound and the disk keeps up. What is read where
        it lies must stay until `take_back` has named it."""
        names = (block_name(content.value, content.kv_group) for content in contents)
        loans = self._store.lend(zip(names, blocks.blocks(), strict=False), blocks.is_sound)
        if blocks.here:
            self._lent = {block_id: loan for block_id, loan in self._lent.items() if not loan.is_over}
            lent = zip(contents, loans, strict=False)
            self._lent |= {content.block_id: loan for content, loan in lent if loan is not None}

    @property
    def lends(self) -> bool:
        """Tells whether anything may still be read of device blocks."""
        return bool(self._lent)

    def take_back(self, block_ids: Iterable[int]) -> None:
        """Lets these device blocks be written to from now on."""
        for block_id in block_ids:
            if loan := self._lent.pop(block_id, None):
                self._store.take_back(loan)

    def fetch(self, step_id: int, contents: Sequence[BlockContent]) -> None:
        """Begins to read what a step fetches, which may be under way; `fetched` tells of it once, after `step_done`."""
        self._early[step_id] = _Fetch(step_id, contents)
        self._fetches.append(self._early[step_id])
        self._read_on()

    def step_done(self, step_id: int) -> None:
        """Lets what a step fetches fill CPU blocks: nothing that came before uses them any more."""
        if fetch := self._early.pop(step_id, None):
            fetch.may_fill = True
            for piece, found in fetch.arrived:
                self._take(piece, found)
            self._read_on()

    def step_failed(self, step_id: int) -> None:
        """Drops what a step fetches: nothing of it reaches a CPU block."""
        if fetch := self._early.pop(step_id, None):
            self._drop(fetch)
            self._fetches = deque(other for other in self._fetches if other is not fetch)
            self._read_on()

    def fetched(self) -> list[tuple[int, list[bool]]]:
        """Fills CPU blocks with what has been read, and returns the steps of which all has, with what was found."""
        for ticket in self._store.poll():
            piece = self._under_way.pop(ticket)
            if piece.fetch.may_fill or piece.fetch.is_dropped:
                self._take(piece, ticket.found)
            else:
                piece.fetch.arrived.append((piece, ticket.found))
        self._read_on()
        done, self._done = self._done, []
        return [(fetch.step_id, fetch.found) for fetch in done]

    def forget(self) -> None:
        """Drops all that is being fetched: nothing of it reaches a CPU block."""
        self._fetches.clear()
        self._done.clear()
        for fetch in self._early.values():
            self._drop(fetch)
        self._early.clear()
        for piece in self._under_way.values():
            piece.fetch.is_dropped = True

    def _drop(self, fetch: _Fetch) -> None:
        fetch.is_dropped = True
        self._spare += [piece.buffers for piece, _ in fetch.arrived]

    def _take(self, piece: _Piece, found: list[bool]) -> None:
        """Fills CPU blocks with what is in buffers, unless it has been dropped, and gives these back."""
        self._spare.append(piece.buffers)
        fetch = piece.fetch
        if fetch.is_dropped:
            return
        for index, (is_found, buffer) in enumerate(zip(found, piece.buffers, strict=False), piece.first):
            if is_found:
                self._fill(fetch.contents[index].block_id, buffer)
                fetch.found[index] = True
        fetch.num_open -= len(found)
        if not fetch.num_open:
            self._done.append(fetch)

    def _read_on(self) -> None:
        while self._fetches and self._spare:
            fetch, buffers = self._fetches[0], self._spare.pop()
            contents = fetch.contents[fetch.next : fetch.next + len(buffers)]
            names = [block_name(content.value, content.kv_group) for content in contents]
            ticket = self._store.read(names, buffers[: len(names)])
            self._under_way[ticket] = _Piece(fetch, fetch.next, buffers)
            fetch.next += len(names)
            if fetch.next == len(fetch.contents):
                self._fetches.popleft()


def overwritten(plan: StepPlan) -> Iterator[int]:
    """Yields the device blocks that a plan gives to somebody, and with that all to which it or a later one writes: what
    has been stored is full, so nobody who has had it until now writes to it."""
    for item in plan.work:
        for block_ids in item.new_block_ids:
            yield from block_ids
    for move in (*plan.moves.swap_in, *plan.moves.copy):
        yield move.target


@contextmanager
def opened_disk(
    directory: Path,
    capacity_bytes: int,
    identity: StoreIdentity,
    fill: Callable[[int, Payload], None],
    *,
    mirror: bool,
    measures: bool,
) -> Iterator[BlockDisk]:
    """Holds a disk open within the block, measured before if it `measures`.

    Raises `octavo.worker.kv_store.room.KVStoreError` if the directory cannot be used.
    """
    with KVStore(directory, capacity_bytes, identity) as store:
        read_s = _measured_read(directory, capacity_bytes, identity) if measures else 0.0
        stats = store.stats()
        logger.info(
            "%s holds %d blocks in %d segments for this model; one is read in %.3g ms",
            *(directory, stats.blocks, stats.segments, 1000 * read_s),
        )
        yield BlockDisk(store, KVDisk(read_s, mirror, _place(directory)), identity.block_bytes, fill)


def _place(directory: Path) -> str:
    """Names the directory among those of other hosts, as far as a message has room and letters for it."""
    return f"{socket.gethostname()}:{os.fsencode(directory.resolve()).decode(errors='replace')}"[:_LONGEST_PLACE]


def _measured_read(directory: Path, capacity_bytes: int, identity: StoreIdentity) -> float:
    """Returns the seconds in which a block is read that was just written, as those of a process that has died are; 0 if
    the disk does not answer in time."""
    names = [block_name(bytes([index]) * 32, 0) for index in range(_MEASURED_BLOCKS)]
    buffers = [bytearray(identity.block_bytes) for _ in names]
    with KVStore(directory, capacity_bytes, replace(identity, layout="measured")) as store:
        for name, buffer in zip(names, buffers, strict=True):
            if not store.write(name, buffer):
                store.flush(_MEASURE_TIMEOUT_S)
                store.write(name, buffer)
        store.flush(_MEASURE_TIMEOUT_S)
        began = time.perf_counter()
        ticket = store.read(names, buffers)
        select.select([store], [], [], _MEASURE_TIMEOUT_S)
        taken, found = time.perf_counter() - began, sum(ticket.found) if ticket in store.poll() else 0
        store.clear()
        store.flush(_MEASURE_TIMEOUT_S)
    if not found:
        logger.warning("reading KV blocks from %s could not be measured", directory)
        return 0.0
    return taken / found
