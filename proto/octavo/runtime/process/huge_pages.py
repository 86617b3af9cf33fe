"""Puts the memory of a process into huge pages: a process that wakes for every token finds the processor's tables of
addresses taken by others, and looks up hundreds of small pages anew."""

import ctypes
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

_MAPS: Final = Path("/proc/self/maps")
# Private memory that is written to, and belongs to no file.
_ANONYMOUS: Final = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p 00000000 00:00 0 +(\[heap\]|\[anon:.*\])?$")
_PAGE: Final = 2 << 20
# Of madvise(2), since Linux 6.1: whatever the system's setting for huge pages is, this asks for them.
_MADV_COLLAPSE: Final = 25


def use_huge_pages() -> int:
    """Puts the memory that the process has by now into huge pages, as far as the system has any, and returns how many
    bytes are there. Does nothing where there is no /proc."""
    try:
        areas = written_memory(_MAPS.read_text(encoding="utf-8").splitlines())
    except OSError:
        return 0
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    moved = 0
    for start, end in areas:
        # One by one: a page that cannot be had ends a request for many.
        for page in range(-(-start // _PAGE) * _PAGE, end - _PAGE + 1, _PAGE):
            moved += _PAGE * (advise(page, _PAGE, _MADV_COLLAPSE) == 0)
    return moved


def written_memory(lines: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Yields start and end of all that a process has for itself to write to, by the `lines` of its maps (proc(5)).

    Stacks are left out: they are warm.
    """
    for line in lines:
        if found := _ANONYMOUS.match(line):
            yield int(found[1], 16), int(found[2], 16)
