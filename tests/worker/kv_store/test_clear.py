"""A store that is cleared finds nothing of what was there, here and in other processes, and goes on with what comes."""

import errno
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.runtime.telemetry import optional
from octavo.testing.small.kv_blocks import BLOCK_BYTES, EAGER, IDENTITY, finished, got, name_of, payload_of, put
from octavo.worker.kv_store.store import KVStore

CAPACITY = 1 << 20
OTHER = replace(IDENTITY, model="another")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture(autouse=True)
def nothing_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional, "_failing", set())


def test_nothing_is_found_of_what_was_there_by_anyone(directory: Path) -> None:
    with (
        KVStore(directory, CAPACITY, IDENTITY, EAGER) as store,
        KVStore(directory, CAPACITY, IDENTITY, EAGER) as beside,
        KVStore(directory, CAPACITY, OTHER, EAGER) as foreign,
    ):
        put(store, 1, 2)
        put(beside, 3)
        put(foreign, 4)
        assert got(beside, [1, 2, 3]) == [1, 2, 3]
        store.clear()
        assert got(store, [1, 2, 3]) == []
        assert store.flush(60)
        put(store, 2, 5)
        assert got(store, [1, 2, 3, 5]) == [2, 5]
        assert got(beside, [1, 2, 3, 5]) == [2, 5]
        assert got(foreign, [4]) == [4]
    with KVStore(directory, CAPACITY, IDENTITY) as store:
        assert got(store, [1, 2, 3, 5]) == [2, 5]


def test_what_waits_to_be_written_is_not_and_what_comes_after_is(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, entered, real = threading.Event(), threading.Event(), os.pwrite

    def wait(*arguments: Any) -> int:
        entered.set()
        assert released.wait(60)
        return real(*arguments)

    with KVStore(directory, CAPACITY, IDENTITY, EAGER) as store:
        monkeypatch.setattr(os, "pwrite", wait)
        for number in (1, 2):
            assert store.write(name_of(number), payload_of(number))
        assert entered.wait(60)
        # The disk hangs: neither clearing nor what follows waits for it.
        store.clear()
        assert got(store, [1, 2]) == []
        for number in (2, 3):
            assert store.write(name_of(number), payload_of(number))
        released.set()
        assert store.flush(60)
        assert got(store, [1, 2, 3]) == [2, 3]
        counts = store.stats().counts
        # A write that had waited in vain would be another one.
        assert (counts["forgotten"], counts.get("unwritten", 0)) == (1, 0)


def test_what_cannot_be_removed_is_not_found_either_until_it_can(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with KVStore(directory, CAPACITY, IDENTITY, EAGER) as store:
        put(store, 1)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", fail)
            store.clear()
            assert not store.flush(0.2)
            assert store.write(name_of(2), payload_of(2))
            assert not store.flush(0.2)
            assert got(store, [1, 2]) == []
        store.write(name_of(3), payload_of(3))
        assert store.flush(60)
        assert got(store, [1, 2, 3]) == [3]


def test_what_is_being_read_is_not_written_once_more(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released, entered, real = threading.Event(), threading.Event(), os.preadv

    def wait(*arguments: Any) -> int:
        entered.set()
        assert released.wait(60)
        return real(*arguments)

    with KVStore(directory, CAPACITY, IDENTITY, EAGER) as store:
        put(store, 1)
        # As if it lay in the oldest quarter: a read renews it.
        monkeypatch.setattr(store._index, "has_young", lambda name: False)
        monkeypatch.setattr(os, "preadv", wait)
        store.read([name_of(1)], [bytearray(BLOCK_BYTES)])
        assert entered.wait(60)
        store.clear()
        assert store.flush(60)
        released.set()
        finished(store)
        assert store.flush(60)
        assert got(store, [1]) == []
