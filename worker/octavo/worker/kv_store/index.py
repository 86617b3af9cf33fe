"""An index in memory says which block lies in which slot of the segments of one identity; it is made of their tables.

Segments of this process are noted as they are written; `refresh` finds what others have written or removed since. The
index may be wrong about a file that another process has just removed: a read finds that out, and `forget`s.
"""

import threading
from dataclasses import dataclass, field
from itertools import accumulate, count
from pathlib import Path
from typing import Final

from octavo.worker.kv_store.identity import StoreIdentity
from octavo.worker.kv_store.segment import (
    SegmentError,
    SegmentFile,
    SegmentLayout,
    SegmentWriter,
    opened,
    read_layout,
    read_names,
    segment_files,
)

# More slots than a segment has.
_SLOTS: Final = 1 << 32


@dataclass(eq=False, slots=True)
class Segment:
    """Describes a segment: `filled` slots were seen, with these names. More may come until it `is_full`."""

    key: int
    path: Path
    age: int
    layout: SegmentLayout
    filled: int = 0
    names: list[bytes] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        return self.filled == self.layout.slots


class BlockIndex:
    """Finds blocks by their names. Any thread may call any method; none but `refresh` touches a disk or waits for
    one."""

    def __init__(self, directory: Path, identity: StoreIdentity) -> None:
        self._directory = directory
        self._identity = identity
        self._lock = threading.Lock()
        # A location is one number, segment's key and slot: an object less per block, and none for the collector.
        self._location_of: dict[bytes, int] = {}
        self._segments: dict[int, Segment] = {}
        self._segment_at: dict[Path, Segment] = {}
        self._keys = count()
        # The youngest segments, from this age on, hold three quarters of what the store may.
        self._young_age = 0
        self.num_unreadable = 0

    def __contains__(self, name: bytes) -> bool:
        return name in self._location_of

    def __len__(self) -> int:
        return len(self._location_of)

    @property
    def num_segments(self) -> int:
        return len(self._segments)

    def find(self, name: bytes) -> tuple[Segment, int] | None:
        """Returns the segment and the slot of a block."""
        with self._lock:
            location = self._location_of.get(name)
            if location is None:
                return None
            key, slot = divmod(location, _SLOTS)
            return self._segments[key], slot

    def has_young(self, name: bytes) -> bool:
        """Tells whether the block lies where it stays for a while: not in the oldest quarter of the
        store."""
        found = self.find(name)
        return found is not None and found[0].age >= self._young_age

    def add_segment(self, writer: SegmentWriter) -> Segment:
        """Notes a segment that this process writes, and `add`s to."""
        with self._lock:
            return self._added(writer.path, writer.age, writer.layout)

    def add(self, segment: Segment, start: int, names: list[bytes | None]) -> None:
        """Notes the blocks in a segment's slots from `start` on, None for a slot of no use. Of blocks that lie twice
        the younger one counts."""
        with self._lock:
            if segment.key not in self._segments:
                return
            for slot, name in enumerate(names, start):
                if name is not None:
                    known = self._location_of.get(name)
                    if known is None or self._segments[known // _SLOTS].age <= segment.age:
                        self._location_of[name] = segment.key * _SLOTS + slot
                        segment.names.append(name)
            segment.filled = max(segment.filled, start + len(names))

    def forget(self, name: bytes, segment: Segment) -> None:
        """Drops a block that was not what it should be, unless it has been written anew elsewhere."""
        with self._lock:
            self._forget(name, segment)

    def drop(self, path: Path) -> int:
        """Drops the blocks of a segment that is no more; returns how many are nowhere now."""
        with self._lock:
            segment, num_known = self._segment_at.pop(path, None), len(self._location_of)
            if segment is not None:
                for name in segment.names:
                    self._forget(name, segment)
                del self._segments[segment.key]
            return num_known - len(self._location_of)

    def set_young(self, files: list[SegmentFile], capacity_bytes: int) -> None:
        """Notes which of all segments below the store's directory, oldest first, are not its oldest quarter."""
        sizes = accumulate(file.num_bytes for file in reversed(files))
        old = (file.age for file, size in zip(reversed(files), sizes, strict=True) if size > 3 * capacity_bytes // 4)
        self._young_age = next(old, -1) + 1

    def refresh(self) -> None:
        """Reads the tables of segments that are new or not full, and drops those that are gone. One thread at a time
        calls it. Raises `OSError` if the directory cannot be read."""
        with self._lock:
            known = self._segment_at.copy()
        files = {file.path: file for file in segment_files(self._directory)}
        for path in known.keys() - files.keys():
            self.drop(path)
        self.num_unreadable = 0
        for path, file in files.items():
            segment = known.get(path)
            if segment is None or not segment.is_full:
                self._read(file, segment)

    def _read(self, file: SegmentFile, segment: Segment | None) -> None:
        start = segment.filled if segment else 0
        try:
            with opened(file.path) as descriptor:
                layout = segment.layout if segment else read_layout(descriptor)
                if layout.identity != self._identity:
                    raise SegmentError("it is of another identity")
                names = read_names(descriptor, layout, start)
        except FileNotFoundError:
            self.drop(file.path)
        except (SegmentError, OSError):
            # It may be one that is just being made: the next refresh looks again.
            self.num_unreadable += 1
        else:
            with self._lock:
                segment = self._added(file.path, file.age, layout)
            self.add(segment, start, names)

    def _added(self, path: Path, age: int, layout: SegmentLayout) -> Segment:
        segment = self._segment_at.get(path)
        if segment is None:
            segment = self._segment_at[path] = Segment(next(self._keys), path, age, layout)
            self._segments[segment.key] = segment
        return segment

    def _forget(self, name: bytes, segment: Segment) -> None:
        location = self._location_of.get(name)
        if location is not None and location // _SLOTS == segment.key:
            del self._location_of[name]
