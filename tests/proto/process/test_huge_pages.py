"""A process's memory goes into huge pages, and holds what it held."""

import mmap
import random
import re
from pathlib import Path

import pytest

from octavo.runtime.process.huge_pages import use_huge_pages, written_memory

_MIB = 1 << 20
_SETTING = Path("/sys/kernel/mm/transparent_hugepage")


def test_only_private_memory_that_is_written_to_counts() -> None:
    maps = [
        "55c000000000-55c000400000 r-xp 00001000 fe:00 123                        /usr/bin/python3",
        "55c000400000-55c000500000 rw-p 00400000 fe:00 123                        /usr/bin/python3",
        "55c001000000-55c001800000 rw-p 00000000 00:00 0                          [heap]",
        "7f0000000000-7f0000400000 rw-p 00000000 00:00 0 ",
        "7f0000400000-7f0000500000 r--p 00000000 00:00 0 ",
        "7f0000600000-7f0000a00000 rw-s 00000000 00:01 17                         /memfd:x (deleted)",
        "7ffd00000000-7ffd00200000 rw-p 00000000 00:00 0                          [stack]",
    ]
    found = list(written_memory(maps))
    assert found == [(0x55C001000000, 0x55C001800000), (0x7F0000000000, 0x7F0000400000)]


@pytest.mark.skipif(not _SETTING.is_dir(), reason="this system has no huge pages")
def test_what_is_in_memory_stays_as_it_was() -> None:
    content = random.Random(1).randbytes(8 * _MIB)
    with mmap.mmap(-1, len(content), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.write(content)
        moved = use_huge_pages()
        assert memory[:] == content
        assert moved % (2 * _MIB) == 0
        assert _in_huge_pages() >= moved


def _in_huge_pages() -> int:
    found = re.search(r"AnonHugePages: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text(encoding="utf-8"))
    assert found
    return int(found[1]) << 10


def test_a_system_without_proc_does_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("octavo.runtime.process.huge_pages._MAPS", tmp_path / "none")
    assert use_huge_pages() == 0
