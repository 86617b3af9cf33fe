"""What the core was told and what it planned, written down; and fed to a fresh core, to see it plan the same.

A log is a file of records, each a length in four bytes (big-endian) and that many bytes of msgpack. It holds prompts
and answers as token ids.
"""

import struct
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

import msgspec

from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.events import Effect, Event, SendToReplica
from octavo.scheduler.scheduler import Scheduler
from octavo.wire.base import MAX_MESSAGE_BYTES, SCHEMA_VERSION, Value
from octavo.wire.steps import StepPlan

_LENGTH: Final = struct.Struct(">I")


class Began(Value, frozen=True, tag=True):
    """The first record: what made the core."""

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
    """A plan of the core's left for its replica."""

    plan: StepPlan


Record = Began | Handled | Scheduled | Planned
Recorder = Callable[[Record], None]
# Takes a record in msgpack.
Sink = Callable[[bytes], None]

_encode: Final[Callable[[Record], bytes]] = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Record).decode


class EventLogError(Exception):
    """A file that is no log of this version's."""


def write_nothing(record: Record) -> None:
    """The recorder of a core whose doings nobody wants to know."""


def recorder(*sinks: Sink) -> Recorder:
    """Gives every record to all of `sinks`."""

    def write(record: Record) -> None:
        content = _encode(record)
        for sink in sinks:
            sink(content)

    return write


def log_file(file: BinaryIO) -> Sink:
    """Appends records to `file`."""

    def write(content: bytes) -> None:
        file.write(_LENGTH.pack(len(content)) + content)

    return write


def read_records(file: BinaryIO) -> Iterator[Record]:
    """The records of a log, up to one that a killed process left unfinished. Raises `EventLogError`."""
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
    """How a replay went. `difference`: the first plan that differed, as recorded and as made now (None: not made)."""

    events: int
    plans: int
    difference: tuple[StepPlan, StepPlan | None] | None


def fresh_core(records: Iterator[Record]) -> Scheduler:
    """A core as that of the log was when the log began; takes the first record. Raises `EventLogError` if that is not
    one of this version's."""
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
