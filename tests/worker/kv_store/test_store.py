"""A store returns what was written under a name, or nothing, and never makes its caller wait for a disk."""

import errno
import logging
import os
import select
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.runtime.telemetry import optional
from octavo.testing.fakes.failing_disk import short_files
from octavo.testing.small.kv_blocks import BLOCK_BYTES, EAGER, IDENTITY, finished, got, name_of, payload_of, put
from octavo.worker.kv_store.identity import StoreIdentity, block_name
from octavo.worker.kv_store.room import KVStoreError
from octavo.worker.kv_store.store import KVStore, StoreLimits

CAPACITY = 1 << 20
# Twenty segments of two blocks each.
LARGE = replace(IDENTITY, block_bytes=4096)
FEW = 16 * 20_480


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture(autouse=True)
def nothing_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional, "_failing", set())


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*/*.kv"), key=lambda path: path.name)


def written(store: KVStore) -> int:
    return store.stats().counts.get("written", 0)


class Held:
    """Keeps a call of the system waiting until it is let go, as a disk that hangs does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.entered, self.released = threading.Event(), threading.Event()
        real = getattr(os, name)

        def wait(*arguments: Any) -> Any:
            self.entered.set()
            assert self.released.wait(60)
            return real(*arguments)

        monkeypatch.setattr(os, name, wait)


# -- what is there ----------------------------------------------------------------------------------------------------


def test_blocks_are_found_by_their_names_also_after_the_next_start(directory: Path) -> None:
    with KVStore(directory, CAPACITY, IDENTITY) as store:
        put(store, 1, 2, 3)
        assert name_of(2) in store
        assert name_of(4) not in store
        assert got(store, [1, 4, 3]) == [1, 3]
        assert store.stats().counts == {"written": 3, "found": 2, "missed": 1}
    with KVStore(directory, CAPACITY, IDENTITY) as store:
        assert got(store, [1, 2, 3, 4]) == [1, 2, 3]
        assert (store.stats().blocks, store.stats().segments) == (3, 1)


def test_a_block_that_is_there_is_not_written_again(directory: Path) -> None:
    with KVStore(directory, CAPACITY, IDENTITY) as store:
        put(store, 1, 1)
        assert (written(store), store.stats().counts["kept"]) == (1, 1)


@pytest.mark.parametrize(
    "other",
    [
        {"model": "another"},
        {"dtype": "int8"},
        {"layout": "another"},
        {"numerics": "exact"},
        {"block_size": 32},
        {"block_bytes": 256},
        {"shard": "1/2"},
    ],
)
def test_blocks_of_another_identity_are_not_found(directory: Path, other: dict[str, Any]) -> None:
    with KVStore(directory, CAPACITY, IDENTITY) as store:
        put(store, 1)
    others = replace(IDENTITY, **other)
    with KVStore(directory, CAPACITY, others) as store:
        assert got(store, [1], others.block_bytes) == []
        # Nor where somebody has put them into its directory.
        (segment,) = files(directory)
        (directory / others.directory_name).mkdir()
        segment.rename(directory / others.directory_name / segment.name)
        assert got(store, [1], others.block_bytes) == []
    with KVStore(directory, CAPACITY, others) as store:
        assert got(store, [1], others.block_bytes) == []
        assert store.stats().unreadable_segments == 1


def test_a_name_says_of_which_kv_group_the_block_is() -> None:
    value = name_of(1)
    names = {block_name(value, group) for group in range(3)}
    assert len(names) == 3
    assert all(len(name) == 32 for name in names)
    assert value not in names


def test_directories_that_are_open_to_others_are_refused(directory: Path) -> None:
    KVStore(directory, CAPACITY, IDENTITY).close()
    assert directory.stat().st_mode & 0o777 == 0o700
    directory.chmod(0o755)
    with pytest.raises(KVStoreError, match=r"mode 700, not 755: .*run `chmod 700"):
        KVStore(directory, CAPACITY, IDENTITY)


def test_a_file_in_the_directorys_place_is_refused(directory: Path) -> None:
    directory.write_bytes(b"")
    with pytest.raises(KVStoreError, match=r"cannot keep KV blocks in .*File exists.*; name another place"):
        KVStore(directory, CAPACITY, IDENTITY)


def test_what_cannot_be_a_block_is_refused(directory: Path) -> None:
    with pytest.raises(KVStoreError, match=r"10,000 bytes are too few .* at least"):
        KVStore(directory, 10_000, IDENTITY)
    with pytest.raises(ValueError, match="a block has tokens and bytes"):
        replace(IDENTITY, block_bytes=0)
    with pytest.raises(ValueError, match="an identity takes 3072 bytes"):
        StoreIdentity("m" * 3000, "", "", "", 1, 1)
    with KVStore(directory, CAPACITY, IDENTITY) as store:
        for name, payload in ((b"short", payload_of(1)), (name_of(1), b"short")):
            with pytest.raises(ValueError, match="a block is 32 bytes of name and 192 of payload"):
                store.write(name, payload)
        for buffers in ([bytes(BLOCK_BYTES)], [bytearray(BLOCK_BYTES - 1)], []):
            with pytest.raises(ValueError, match="1 names take as many writable buffers of 192 bytes"):
                store.read([name_of(1)], buffers)


# -- what makes way ---------------------------------------------------------------------------------------------------


def test_the_oldest_blocks_make_way_and_those_in_use_stay(directory: Path) -> None:
    with KVStore(directory, FEW, LARGE, EAGER) as store:
        for number in range(200):
            put(store, number, num_bytes=4096)
            # A prefix that all conversations have.
            assert got(store, [0], 4096) == [0]
            # That may have it written anew, and others removed for it.
            assert store.flush(60)
            assert sum(path.stat().st_size for path in files(directory)) <= FEW
        store.flush(60)
        assert not got(store, range(1, 160), 4096)
        assert got(store, range(185, 200), 4096) == [*range(185, 200)]
        stats = store.stats()
        counts = stats.counts
        # All that is not there any more; what was written anew is.
        assert counts["evicted"] == 200 - stats.blocks
        assert stats.capacity_blocks == 40
        # It was written anew once for three quarters of the capacity, and not at each read.
        assert 5 <= counts["renewed"] <= 8
        assert counts["written"] == 200 + counts["renewed"]
    with KVStore(directory, FEW, LARGE, EAGER) as store:
        assert got(store, [0, 199], 4096) == [0, 199]


def test_what_is_written_again_while_it_lies_among_the_oldest_stays(directory: Path) -> None:
    with KVStore(directory, FEW, LARGE, EAGER) as store:
        for number in range(200):
            put(store, number, 0, num_bytes=4096)
        assert got(store, [0], 4096) == [0]
        assert 205 <= written(store) <= 208


def test_blocks_of_other_models_make_way_first_if_they_are_older(directory: Path) -> None:
    others = replace(LARGE, model="another")
    with KVStore(directory, FEW, others, EAGER) as store:
        put(store, *range(40), num_bytes=4096)
    with KVStore(directory, FEW, LARGE, EAGER) as store:
        put(store, *range(24), num_bytes=4096)
        assert got(store, range(24), 4096) == [*range(24)]
        assert sum(path.stat().st_size for path in files(directory)) <= FEW
        put(store, *range(24, 40), num_bytes=4096)
        # Nothing is left of them, their directory neither.
        assert [path.name for path in directory.iterdir() if path.is_dir()] == [LARGE.directory_name]
    with KVStore(directory, FEW, others, EAGER) as store:
        assert got(store, range(40), 4096) == []


def test_the_age_of_segments_follows_no_clock(directory: Path) -> None:
    """Times of files that lie in the future, as after a clock was set back, change nothing."""
    with KVStore(directory, FEW, LARGE, EAGER) as store:
        for number in range(60):
            put(store, number, num_bytes=4096)
            for age, path in enumerate(reversed(files(directory))):
                os.utime(path, (2e9 + age, 2e9 + age))
        found = [number for number in range(60) if name_of(number) in store]
        assert 38 <= len(found) <= 40
        assert found == [*range(60 - len(found), 60)]


def test_a_directory_that_was_copied_to_another_host_is_as_good(directory: Path, tmp_path: Path) -> None:
    """Another path, another clock, other inodes and another owner of the lock; but another CPU finds nothing there."""
    with KVStore(directory, CAPACITY, IDENTITY) as store:
        put(store, 1, 2, 3)
    moved = tmp_path / "elsewhere" / "kv"
    shutil.copytree(directory, moved)
    moved.chmod(0o700)
    for path in moved.rglob("*"):
        os.utime(path, (0, 0))
    shutil.rmtree(directory)
    with KVStore(moved, CAPACITY, IDENTITY) as store:
        assert got(store, [1, 2, 3]) == [1, 2, 3]
        put(store, 4)
    with KVStore(moved, CAPACITY, replace(IDENTITY, numerics="another instruction set")) as store:
        assert got(store, [1, 2, 3, 4]) == []


def test_a_smaller_capacity_than_before_is_kept_from_the_first_write_on(directory: Path) -> None:
    with KVStore(directory, CAPACITY, LARGE, EAGER) as store:
        put(store, *range(200), num_bytes=4096)
    with KVStore(directory, FEW, LARGE, EAGER) as store:
        put(store, 200, num_bytes=4096)
        assert sum(path.stat().st_size for path in files(directory)) <= FEW
        assert got(store, [0, 199, 200], 4096) == [199, 200]


# -- what comes too fast, or hangs ------------------------------------------------------------------------------------


def test_what_the_disk_is_too_slow_for_is_dropped_and_counted(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with KVStore(directory, CAPACITY, IDENTITY, StoreLimits(write_bytes=3 * BLOCK_BYTES)) as store:
        held = Held(monkeypatch, "pwrite")
        assert [store.write(name_of(number), payload_of(number)) for number in range(5)] == [True] * 3 + [False] * 2
        assert store.write(name_of(1), payload_of(1)), "it is waiting to be written"
        assert not store.flush(0.0)
        assert store.stats().counts == {"dropped": 2, "kept": 1}
        held.released.set()
        assert store.flush(60)
        assert got(store, range(5)) == [0, 1, 2]
        put(store, 3, 4)
        assert got(store, range(5)) == [*range(5)]


def test_a_payload_may_change_once_it_was_taken(directory: Path) -> None:
    with KVStore(directory, CAPACITY, IDENTITY) as store:
        for number in range(100):
            payload = bytearray(payload_of(number))
            assert store.write(name_of(number), memoryview(payload))
            payload[:] = bytes(BLOCK_BYTES)
        assert store.flush(60)
        assert got(store, range(100)) == [*range(100)]


def test_a_read_that_hangs_holds_up_neither_polls_nor_writes_nor_the_end(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = StoreLimits(reads=3, readers=1)
    store = KVStore(directory, CAPACITY, IDENTITY, limits)
    put(store, 1)
    with monkeypatch.context() as patch:
        held = Held(patch, "preadv")
        stuck = store.read([name_of(1)], [bytearray(BLOCK_BYTES)])
        assert held.entered.wait(60)
        queued = [store.read([name_of(1)], [bytearray(BLOCK_BYTES)]) for _ in range(2)]
        assert store.poll() == []
        # The queue is full: it is told at once that nothing was found.
        refused = store.read([name_of(1), name_of(2)], [bytearray(BLOCK_BYTES), bytearray(BLOCK_BYTES)])
        assert finished(store) is refused
        assert refused.found == [False, False]
        assert store.stats().counts["refused"] == 2
        put(store, 2)
        assert not store.close(timeout_s=0.01), "it says that a disk hangs"
        assert all(not ticket.found for ticket in (stuck, *queued))
        assert store.fileno() == -1
        held.released.set()
    for thread in store._threads:
        thread.join(60)
    assert store.close(), "all has ended by now"
    assert not stuck.found or stuck.found == [True]
    with KVStore(directory, CAPACITY, IDENTITY) as store:
        assert got(store, [1, 2]) == [1, 2]


def test_a_write_that_hangs_holds_up_no_read(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with KVStore(directory, CAPACITY, IDENTITY) as store:
        put(store, 1)
        with monkeypatch.context() as patch:
            held = Held(patch, "pwrite")
            assert store.write(name_of(2), payload_of(2))
            assert held.entered.wait(60)
            assert got(store, [1, 2]) == [1]
            held.released.set()
            assert store.flush(60)


def test_what_waits_to_be_written_is_written_before_the_end(directory: Path) -> None:
    store = KVStore(directory, CAPACITY, IDENTITY)
    for number in range(50):
        assert store.write(name_of(number), payload_of(number))
    assert store.close(timeout_s=60)
    assert not store.write(name_of(51), payload_of(51))
    assert store.read([name_of(1)], [bytearray(BLOCK_BYTES)]).found == [False]
    with KVStore(directory, CAPACITY, IDENTITY) as store:
        assert got(store, range(50)) == [*range(50)]


def test_the_descriptor_is_readable_while_there_is_something_to_poll(directory: Path) -> None:
    with KVStore(directory, CAPACITY, IDENTITY) as store:
        assert not select.select([store], [], [], 0)[0]
        tickets = {store.read([name_of(1)], [bytearray(BLOCK_BYTES)]) for _ in range(3)}
        while tickets:
            assert select.select([store], [], [], 60)[0]
            tickets -= {*store.poll()}
        assert not select.select([store], [], [], 0)[0]


# -- what fails -------------------------------------------------------------------------------------------------------


def test_a_damaged_block_is_forgotten_and_can_be_written_again(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with KVStore(directory, CAPACITY, IDENTITY) as store:
        put(store, 1, 2)
        (segment,) = files(directory)
        place = segment.read_bytes().index(payload_of(1))
        with segment.open("r+b") as file:
            file.seek(place + 100)
            file.write(b"damage")
        assert got(store, [1, 2]) == [2]
        assert name_of(1) not in store
        assert got(store, [1, 2]) == [2]
        put(store, 1)
        assert got(store, [1, 2]) == [1, 2]
        assert store.stats().counts["damaged"] == 1
    (line,) = [record.message for record in caplog.records]
    assert line.startswith(f"kv disk reads: {segment} holds another block in slot 0")


def test_a_block_that_cannot_be_read_is_forgotten(
    directory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with KVStore(directory, CAPACITY, IDENTITY) as store:
        put(store, 1, 2)
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", fail)
            assert got(store, [1, 2]) == []
        assert store.stats().counts["failed"] == 2
        put(store, 1)
        assert got(store, [1, 2]) == [1]
    (line,) = [record.message for record in caplog.records]
    assert line == "kv disk reads: [Errno 5] Input/output error; blocks that cannot be read are computed again"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
def test_after_a_failed_write_none_is_tried_for_a_while(
    directory: Path, number: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    caplog.set_level(logging.INFO)
    fails, tried, real = True, 0, os.pwrite

    def pwrite(*arguments: Any) -> int:
        nonlocal tried
        tried += 1
        if fails:
            raise OSError(number, os.strerror(number))
        return real(*arguments)

    with KVStore(directory, CAPACITY, IDENTITY) as store:
        put(store, 1)
        monkeypatch.setattr(os, "pwrite", pwrite)
        put(store, 2)
        assert tried == 1
        assert not store.write(name_of(3), payload_of(3))
        now += 29.0
        assert not store.write(name_of(3), payload_of(3))
        assert got(store, [1, 2]) == [1], "what is there is read"
        now += 2.0
        put(store, 3)
        assert tried == 2
        assert files(directory)[1:] == [], "no empty segment is left at each try"
        fails = False
        now += 31.0
        put(store, 4)
        assert got(store, range(5)) == [1, 4]
        assert store.stats().counts == {
            "written": 2,
            "unwritten": 2,
            "resting": 2,
            "found": 3,
            "missed": 4,
        }
    assert caplog.messages == [
        f"kv disk writes: [Errno {number}] {os.strerror(number)}; blocks there are still read, and for 30 s none is"
        " written",
        "kv disk writes: works again",
    ]


def test_a_disk_that_is_full_in_the_midst_of_a_block_keeps_those_before(directory: Path) -> None:
    layout_end = 4096 * 3
    with short_files(layout_end + 5 * 4096 - 1000), KVStore(directory, CAPACITY, LARGE, EAGER) as store:
        for number in range(12):
            put(store, number, num_bytes=4096)
        counts = store.stats().counts
        assert counts["unwritten"] >= 2
        found = got(store, range(12), 4096)
        assert len(found) == counts["written"] >= 4
    with KVStore(directory, CAPACITY, LARGE, EAGER) as store:
        assert got(store, range(12), 4096) == found


def test_a_directory_that_became_read_only_is_read(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with KVStore(directory, CAPACITY, IDENTITY) as store:
        put(store, 1)
    real = os.open

    def read_only(path: Any, flags: int, *arguments: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return real(path, flags, *arguments)

    monkeypatch.setattr(os, "open", read_only)
    with KVStore(directory, CAPACITY, IDENTITY) as store:
        put(store, 2)
        assert got(store, [1, 2]) == [1]
        assert store.stats().counts["unwritten"] == 1


def test_a_store_that_is_removed_under_it_begins_anew(directory: Path) -> None:
    with KVStore(directory, CAPACITY, IDENTITY, EAGER) as store:
        put(store, 1)
        for path in sorted(directory.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        directory.rmdir()
        assert got(store, [1]) == []
        put(store, 2)
        assert got(store, [1, 2]) == [2]


def test_whatever_happens_no_descriptor_and_no_thread_is_left(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    before = open_files(), threading.active_count()
    for turn in range(3):
        with KVStore(directory, FEW, LARGE, EAGER) as store:
            put(store, *range(100 * turn, 100 * turn + 50), num_bytes=4096)
            got(store, range(300), 4096)
            for call in ("pwrite", "pread", "preadv"):
                with monkeypatch.context() as patch:
                    patch.setattr(os, call, fail)
                    put(store, 1000 + turn, num_bytes=4096)
                    got(store, range(300), 4096)
    assert (open_files(), threading.active_count()) == before
