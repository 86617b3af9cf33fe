"""Keeps what happened in a run: the last of it to be read, all of it as a hash."""

import hashlib
from collections import deque
from collections.abc import Iterator

import msgspec

_KEPT = 200
_WIDTH = 300

Entry = tuple[float, str, str | bytes]


class Trace:
    """Keeps events and messages with their times. Only the last are kept; with `hashing` all of them count."""

    def __init__(self, *, hashing: bool = False) -> None:
        self._last: deque[Entry] = deque(maxlen=_KEPT)
        self._hash = hashlib.blake2b() if hashing else None

    def note(self, time: float, where: str, what: str | bytes) -> None:
        """Notes an event in words, or a message that went by."""
        self._last.append((time, where, what))
        if self._hash is not None:
            content = what.encode() if isinstance(what, str) else what
            self._hash.update(b"%r %b %b\n" % (time, where.encode(), content))

    @property
    def digest(self) -> str:
        """Equal for equal runs."""
        assert self._hash is not None, "this trace was not to be hashed"
        return self._hash.hexdigest()

    def lines(self) -> Iterator[str]:
        """Yields the last events, for people."""
        for time, where, what in self._last:
            text = what if isinstance(what, str) else str(msgspec.msgpack.decode(what))
            yield f"{time:10.4f}  {where}: {text[:_WIDTH]}"
