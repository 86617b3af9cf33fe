"""One segment: a file that holds blocks of one identity, each in a slot, behind a table that says what lies in which.

    header       4,096 bytes: magic, length and checksum of a JSON text, and that text, which has the identity and the
                 number of slots
    table        an entry of 48 bytes for each slot: the block's name, a checksum of name and payload, a checksum of the
                 entry; zeros where nothing was written yet
    slots        payloads of equal length, the first at a multiple of 4,096, so all are where blocks take whole pages

Numbers are little-endian. A payload is written before its entry, slots are filled in order, and none is written twice:
whoever is killed at any moment leaves a table whose entries all stand for whole payloads. What a machine loses that
goes down (nothing waits for the disk) shows in a checksum. Reading a table costs a read of some kilobytes, however
large the blocks are.

A file's name is its age among all segments below the store's directory, and a token that no other file has. No clock is
asked: the age is one more than the largest that was there.
"""

import json
import os
import re
import secrets
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Final, Self

from xxhash import xxh3_64, xxh3_64_intdigest

from octavo.worker.kv_store.identity import NAME_BYTES, StoreIdentity
from octavo.worker.kv_store.loan import Parts, Payload

# Its last character is the version of this format.
_MAGIC: Final = b"octavKV1"
_PAGE: Final = 4096
_PREAMBLE: Final = struct.Struct("<8sQQ")
_ENTRY: Final = struct.Struct("<32sQQ")
_EMPTY: Final = bytes(_ENTRY.size)
_FILE_NAME: Final = re.compile(r"([0-9a-f]{12})-[0-9a-f]{8}\.kv")


class SegmentError(Exception):
    """Says what is wrong with a file that should be a segment."""


@dataclass(frozen=True)
class SegmentLayout:
    """Says whose blocks a segment holds, how many, and where they lie."""

    identity: StoreIdentity
    slots: int

    @classmethod
    def within(cls, identity: StoreIdentity, most_bytes: int) -> Self:
        """Returns a layout whose file has at most so many bytes, unless one block alone needs more."""
        return cls(identity, max(1, (most_bytes - 2 * _PAGE) // (identity.block_bytes + _ENTRY.size)))

    @property
    def first_slot(self) -> int:
        """Returns the offset of the first payload."""
        return -(-(_PAGE + self.slots * _ENTRY.size) // _PAGE) * _PAGE

    def payload_at(self, slot: int) -> int:
        return self.first_slot + slot * self.identity.block_bytes

    def entry_at(self, slot: int) -> int:
        return _PAGE + slot * _ENTRY.size

    @property
    def num_bytes(self) -> int:
        """Returns the length of a file that has all slots."""
        return self.payload_at(self.slots)

    def header(self) -> bytes:
        text = json.dumps({"slots": self.slots, "identity": asdict(self.identity)}).encode()
        return (_PREAMBLE.pack(_MAGIC, len(text), xxh3_64_intdigest(text)) + text).ljust(_PAGE, b"\0")


@dataclass(frozen=True)
class SegmentFile:
    """Names a segment's file; the smallest age is the oldest."""

    path: Path
    age: int
    num_bytes: int


def segment_files(directory: Path) -> Iterator[SegmentFile]:
    """Yields the segments in the directory of an identity; none if it is not there."""
    try:
        entries = os.scandir(directory)
    except FileNotFoundError:
        return
    with entries:
        for entry in entries:
            if matched := _FILE_NAME.fullmatch(entry.name):
                try:
                    size = entry.stat(follow_symlinks=False).st_size
                except FileNotFoundError:
                    continue
                yield SegmentFile(Path(entry.path), int(matched[1], 16), size)


def read_layout(descriptor: int) -> SegmentLayout:
    """Reads a segment's header. Raises `SegmentError`, and `OSError` if it cannot be read."""
    header = os.pread(descriptor, _PAGE, 0)
    if len(header) < _PAGE:
        raise SegmentError("it is shorter than a header")
    magic, length, checksum = _PREAMBLE.unpack_from(header)
    text = header[_PREAMBLE.size :][:length]
    if magic != _MAGIC or xxh3_64_intdigest(text) != checksum:
        raise SegmentError("its header is no segment's, or damaged")
    try:
        said = json.loads(text)
        return SegmentLayout(StoreIdentity(**said["identity"]), said["slots"])
    except (KeyError, TypeError, ValueError) as error:
        raise SegmentError(f"its header is of another version: {error}") from error


def read_names(descriptor: int, layout: SegmentLayout, start: int = 0) -> list[bytes | None]:
    """Returns the names in the table from slot `start` on, None for a damaged entry. What the file is too short for is
    left out. Raises `OSError`."""
    # Its length first: another process may be writing the first block, and the table before it.
    stop = min(layout.slots, (os.fstat(descriptor).st_size - layout.first_slot) // layout.identity.block_bytes)
    table = os.pread(descriptor, _ENTRY.size * (layout.slots - start), layout.entry_at(start))
    entries = (table[offset : offset + _ENTRY.size] for offset in range(0, _ENTRY.size * (stop - start), _ENTRY.size))
    return [_name_in(entry, slot) for slot, entry in enumerate(takewhile(_EMPTY.__ne__, entries), start)]


def _name_in(entry: bytes, slot: int) -> bytes | None:
    name, _, checksum = _ENTRY.unpack(entry)
    return name if xxh3_64_intdigest(entry[:40], slot) == checksum else None


def read_block(descriptor: int, layout: SegmentLayout, slot: int, name: bytes, buffer: memoryview) -> bool:
    """Reads a block into `buffer` and returns whether it is the one of this name, whole; what is in `buffer` otherwise
    is nothing. Raises `OSError`."""
    entry = os.pread(descriptor, _ENTRY.size, layout.entry_at(slot))
    if len(entry) < _ENTRY.size or _name_in(entry, slot) != name:
        return False
    offset, rest = layout.payload_at(slot), buffer
    while rest:
        if not (count := os.preadv(descriptor, [rest], offset)):
            return False
        offset, rest = offset + count, rest[count:]
    return _checksum(name, [buffer]) == int.from_bytes(entry[NAME_BYTES : NAME_BYTES + 8], "little")


def _checksum(name: bytes, parts: Parts) -> int:
    checksum = xxh3_64(name)
    for part in parts:
        checksum.update(part)
    return checksum.intdigest()


class SegmentWriter:
    """Fills a segment."""

    def __init__(self, directory: Path, age: int, layout: SegmentLayout) -> None:
        """Makes the file, without blocks, in a directory that it makes if need be. Raises `OSError`, and leaves no file
        then."""
        directory.mkdir(mode=0o700, exist_ok=True)
        self.path = directory / f"{age:012x}-{secrets.token_hex(4)}.kv"
        self.age = age
        self.layout = layout
        self.filled = 0
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            self._write(layout.header(), 0)
        except OSError:
            self.close()
            raise

    @property
    def is_writable(self) -> bool:
        """Tells whether there is a slot left, and a file: another process may have removed it to make room."""
        return self.filled < self.layout.slots and os.fstat(self._descriptor).st_nlink > 0

    def append(self, name: bytes, parts: Parts, is_valid: Callable[[], bool] = lambda: True) -> int | None:
        """Writes a block and returns its slot; None, and the slot is still to be filled, if the parts were not valid
        any more once all of them had been read. Raises `OSError`, after which only `close` is left to call."""
        slot = self.filled
        offset, checksum = self.layout.payload_at(slot), _checksum(name, parts)
        for part in parts:
            self._write(part, offset)
            offset += part.nbytes
        if not is_valid():
            return None
        entry = name + checksum.to_bytes(8, "little")
        self._write(entry + xxh3_64_intdigest(entry, slot).to_bytes(8, "little"), self.layout.entry_at(slot))
        self.filled += 1
        return slot

    def close(self) -> None:
        """Lets go of the file, and removes it if it holds no block."""
        os.close(self._descriptor)
        if not self.filled:
            with suppress(OSError):
                self.path.unlink()

    def _write(self, content: Payload, offset: int) -> None:
        rest = memoryview(content)
        while rest:
            count = os.pwrite(self._descriptor, rest, offset)
            offset, rest = offset + count, rest[count:]


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Holds a file open to read it within the block, and follows no link."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
