"""What is lent to a store is written as it was lent, whenever its owner takes it back; and nobody waits for a disk."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from octavo.testing.small.kv_blocks import BLOCK_BYTES, IDENTITY, got, name_of, payload_of
from octavo.worker.kv_store.loan import Loan, Parts
from octavo.worker.kv_store.store import KVStore, StoreLimits

CAPACITY = 1 << 20
_LONG_S = 60


class Gate:
    """Keeps the writing thread waiting in the middle of a payload, as a disk that hangs does; counts the payloads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        self.num_payloads = 0
        real = os.pwrite

        def pwrite(descriptor: int, content: Any, offset: int) -> int:
            if len(content) != BLOCK_BYTES:
                return real(descriptor, content, offset)
            self.num_payloads += 1
            half = BLOCK_BYTES // 2
            real(descriptor, content[:half], offset)
            self.entered.set()
            assert self.opened.wait(_LONG_S)
            return half + real(descriptor, content[half:], offset + half)

        monkeypatch.setattr(os, "pwrite", pwrite)


def sound(_: Parts) -> bool:
    return True


def block(number: int) -> bytearray:
    return bytearray(payload_of(number))


def lend(store: KVStore, number: int, content: bytearray) -> Loan:
    [loan] = store.lend([(name_of(number), [memoryview(content)])], sound)
    assert loan is not None
    return loan


def overwrite(content: bytearray) -> None:
    content[:] = bytes(len(content))


def ends(store: KVStore) -> dict[str, int]:
    return store.stats().counts


def test_what_is_lent_is_written_from_where_it_lies(tmp_path: Path) -> None:
    parts = [memoryview(block(1))[:64], memoryview(block(1))[64:]]
    with KVStore(tmp_path / "kv", CAPACITY, IDENTITY) as store:
        [loan, again] = store.lend([(name_of(1), parts), (name_of(1), parts)], sound)
        assert loan is not None
        assert again is None
        assert store.flush(_LONG_S)
        assert (loan.is_over, loan.parts, loan.buffer) == (True, parts, None)
        store.take_back(loan)
        assert (loan.parts, loan.buffer) == (parts, None)
        assert ends(store) == {"written": 1, "kept": 1}
        assert got(store, [1]) == [1]


def test_what_is_taken_back_before_it_is_written_is_there_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, first, second = Gate(monkeypatch), block(1), block(2)
    with KVStore(tmp_path / "kv", CAPACITY, IDENTITY) as store:
        lend(store, 1, first)
        assert gate.entered.wait(_LONG_S)
        loan = lend(store, 2, second)
        store.take_back(loan)
        store.take_back(loan)
        overwrite(second)
        gate.opened.set()
        assert store.flush(_LONG_S)
        assert gate.num_payloads == 2
        assert got(store, [1, 2]) == [1, 2]


def test_what_is_taken_back_while_it_is_written_is_written_again_and_waits_for_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, content = Gate(monkeypatch), block(1)
    with KVStore(tmp_path / "kv", CAPACITY, IDENTITY) as store:
        loan = lend(store, 1, content)
        assert gate.entered.wait(_LONG_S)
        store.take_back(loan)
        overwrite(content)
        gate.opened.set()
        assert store.flush(_LONG_S)
        assert gate.num_payloads == 2
        assert ends(store) == {"written": 1}
        assert got(store, [1]) == [1]
        assert (store.stats().blocks, store.stats().counts.get("damaged", 0)) == (1, 0)


def test_what_is_taken_back_without_room_for_a_copy_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    contents = {number: block(number) for number in (1, 2, 3)}
    # Two blocks wait at most, and two copies.
    with KVStore(tmp_path / "kv", CAPACITY, IDENTITY, StoreLimits(write_bytes=1)) as store:
        loans = [lend(store, 1, contents[1])]
        assert gate.entered.wait(_LONG_S)
        loans.append(lend(store, 2, contents[2]))
        [refused] = store.lend([(name_of(3), [memoryview(contents[3])])], sound)
        assert refused is None
        taken = [store._take_buffer() for _ in range(2)]
        assert None not in taken
        for number, loan in enumerate(loans, 1):
            store.take_back(loan)
            assert (loan.parts, loan.buffer) == (None, None)
            overwrite(contents[number])
        gate.opened.set()
        assert store.flush(_LONG_S)
        assert ends(store) == {"dropped": 3}
        assert got(store, [1, 2]) == []
        store._spare += [buffer for buffer in taken if buffer is not None]
        # The slot of the first is filled by the next.
        lend(store, 4, block(4))
        assert store.flush(_LONG_S)
        assert got(store, [4]) == [4]


def test_buffers_of_copies_are_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with KVStore(tmp_path / "kv", CAPACITY, IDENTITY, StoreLimits(write_bytes=1)) as store:
        for number in range(6):
            content = block(number)
            store.take_back(lend(store, number, content))
            overwrite(content)
            assert store.flush(_LONG_S)
        assert got(store, range(6)) == list(range(6))


def test_what_is_not_sound_is_not_written(tmp_path: Path) -> None:
    with KVStore(tmp_path / "kv", CAPACITY, IDENTITY) as store:
        blocks = [(name_of(number), [memoryview(block(number))]) for number in (1, 2)]
        store.lend(blocks, lambda parts: bytes(parts[0]) != payload_of(1))
        assert store.flush(_LONG_S)
        assert ends(store) == {"unsound": 1, "written": 1}
        assert got(store, [1, 2]) == [2]


def test_what_was_not_sound_because_its_owner_had_it_back_is_looked_at_again(tmp_path: Path) -> None:
    looked, taken, content = threading.Event(), threading.Event(), block(1)

    def is_sound(parts: Parts) -> bool:
        looked.set()
        assert taken.wait(_LONG_S)
        return bytes(parts[0]) == payload_of(1)

    with KVStore(tmp_path / "kv", CAPACITY, IDENTITY) as store:
        [loan] = store.lend([(name_of(1), [memoryview(content)])], is_sound)
        assert loan is not None
        assert looked.wait(_LONG_S)
        store.take_back(loan)
        overwrite(content)
        taken.set()
        assert store.flush(_LONG_S)
        assert got(store, [1]) == [1]


def test_what_is_forgotten_while_it_is_lent_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with KVStore(tmp_path / "kv", CAPACITY, IDENTITY) as store:
        lend(store, 1, block(1))
        assert gate.entered.wait(_LONG_S)
        lend(store, 2, block(2))
        store.clear()
        gate.opened.set()
        assert store.flush(_LONG_S)
        assert got(store, [1, 2]) == []
