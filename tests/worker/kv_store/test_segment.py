"""A segment gives back what was written whole, whatever has become of its file: a cut anywhere, any byte changed."""

import os
from pathlib import Path

import pytest

from octavo.testing.small.kv_blocks import BLOCK_BYTES, IDENTITY, name_of, payload_of
from octavo.worker.kv_store.segment import (
    SegmentError,
    SegmentLayout,
    SegmentWriter,
    opened,
    read_block,
    read_layout,
    read_names,
    segment_files,
)

LAYOUT = SegmentLayout(IDENTITY, 4)
WRITTEN = 3


@pytest.fixture
def path(tmp_path: Path) -> Path:
    writer = SegmentWriter(tmp_path / "place", 7, LAYOUT)
    assert [writer.append(name_of(number), [memoryview(payload_of(number))]) for number in range(WRITTEN)] == [0, 1, 2]
    writer.close()
    return writer.path


def found(path: Path) -> list[int]:
    """Returns which of the blocks are found there; they must be right."""
    numbers = []
    with opened(path) as descriptor:
        try:
            layout = read_layout(descriptor)
        except SegmentError:
            return []
        assert layout == LAYOUT
        for slot, name in enumerate(read_names(descriptor, layout)):
            buffer = bytearray(BLOCK_BYTES)
            if name is not None and read_block(descriptor, layout, slot, name, memoryview(buffer)):
                assert (name, bytes(buffer)) == (name_of(slot), payload_of(slot))
                numbers.append(slot)
    return numbers


def replace(path: Path, place: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        file.write(content)


def test_what_was_written_is_read_and_belongs_to_this_user_alone(path: Path) -> None:
    assert found(path) == [0, 1, 2]
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    (file,) = segment_files(path.parent)
    assert (file.path, file.age, file.num_bytes) == (path, 7, LAYOUT.payload_at(WRITTEN))


def test_a_file_that_ends_anywhere_holds_the_blocks_that_end_before(path: Path) -> None:
    assert path.stat().st_size == LAYOUT.payload_at(WRITTEN)
    for length in reversed(range(LAYOUT.payload_at(WRITTEN))):
        os.truncate(path, length)
        whole = [slot for slot in range(WRITTEN) if LAYOUT.payload_at(slot + 1) <= length]
        assert found(path) == whole, length


@pytest.mark.parametrize("call", ["fstat", "pread"])
def test_a_first_block_may_be_written_between_any_two_calls_of_a_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    writer = SegmentWriter(tmp_path / "place", 7, LAYOUT)
    real = getattr(os, call)

    def call_then_write(*arguments: int) -> object:
        monkeypatch.undo()
        result = real(*arguments)
        assert writer.append(name_of(0), [memoryview(payload_of(0))]) == 0
        return result

    with opened(writer.path) as descriptor:
        monkeypatch.setattr(os, call, call_then_write)
        assert read_names(descriptor, LAYOUT) in ([], [name_of(0)])
        assert read_names(descriptor, LAYOUT) == [name_of(0)]
    writer.close()


def test_a_writer_that_was_killed_anywhere_leaves_the_blocks_that_it_had_finished(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill between two writes is the file as it is there: what is written after is not in it."""
    real, states = os.pwrite, list[tuple[bytes, list[int]]]()

    def noted(descriptor: int, content: memoryview, offset: int) -> int:
        # As a kernel that is interrupted may: half of it first.
        states.append((writer.path.read_bytes(), list(range(writer.filled))))
        return real(descriptor, content[: max(1, len(content) // 2)], offset)

    writer = SegmentWriter(path.parent, 8, LAYOUT)
    monkeypatch.setattr(os, "pwrite", noted)
    for number in range(WRITTEN):
        writer.append(name_of(number), [memoryview(payload_of(number))])
    monkeypatch.undo()
    assert len(states) > 10 * WRITTEN
    for content, whole in states:
        os.truncate(path, len(content))
        replace(path, 0, content)
        assert found(path) == whole


@pytest.mark.parametrize("changed", [b"\x00", b"\xff", None], ids=["zero", "ones", "another bit"])
def test_no_byte_can_change_unnoticed(path: Path, changed: bytes | None) -> None:
    content = path.read_bytes()
    table = range(LAYOUT.entry_at(0), LAYOUT.entry_at(LAYOUT.slots))
    used_header = len(content[: table.start].rstrip(b"\0"))
    for place in [*range(used_header), *table, *range(LAYOUT.first_slot, len(content))]:
        value = changed or bytes([content[place] ^ 1 << place % 8])
        if content[place : place + 1] == value:
            continue
        replace(path, place, value)
        if place < used_header:
            lost = {0, 1, 2}
        elif place in table:
            lost = {(place - table.start) // 48}
        else:
            lost = {(place - LAYOUT.first_slot) // BLOCK_BYTES}
        assert found(path) == sorted({0, 1, 2} - lost), place
        replace(path, place, content[place : place + 1])


def test_a_block_in_another_slot_or_under_another_name_is_not_found(path: Path) -> None:
    content = path.read_bytes()
    first, second, third = (LAYOUT.entry_at(slot) for slot in range(WRITTEN))
    path.write_bytes(content[:first] + content[second:third] + content[first:second] + content[third:])
    assert found(path) == [2]
    path.write_bytes(content.replace(payload_of(0), payload_of(1)))
    assert found(path) == [1, 2]


def test_a_segment_is_as_large_as_it_may_be_and_no_larger() -> None:
    for most in range(12_000, 60_000, 97):
        layout = SegmentLayout.within(IDENTITY, most)
        assert most - 4096 - 2 * (BLOCK_BYTES + 48) < layout.num_bytes <= most
    assert SegmentLayout.within(IDENTITY, 10).slots == 1


def test_a_writer_notices_that_its_file_was_removed_and_leaves_no_empty_one(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, 0, LAYOUT)
    assert writer.is_writable
    writer.path.unlink()
    assert not writer.is_writable
    writer.close()
    SegmentWriter(tmp_path, 0, LAYOUT).close()
    assert list(tmp_path.iterdir()) == []


def test_a_link_is_not_followed(path: Path) -> None:
    link = path.with_name(f"{0:012x}-{0:08x}.kv")
    link.symlink_to(path)
    with pytest.raises(OSError, match="symbolic links"), opened(link):
        pass
