"""The event log: what happened in the core, kept in memory for followers, written to a file, and replayed to a fresh
core, which must plan the same.

A log is a file of records, each a length in four bytes (big-endian) and that many bytes of msgpack. It holds prompts
and answers as token ids.
"""

import asyncio
import logging
import os
import struct
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Self

import msgspec

from octavo.runtime.telemetry.optional import EVENT_LOG, failed
from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.core.events import Effect, Event, SendToReplica
from octavo.scheduler.core.scheduler import Scheduler
from octavo.wire.base import MAX_MESSAGE_BYTES, SCHEMA_VERSION, Value
from octavo.wire.steps import StepPlan


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A record in msgpack, its number, and how many wanted records before it are no longer kept."""

    number: int
    record: bytes
    missed: int


# What Python takes for the object of a record, beside its content.
_BYTES_OF_A_RECORD: Final = sys.getsizeof(b"")


class StepFeed:
    """Keeps records in memory, numbered from 1 on: as many of the newest as `max_bytes` hold, and always the last.

    A reader waits for records; nothing waits for a reader.
    """

    def __init__(self, max_bytes: int = 16 << 20) -> None:
        self._max_bytes = max_bytes
        self._records: deque[bytes] = deque()
        self._size = 0
        # The number of the newest record; 0 before the first.
        self.last = 0
        self._appended, self._is_awaited = asyncio.Event(), False

    @property
    def first(self) -> int:
        """Returns the number of the oldest record that is kept, or of the first to come."""
        return self.last - len(self._records) + 1

    def append(self, record: bytes) -> None:
        """Adds a record, and lets old ones go."""
        self._records.append(record)
        self.last += 1
        self._size += _BYTES_OF_A_RECORD + len(record)
        while self._size > self._max_bytes and len(self._records) > 1:
            self._size -= _BYTES_OF_A_RECORD + len(self._records.popleft())
        if self._is_awaited:
            self._is_awaited = False
            self._appended.set()

    async def follow(self, start: int) -> AsyncGenerator[LogEntry, None]:
        """Yields records from number `start` on (0: from the oldest that is kept), those to come too, without end."""
        number = start or self.first
        while True:
            while number > self.last:
                self._appended.clear()
                self._is_awaited = True
                await self._appended.wait()
            missed = max(0, self.first - number)
            number += missed
            yield LogEntry(number, self._records[number - self.first], missed)
            number += 1


# -- records ----------------------------------------------------------------------------------------------------------


_LENGTH: Final = struct.Struct(">I")


class Began(Value, frozen=True, tag=True):
    """The first record holds what made the core."""

    schema_version: int
    epoch: int
    config: SchedulerConfig


class Handled(Value, frozen=True, tag=True):
    """The core took an event in."""

    now: float
    event: Event


class Scheduled(Value, frozen=True, tag=True):
    """The core was asked for plans."""

    now: float


class Planned(Value, frozen=True, tag=True):
    """The core's plan left for its replica."""

    plan: StepPlan


Record = Began | Handled | Scheduled | Planned
Recorder = Callable[[Record], None]
# Takes a record in msgpack.
Sink = Callable[[bytes], None]

_encode: Final[Callable[[Record], bytes]] = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Record).decode


class EventLogError(Exception):
    """A file is no event log of this version."""


def recorder(*sinks: Sink) -> Recorder:
    """Makes a recorder that gives every record to all of `sinks`."""

    def write(record: Record) -> None:
        content = _encode(record)
        for sink in sinks:
            sink(content)

    return write


def log_file(file: BinaryIO) -> Sink:
    """Makes a sink that appends records to `file`."""

    def write(content: bytes) -> None:
        file.write(_LENGTH.pack(len(content)) + content)

    return write


def read_records(file: BinaryIO) -> Iterator[Record]:
    """Yields the records of a log, up to one that a killed process left unfinished. Raises `EventLogError` for anything
    that is no record of this version."""
    while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
        (length,) = _LENGTH.unpack(head)
        if length > MAX_MESSAGE_BYTES:
            raise EventLogError(f"a record of {length} bytes; this is no event log")
        content = file.read(length)
        if len(content) < length:
            return
        try:
            yield _decode(content)
        except msgspec.MsgspecError as error:
            raise EventLogError(f"this is no event log of this version: {error}") from error


@dataclass(frozen=True)
class Replay:
    """Holds the result of a replay. `difference`: the first plan that differed, as recorded and as made now (None: not
    made)."""

    events: int
    plans: int
    difference: tuple[StepPlan, StepPlan | None] | None


def fresh_core(records: Iterator[Record]) -> Scheduler:
    """Makes a core as that of the log was when the log began; takes the first record. Raises `EventLogError` if that is
    not one of this version's."""
    began = next(records, None)
    if not isinstance(began, Began):
        raise EventLogError("the log does not begin with what made its core")
    if began.schema_version != SCHEMA_VERSION:
        raise EventLogError(f"the log has message schema {began.schema_version}, this version {SCHEMA_VERSION}")
    return Scheduler(began.config, began.epoch)


def replay(records: Iterator[Record]) -> Replay:
    """Feeds a log to a fresh core. Raises `EventLogError` if it does not begin as one of this version's."""
    core = fresh_core(records)
    made: deque[StepPlan] = deque()
    events = plans = 0
    for record in records:
        match record:
            case Handled(now, event):
                events += 1
                made.extend(_plans(core.handle(event, now)))
            case Scheduled(now):
                made.extend(_plans(core.schedule(now)))
            case Planned(plan):
                now_made = made.popleft() if made else None
                if now_made != plan:
                    return Replay(events, plans, (plan, now_made))
                plans += 1
    return Replay(events, plans, None)


def _plans(effects: list[Effect]) -> Iterator[StepPlan]:
    for effect in effects:
        if isinstance(effect, SendToReplica) and isinstance(effect.message, StepPlan):
            yield effect.message


# -- a file that may fail: no request waits for it or ends with it ----------------------------------------------------


_log = logging.getLogger(__name__)

_CONSEQUENCE = "what comes from now on is not recorded until the scheduler's next start, which begins a new log"


class LogWriter:
    """Writes records to a new file until that fails. As nothing after a gap could be replayed, the log then ends: the
    file is whole but for its last record."""

    def __init__(self, path: Path, epoch: int) -> None:
        self._file: BinaryIO | None = None
        try:
            self._file = _new_file(path, epoch)
        except OSError as error:
            failed(EVENT_LOG, error, _CONSEQUENCE)
            return
        self._append = log_file(self._file)

    def write(self, content: bytes) -> None:
        """Appends one record, while the log goes on."""
        if self._file is None:
            return
        try:
            self._append(content)
        except OSError as error:
            failed(EVENT_LOG, error, _CONSEQUENCE)
            self._end()

    def close(self) -> None:
        """Ends the log, with everything written to the file as far as that is possible."""
        if self._file is None:
            return
        try:
            self._file.flush()
        except OSError as error:
            failed(EVENT_LOG, error, "the last records are missing")
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end(self) -> None:
        file, self._file = self._file, None
        # What is still buffered cannot be written, and the file is closed all the same.
        if file is not None:
            with suppress(OSError):
                file.close()


def _new_file(path: Path, epoch: int) -> BinaryIO:
    """Creates a file that only its owner may read. If there is one of this name, an earlier start's, that stays and the
    new file's name gets the epoch added. Raises `OSError`."""
    if path.exists():
        path = path.with_name(f"{path.name}.{epoch:016x}")
    _log.info("writing the event log to %s", path)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
