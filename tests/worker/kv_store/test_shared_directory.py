"""Processes that share a directory find each other's blocks, keep within its capacity, and survive each other's
deaths."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.runtime.telemetry import optional
from octavo.testing.small.kv_blocks import EAGER, IDENTITY, finished, got, name_of, put
from octavo.worker.kv_store import room
from octavo.worker.kv_store.store import KVStore
from octavo.worker.kv_store.upkeep import clear

LARGE = replace(IDENTITY, block_bytes=4096)
# Twenty segments of two blocks each.
CAPACITY, SEGMENT = 16 * 20_480, 16_384

# Does what it is told, and says what came of it. What it finds must be right.
PROCESS = """
import json, os, random, signal, sys
from pathlib import Path
from octavo.testing.small.kv_blocks import *
from octavo.worker.kv_store import room
from octavo.worker.kv_store.store import KVStore
from dataclasses import replace

directory = Path(sys.argv[1])
identity = replace(IDENTITY, block_bytes=4096)
largest = 0
# However busy the machine is.
room._LOCK_WAIT_S = 60.0

def stress(first, turns):
    global largest
    chance = random.Random(first)
    for turn in range(turns):
        store.write(name_of(first + turn), payload_of(first + turn, 4096))
        wanted = [chance.randrange(max(0, turn - 20), turn + 20) for _ in range(4)]
        got(store, [*wanted, *(1000 + number for number in wanted)], 4096)
        if turn % 5 == 0:
            # Nothing is made or removed while it looks.
            with room.locked(directory):
                largest = max(largest, sum(file.num_bytes for file in room.all_segments(directory)))
    assert store.flush(60)
    return [largest, store.stats().counts]

def die(calls):
    # Kills this process in the midst of a later call.
    real = os.pwrite

    def pwrite(descriptor, content, offset):
        nonlocal calls
        calls -= 1
        if calls < 0:
            real(descriptor, content[: len(content) // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(descriptor, content, offset)

    os.pwrite = pwrite

def say(what):
    print(json.dumps(what), flush=True)

with KVStore(directory, 16 * 20_480, identity, EAGER) as store:
    for line in sys.stdin:
        what, *numbers = json.loads(line)
        if what == "stress":
            say(stress(*numbers))
        elif what == "die":
            die(numbers[0])
            put(store, *numbers[1:], num_bytes=4096)
        elif what == "write":
            put(store, *numbers, num_bytes=4096)
            say("written")
        else:
            say(got(store, numbers, 4096))
"""


class Process:
    """Holds a store in a process of its own."""

    def __init__(self, directory: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
        command = [sys.executable, "-c", PROCESS, str(directory)]
        self.started = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.started.kill()
        self.started.communicate()

    def tell(self, what: str, *numbers: int) -> None:
        assert self.started.stdin
        self.started.stdin.write(json.dumps([what, *numbers]) + "\n")
        self.started.stdin.flush()

    def said(self) -> Any:
        assert self.started.stdout
        return json.loads(self.started.stdout.readline())

    def asked(self, what: str, *numbers: int) -> Any:
        self.tell(what, *numbers)
        return self.said()


def test_a_block_that_one_store_wrote_another_reads(tmp_path: Path) -> None:
    with (
        KVStore(tmp_path / "kv", CAPACITY, LARGE, EAGER) as one,
        KVStore(tmp_path / "kv", CAPACITY, LARGE, EAGER) as two,
    ):
        for number in range(10):
            put((one, two)[number % 2], number, num_bytes=4096)
            assert got(one, range(10), 4096) == got(two, range(10), 4096) == [*range(number + 1)]
        # To ask for a block has segments looked for too; that was done when a later read ends.
        put(one, 10, num_bytes=4096)
        assert name_of(10) not in two
        while name_of(10) not in two:
            two.read([name_of(0)], [bytearray(4096)])
            finished(two)


def test_two_processes_write_and_make_room_and_find_nothing_wrong(tmp_path: Path) -> None:
    with Process(tmp_path / "kv") as one, Process(tmp_path / "kv") as two:
        one.tell("stress", 0, 150)
        two.tell("stress", 1000, 150)
        for process in (one, two):
            largest, counts = process.said()
            # The other one's segment may grow after room was made.
            assert CAPACITY - 3 * SEGMENT <= largest <= CAPACITY + SEGMENT
            assert counts["written"] >= 140
            assert counts["found"] > 0
            assert not {"damaged", "failed", "unwritten"} & counts.keys()
        assert one.asked("write", *range(2000, 2005)) == "written"
        assert two.asked("read", *range(2000, 2005)) == [*range(2000, 2005)]


def test_a_process_that_is_killed_while_it_writes_leaves_what_it_has_written(tmp_path: Path) -> None:
    with Process(tmp_path / "kv") as survivor:
        # A header; payload and entry of a block, and of another, which fills the segment; the next.
        for killed_at, whole in {1: 0, 4: 1, 5: 2, 8: 3}.items():
            numbers = range(10 * killed_at, 10 * killed_at + 5)
            with Process(tmp_path / "kv") as killed:
                killed.tell("die", killed_at, *numbers)
                assert killed.started.wait() == -signal.SIGKILL
            assert survivor.asked("read", *numbers) == [*numbers[:whole]]
            assert survivor.asked("write", *numbers) == "written"
            with KVStore(tmp_path / "kv", CAPACITY, LARGE) as store:
                assert got(store, numbers, 4096) == [*numbers]


def test_a_process_that_is_stopped_with_the_lock_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(optional, "_failing", set())
    monkeypatch.setattr(room, "_LOCK_WAIT_S", 0.0)
    with KVStore(tmp_path / "kv", CAPACITY, LARGE, EAGER) as store:
        put(store, 1, num_bytes=4096)
        with room.locked(tmp_path / "kv"):
            # This segment has a slot left; the next cannot be begun.
            put(store, 2, 3, num_bytes=4096)
            assert got(store, [1, 2, 3], 4096) == [1, 2]
        put(store, 3, num_bytes=4096)
        assert got(store, [1, 2, 3], 4096) == [1, 2, 3]
    (line,) = caplog.messages
    assert line.startswith("kv disk writes: [Errno 11] Resource temporarily unavailable; blocks there are still read")


def test_what_another_process_removes_is_not_found_and_written_anew(tmp_path: Path) -> None:
    with KVStore(tmp_path / "kv", CAPACITY, LARGE, EAGER) as store:
        put(store, 1, 2, 3, num_bytes=4096)
        assert len(clear(tmp_path / "kv")) == 2
        assert got(store, [1, 2, 3], 4096) == []
        put(store, 1, 4, num_bytes=4096)
        assert got(store, [1, 2, 3, 4], 4096) == [1, 4]
        assert store.stats().blocks == 2


def test_what_another_process_removes_is_written_anew_though_nobody_reads_it(tmp_path: Path) -> None:
    with KVStore(tmp_path / "kv", CAPACITY, LARGE, replace(EAGER, readers=1)) as store:
        put(store, 1, num_bytes=4096)
        clear(tmp_path / "kv")
        # This has segments looked for, before the read that comes after.
        put(store, 1, num_bytes=4096)
        assert got(store, [2], 4096) == []
        put(store, 1, num_bytes=4096)
        assert store.stats().counts["written"] == 2
        assert got(store, [1], 4096) == [1]
