"""Declares what is given to the store of responses, and what is got from it."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from octavo.frontend.errors import InvalidRequest, Reason
from octavo.frontend.request.chat import MAX_MESSAGES

# What the reader of a response is told that could not be written.
NOT_WRITTEN: Final = "the response could not be stored, and the server's log says why; send it again"
# The statuses of responses with an answer that may be gone on from.
ANSWERED: Final = ("completed", "incomplete")


class Kind(enum.StrEnum):
    """Names what a record is, as ids begin and messages say."""

    RESPONSE = "response"
    CONVERSATION = "conversation"


@dataclass(frozen=True)
class Limits:
    """Bounds what is kept: bytes in all and of each tenant (0: no bound of its own), and seconds since the last use."""

    max_bytes: int
    tenant_max_bytes: int
    expiry_s: float


@dataclass(frozen=True)
class Record:
    """Holds a record as it was read. `body` is its JSON object, `num_events` how many events are kept of it; `status`
    is empty for what is no response."""

    key: int
    id: str
    status: str
    ended: bool
    is_background: bool
    num_events: int
    body: bytes


@dataclass(frozen=True)
class NewRecord:
    """Holds a record that is to be kept: `input` is JSON of a text or of items, what it goes on from are keys."""

    kind: Kind
    tenant: str
    id: str
    body: bytes
    input: bytes
    previous: int | None = None
    conversation: int | None = None
    is_background: bool = False


class Named(msgspec.Struct):
    """Holds the id of an item, or of a conversation that is named by an object."""

    id: str


@dataclass(frozen=True)
class Before:
    """Holds what came before a call: the key that the call goes on from, and JSON lists of items, oldest first."""

    key: int
    items: Sequence[bytes]


@dataclass(frozen=True)
class Progress:
    """Says how far the response `key` has got: events from the number `first` on, and the object where that has
    changed."""

    key: int
    first: int
    events: Sequence[bytes]
    body: bytes | None
    ended: bool


class Outcome(enum.Enum):
    """Names what became of a `Progress`; all but `KEPT` are to end the response."""

    KEPT = enum.auto()
    CANCELLED = enum.auto()
    GONE = enum.auto()
    NO_ROOM = enum.auto()
    UNWRITABLE = enum.auto()


@dataclass
class Removals:
    """Counts the records that were removed, by why: too old, or others needed their room."""

    expired: int = 0
    evicted: int = 0


class Room:
    """Counts bytes and items of what came before a call, which are bounded as a call's own are."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = self._bytes_left = max_bytes
        self._items_left = MAX_MESSAGES

    def take(self, num_bytes: int, num_items: int) -> None:
        """Raises `InvalidRequest` where that is too much."""
        self._bytes_left -= num_bytes
        self._items_left -= num_items
        if self._bytes_left < 0 or self._items_left < 0:
            raise InvalidRequest(
                Reason.TOO_LARGE,
                f"what was said before has more than {self._max_bytes} bytes or {MAX_MESSAGES} items; begin anew,"
                " with a summary",
                max_bytes=self._max_bytes,
            )


def split(events: bytes) -> list[bytes]:
    """Returns the events in a part of a stream, one by one, without comments."""
    return [each + b"\n\n" for each in events.split(b"\n\n") if each and not each.startswith(b":")]
