"""The store of KV blocks on a disk: reads and writes them by name in threads of its own, and never makes its caller
wait for a disk.

What is on the disk is worth a computation saved, and nothing else: a block that is not found, or not whole, is computed
again. So nothing is synchronised, a full queue drops what comes, and each failure of the disk ends in "not found" or
"not kept".

The oldest segments make way for new ones, whole. What is read from the oldest quarter of the store, or written while it
lies there, is written once more, among the youngest: blocks in use stay, for about a fifth more writes in conversations
that come back (`octavo.bench.parts.kv_store`), and no process needs to know what others have read.
"""

import contextlib
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Final, Self

from octavo.runtime.telemetry import optional
from octavo.worker.kv_store.identity import NAME_BYTES, StoreIdentity
from octavo.worker.kv_store.index import BlockIndex, Segment
from octavo.worker.kv_store.loan import Loan, Parts, Payload, copied
from octavo.worker.kv_store.room import KVStoreError, all_segments, locked, prepare, remove, too_old
from octavo.worker.kv_store.segment import SegmentLayout, SegmentWriter, opened, read_block, segment_files

_log = logging.getLogger(__name__)

_SEGMENT_BYTES: Final = 64 << 20
# What makes way at once is a small part of the whole.
_FEWEST_SEGMENTS: Final = 16


@dataclass(frozen=True)
class StoreLimits:
    """Limits what the store takes at once: `reads` tickets in its queue, and for writing blocks of `write_bytes` in
    all, but two at least, and as many copies. After a failed write it writes nothing for `rest_s` seconds; it looks for
    segments of others `refresh_s` seconds after the last time at the earliest."""

    reads: int = 256
    readers: int = 2
    write_bytes: int = 64 << 20
    rest_s: float = 30.0
    refresh_s: float = 0.05


_LIMITS: Final = StoreLimits()


@dataclass(eq=False)
class Ticket:
    """A read of some blocks. When `poll` returns it, `found` says of each block whether it lies in its buffer; until
    then the buffers are the store's, and what is in the others is nothing."""

    names: Sequence[bytes]
    buffers: Sequence[memoryview]
    found: list[bool] = field(default_factory=list)


@dataclass(frozen=True)
class StoreStats:
    """Holds what the store knows of its identity's blocks, and what it has counted since it was opened.

    Reads end as `found`, `missed`, `damaged` (the checksum was wrong, and the block is forgotten), `failed` (the disk
    said so) or `refused` (the queue was full). Writes end as `written`, `kept` (it was there), `dropped` (the queue was
    full), `unsound` (not worth keeping), `resting` (soon after a failure), `forgotten` (by a `clear`) or `unwritten`
    (the disk said so). `renewed` counts reads of which the block was to be written once more, `evicted` the blocks in
    segments that this process removed to make room. `capacity_blocks` would fit if no other identity used the
    directory.
    """

    blocks: int
    capacity_blocks: int
    segments: int
    unreadable_segments: int
    counts: dict[str, int]


def _always(_: Parts) -> bool:
    return True


class KVStore:
    """Keeps blocks of one identity below `directory`, which other processes and identities share; all together take
    `capacity_bytes` there. Any thread may call any method, until `close`."""

    def __init__(
        self,
        directory: Path,
        capacity_bytes: int,
        identity: StoreIdentity,
        limits: StoreLimits = _LIMITS,
    ) -> None:
        """Makes the directory if need be and reads the tables that are there. Raises `KVStoreError` if it cannot be
        made or read, is open to others, or is to hold less than 16 blocks."""
        layout = SegmentLayout.within(identity, min(_SEGMENT_BYTES, capacity_bytes // _FEWEST_SEGMENTS))
        if layout.num_bytes * _FEWEST_SEGMENTS > capacity_bytes:
            raise KVStoreError(
                f"{capacity_bytes:,} bytes are too few for KV blocks of {identity.block_bytes:,} bytes; give the"
                f" directory {layout.num_bytes * _FEWEST_SEGMENTS:,} at least"
            )
        prepare(directory)
        self._directory = directory
        self._capacity_bytes = capacity_bytes
        self._layout = layout
        self._limits = limits
        self._index = BlockIndex(directory / identity.directory_name, identity)
        try:
            self._index.refresh()
            self._index.set_young(all_segments(directory), capacity_bytes)
        except OSError as error:
            raise KVStoreError(f"cannot read the KV blocks in {directory}: {error}") from error
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._is_closing = False
        # Reads.
        self._reads: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._num_reading = 0
        self._refreshing = threading.Lock()
        self._refresh_at = time.monotonic() + limits.refresh_s
        self._is_refresh_queued = False
        self._done: deque[Ticket] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Writes. A copy of a block waits in one of a few buffers, which are made when they are first needed.
        self._writes: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._queued: set[bytes] = set()
        # The calls of `clear`, and how many of them the disk has followed: until all, nothing is found or written.
        self._clears = self._cleared = 0
        self._idle = threading.Condition(self._lock)
        self._spare: list[bytearray] = []
        self._most_queued = self._num_unmade = max(2, limits.write_bytes // identity.block_bytes)
        self._segment: Segment | None = None
        self._writer: SegmentWriter | None = None
        self._rests_until = -1.0
        self._threads = [
            threading.Thread(target=run, name=f"kv-store-{what}", daemon=True)
            for what, run in [*[("read", self._run_reads)] * limits.readers, ("write", self._run_writes)]
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what the caller does --------------------------------------------------------------------------------------

    def __contains__(self, name: bytes) -> bool:
        """Tells whether the block is known to be there. If not, segments of others are looked for, soon."""
        if name in self._index:
            return True
        self._refresh_soon()
        return False

    def read(self, names: Sequence[bytes], buffers: Sequence[Payload]) -> Ticket:
        """Begins to read each of these blocks into its buffer, of which `poll` tells when it is done."""
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        if len(names) != len(views) or any(view.readonly or view.nbytes != self._block_bytes for view in views):
            raise ValueError(f"{len(names)} names take as many writable buffers of {self._block_bytes} bytes")
        ticket = Ticket(names, views)
        with self._lock:
            if is_refused := self._is_closing or self._num_reading >= self._limits.reads:
                self._counts["refused"] += len(names)
            else:
                self._num_reading += 1
        if is_refused:
            ticket.found = [False] * len(names)
            self._tell(ticket)
        else:
            self._reads.put(lambda: self._serve(ticket))
        return ticket

    def write(self, name: bytes, payload: Payload) -> bool:
        """Copies the payload, to be written soon, and returns whether the block is there or will be, unless the disk
        fails; False if too much waits for the disk, or it has just failed."""
        return self._keep(name, payload, None)

    def lend(self, blocks: Iterable[tuple[bytes, Parts]], is_sound: Callable[[Parts], bool]) -> list[Loan | None]:
        """Has blocks written soon, each from where its parts lie, if they are sound. Returns a loan of each: its parts
        stay as they are until it is over or `take_back` has been called. None stands for one that is there, or will be,
        or is not kept, as with `write`."""
        # What is held to be there another process may have removed.
        self._refresh_soon()
        loans = [self._lent(name, parts, is_sound) for name, parts in blocks]
        if given := [loan for loan in loans if isinstance(loan, Loan)]:
            self._writes.put(lambda: self._run_writes_of(given))
        return [loan if isinstance(loan, Loan) else None for loan in loans]

    def take_back(self, loan: Loan) -> None:
        """Lets the owner change the parts of a loan from now on, whatever the disk does. What was to be written is
        copied, if it has not been, and there is room."""
        with self._lock:
            if loan.is_over or loan.parts is None or loan.buffer is not None:
                return
            parts, buffer = loan.parts, self._take_buffer()
        copy = None if buffer is None else copied(parts, buffer)
        with self._lock:
            if not loan.is_over:
                loan.parts, loan.buffer = copy, buffer
            elif buffer is not None:
                self._spare.append(buffer)

    def _keep(self, name: bytes, payload: Payload, read_at: int | None) -> bool:
        """Keeps a payload as `write` does, unless it was read here after `read_at` clears and there was one since."""
        self._refresh_soon()
        loan = self._lent(name, [memoryview(payload).cast("B")], _always, read_at, copies=True)
        if isinstance(loan, Loan):
            self._writes.put(lambda: self._run_writes_of([loan]))
            return True
        return loan

    def _lent(
        self,
        name: bytes,
        parts: Parts,
        is_sound: Callable[[Parts], bool],
        read_at: int | None = None,
        *,
        copies: bool = False,
    ) -> Loan | bool:
        """Returns a loan that is to be queued, of a copy if it `copies`; or whether the block is there already."""
        size = sum(part.nbytes for part in parts)
        if len(name) != NAME_BYTES or size != self._block_bytes:
            raise ValueError(
                f"a block is {NAME_BYTES} bytes of name and {self._block_bytes} of payload, not {len(name)} and {size}"
            )
        is_young = self._is_cleared and self._index.has_young(name)
        with self._lock:
            if is_young or name in self._queued:
                self._counts["kept"] += 1
                return True
            if read_at not in (None, self._clears):
                return False
            if self._is_closing or time.monotonic() < self._rests_until:
                self._counts["resting"] += 1
                return False
            buffer = None
            if len(self._queued) >= self._most_queued or (copies and (buffer := self._take_buffer()) is None):
                self._counts["dropped"] += 1
                return False
            self._queued.add(name)
            loan = Loan(name, parts, is_sound, self._clears, buffer)
        if buffer is not None:
            loan.parts = copied(parts, buffer)
        return loan

    def _take_buffer(self) -> bytearray | None:
        """Returns a buffer of a block; None if all are in use. The caller holds the lock."""
        if self._spare:
            return self._spare.pop()
        if not self._num_unmade:
            return None
        self._num_unmade -= 1
        return bytearray(self._block_bytes)

    def clear(self) -> None:
        """Forgets all blocks of this identity, at once, and has their segments removed, soon: for other processes too.
        What was to be written is not. Where the disk fails, nothing is found or written until it has been done."""
        with self._lock:
            if self._is_closing:
                return
            self._clears += 1
            self._queued.clear()
        self._writes.put(self._clear)

    def poll(self) -> list[Ticket]:
        """Returns the reads that have ended since the last call."""
        with self._lock, contextlib.suppress(BlockingIOError):
            if self._wake >= 0:
                os.eventfd_read(self._wake)
        done = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def fileno(self) -> int:
        """Returns a descriptor that is readable while `poll` has something to return."""
        return self._wake

    def flush(self, timeout_s: float) -> bool:
        """Waits until nothing waits to be written, and returns whether that is so."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._queued and self._is_cleared, timeout_s)

    def stats(self) -> StoreStats:
        with self._lock:
            counts = dict(self._counts)
        index = self._index
        capacity_blocks = self._capacity_bytes // self._layout.num_bytes * self._layout.slots
        return StoreStats(len(index), capacity_blocks, index.num_segments, index.num_unreadable, counts)

    def close(self, timeout_s: float = 2.0) -> bool:
        """Writes what waits to be written and ends the threads; drops reads. Returns whether that was done in time.

        If not, a disk hangs: the threads end when it answers or the process does, and until then the buffers of reads
        that `poll` has not returned are not to be used again.
        """
        deadline = time.monotonic() + timeout_s
        self.flush(timeout_s)
        with self._lock:
            if self._is_closing:
                return not any(thread.is_alive() for thread in self._threads)
            self._is_closing = True
        self._writes.put(None)
        for _ in range(self._limits.readers):
            self._reads.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        # Nobody may be told by a descriptor that is by then another file's.
        with self._lock:
            os.close(self._wake)
            self._wake = -1
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def _block_bytes(self) -> int:
        return self._layout.identity.block_bytes

    @property
    def _is_cleared(self) -> bool:
        return self._cleared == self._clears

    def _count(self, what: str, count: int = 1) -> None:
        with self._lock:
            self._counts[what] += count

    # -- reads, in threads of their own ----------------------------------------------------------------------------

    def _run_reads(self) -> None:
        while (job := self._reads.get()) is not None:
            if not self._is_closing:
                job()

    def _serve(self, ticket: Ticket) -> None:
        if any(name not in self._index for name in ticket.names):
            self._refresh()
        ticket.found = [self._read(*each) for each in zip(ticket.names, ticket.buffers, strict=True)]
        with self._lock:
            self._num_reading -= 1
        self._tell(ticket)

    def _tell(self, ticket: Ticket) -> None:
        self._done.append(ticket)
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def _read(self, name: bytes, buffer: memoryview) -> bool:
        clears = self._clears
        found = self._index.find(name) if self._is_cleared else None
        if found is None:
            self._count("missed")
            return False
        segment, slot = found
        try:
            with opened(segment.path) as descriptor:
                is_whole = read_block(descriptor, segment.layout, slot, name, buffer)
        except FileNotFoundError:
            # Another process has made room.
            self._index.drop(segment.path)
            self._count("missed")
            return False
        except Exception as error:
            self._index.forget(name, segment)
            self._failed("failed", optional.KV_DISK_READS, error, "blocks that cannot be read are computed again")
            return False
        if not is_whole:
            self._index.forget(name, segment)
            what = f"{segment.path} holds another block in slot {slot} than its table says, or a damaged one"
            self._failed("damaged", optional.KV_DISK_READS, what, "it is computed again")
            return False
        self._count("found")
        if not self._index.has_young(name):
            self._count("renewed", self._keep(name, buffer, clears))
        return True

    def _refresh_soon(self) -> None:
        """Has a thread look for what other processes have done, if it is time."""
        with self._lock:
            if self._is_refresh_queued or time.monotonic() < self._refresh_at:
                return
            self._is_refresh_queued = True
        self._reads.put(self._refresh)

    def _refresh(self) -> None:
        with self._refreshing:
            self._is_refresh_queued = False
            if time.monotonic() < self._refresh_at:
                return
            try:
                self._index.refresh()
                self._index.set_young(all_segments(self._directory), self._capacity_bytes)
            except Exception as error:
                self._failed("failed", optional.KV_DISK_READS, error, "blocks that other processes wrote are not found")
            self._refresh_at = time.monotonic() + self._limits.refresh_s

    def _failed(self, count: str, what: str, error: object, consequence: str) -> None:
        self._count(count)
        self._report(what, error, consequence)

    def _report(self, what: str, error: object, consequence: str) -> None:
        with self._lock:
            is_news = optional.is_first_failure(what)
        if is_news:
            _log.error("%s: %s; %s", what.replace("_", " "), error, consequence)

    # -- writes, in a thread of their own --------------------------------------------------------------------------

    def _run_writes(self) -> None:
        # Whoever computes is not to be interrupted for this.
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        while (job := self._writes.get()) is not None:
            job()
        self._end_segment()

    def _run_writes_of(self, loans: list[Loan]) -> None:
        for loan in loans:
            self._run_write(loan)

    def _run_write(self, loan: Loan) -> None:
        is_forgotten = loan.clears < self._clears
        if is_forgotten:
            self._count("forgotten")
        elif time.monotonic() < self._rests_until:
            self._count("resting")
        else:
            if not self._is_cleared:
                self._clear()
            if self._is_cleared:
                self._count(self._write(loan))
        with self._idle:
            loan.is_over = True
            if loan.clears == self._clears:
                self._queued.discard(loan.name)
            if loan.buffer is not None:
                self._spare.append(loan.buffer)
            self._idle.notify_all()

    def _clear(self) -> None:
        clears = self._clears
        self._end_segment()
        try:
            with locked(self._directory), self._refreshing:
                for file in segment_files(self._directory / self._layout.identity.directory_name):
                    remove(file)
                    self._index.drop(file.path)
        except Exception as error:
            self._rests_until = time.monotonic() + self._limits.rest_s
            consequence = "what was to be forgotten is not found, and none is written until it can be removed"
            self._failed("unwritten", optional.KV_DISK_WRITES, error, consequence)
            return
        with self._idle:
            self._cleared = clears
            self._idle.notify_all()

    def _write(self, loan: Loan) -> str:
        """Writes what is lent, and returns how that ended."""
        while (parts := loan.parts) is not None:
            is_sound = loan.is_sound(parts)
            # What is known of bytes that their owner has back by now is worth nothing.
            if not is_sound and loan.parts is parts:
                return "unsound"
            if is_sound and (end := self._append(loan, parts)):
                return end
        return "dropped"

    def _append(self, loan: Loan, parts: Parts) -> str:
        """Returns how it ended; nothing if these parts are not those lent any more."""
        try:
            if self._writer is None or self._segment is None or not self._writer.is_writable:
                self._end_segment()
                self._writer, self._segment = self._begin_segment()
            slot = self._writer.append(loan.name, parts, lambda: loan.parts is parts)
        except Exception as error:
            self._rests_until = time.monotonic() + self._limits.rest_s
            self._end_segment()
            consequence = f"blocks there are still read, and for {self._limits.rest_s:g} s none is written"
            self._report(optional.KV_DISK_WRITES, error, consequence)
            return "unwritten"
        optional.worked(optional.KV_DISK_WRITES)
        if slot is None:
            return ""
        self._index.add(self._segment, slot, [loan.name])
        return "written"

    def _begin_segment(self) -> tuple[SegmentWriter, Segment]:
        """Makes room for a segment, and the segment."""
        prepare(self._directory)
        with locked(self._directory):
            files = all_segments(self._directory)
            old = too_old(files, self._layout.num_bytes, self._capacity_bytes)
            for file in old:
                # Before it is gone: a read or a refresh that does not find it drops its blocks too, and counts none.
                num_dropped = self._index.drop(file.path)
                remove(file)
                self._count("evicted", num_dropped)
            left = files[len(old) :]
            self._index.set_young(left, self._capacity_bytes)
            age = left[-1].age + 1 if left else 0
            place = self._directory / self._layout.identity.directory_name
            writer = SegmentWriter(place, age, self._layout)
        return writer, self._index.add_segment(writer)

    def _end_segment(self) -> None:
        writer, self._writer, self._segment = self._writer, None, None
        if writer is not None:
            writer.close()
