"""A directory's keeper sees what it holds, what of it is damaged, and can empty it."""

from dataclasses import replace
from pathlib import Path

import pytest

from octavo.testing.small.kv_blocks import IDENTITY, payload_of, put
from octavo.worker.kv_store.store import KVStore
from octavo.worker.kv_store.upkeep import clear, inspect

OTHERS = replace(IDENTITY, model="another")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for identity, numbers in ((IDENTITY, range(3)), (OTHERS, range(5))):
        with KVStore(tmp_path / "kv", 1 << 20, identity) as store:
            put(store, *numbers)
    return tmp_path / "kv"


def change(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_a_report_tells_of_the_blocks_of_each_segment(directory: Path) -> None:
    for reads_blocks in (False, True):
        ours, others = inspect(directory, reads_blocks=reads_blocks)
        assert (ours.identity, ours.blocks, ours.damaged, ours.fault) == (IDENTITY, 3, 0, "")
        assert (others.identity, others.blocks, others.damaged, others.fault) == (OTHERS, 5, 0, "")
        assert (ours.file.age, others.file.age) == (0, 1)
        assert ours.file.num_bytes == ours.file.path.stat().st_size


def test_a_damaged_block_is_seen_if_blocks_are_read(directory: Path) -> None:
    ours, others = (report.file.path for report in inspect(directory, reads_blocks=False))
    change(ours, ours.read_bytes().index(payload_of(1)))
    # Its entry in the table.
    change(others, 4096 + 48)
    assert [(report.blocks, report.damaged) for report in inspect(directory, reads_blocks=False)] == [(3, 0), (4, 1)]
    assert [(report.blocks, report.damaged) for report in inspect(directory, reads_blocks=True)] == [(3, 1), (4, 1)]


def test_a_file_that_is_no_segment_is_reported_with_the_reason(directory: Path) -> None:
    ours, others = (report.file.path for report in inspect(directory, reads_blocks=False))
    change(ours, 0)
    others.write_bytes(b"short")
    assert [report.fault for report in inspect(directory, reads_blocks=True)] == [
        "its header is no segment's, or damaged",
        "it is shorter than a header",
    ]


def test_clearing_leaves_nothing(directory: Path) -> None:
    assert [file.age for file in clear(directory)] == [0, 1]
    assert [path.name for path in directory.rglob("*")] == [".lock"]
    assert list(inspect(directory, reads_blocks=True)) == []
    assert clear(directory) == []


def test_what_is_no_directory_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list(inspect(tmp_path / "none", reads_blocks=False))
    with pytest.raises(FileNotFoundError):
        clear(tmp_path / "none")
