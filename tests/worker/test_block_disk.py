"""What plans have a worker's disk do: blocks are stored as they were before the plan, are there once its step is done,
and nothing of one life reaches the blocks of the next."""

import hashlib
import os
import re
import socket
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.testbed.tiny_model import write_byte_model
from octavo.testing.fakes.deferred import DeferredRunner
from octavo.testing.fakes.spoilable import SpoilableRunner
from octavo.testing.oracles.worker_plans import EPOCH, INCARNATION, moves, plan, sampling, start, work
from octavo.wire.steps import (
    BlockContent,
    BlocksFetched,
    DiskMoves,
    DiskUse,
    Heartbeat,
    KVDisk,
    SampledToken,
    StepOutcome,
    StepPlan,
    StepResult,
    WorkerHello,
    WorkerUnregistered,
    WorkerWelcome,
)
from octavo.worker import block_disk
from octavo.worker.block_disk import BlockDisk, opened_disk
from octavo.worker.fake.runner import FakeVocabulary, expected_tokens
from octavo.worker.kv_store.identity import block_name
from octavo.worker.kv_store.loan import Loan, Parts, Payload
from octavo.worker.kv_store.store import StoreStats, Ticket
from octavo.worker.protocol import WorkerProtocol

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]


class MemoryStore:
    """A `octavo.worker.block_disk.BlockStore` in memory, whose reads end when `serve` is called."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.lent: list[Loan] = []
        self.num_copied = 0
        self.reading: list[Ticket] = []
        self.buffers: set[int] = set()
        self._done: list[Ticket] = []
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)

    def lend(self, blocks: Iterable[tuple[bytes, Parts]], is_sound: Callable[[Parts], bool]) -> list[Loan | None]:
        loans = [Loan(name, parts, is_sound, 0) for name, parts in blocks]
        self.lent += loans
        return [*loans]

    def take_back(self, loan: Loan) -> None:
        assert loan.parts is not None
        loan.parts = [memoryview(bytes(part)) for part in loan.parts]
        self.num_copied += 1

    def write(self) -> None:
        """Writes what has been lent."""
        while self.lent:
            loan = self.lent.pop(0)
            assert loan.parts is not None
            loan.is_over = True
            if loan.is_sound(loan.parts):
                self.blocks[loan.name] = b"".join(loan.parts)

    def read(self, names: Sequence[bytes], buffers: Sequence[Payload]) -> Ticket:
        self.buffers |= set(map(id, buffers))
        self.reading.append(Ticket(names, [memoryview(buffer) for buffer in buffers]))
        return self.reading[-1]

    def serve(self) -> None:
        """Ends the oldest read, after what had been lent was written."""
        self.write()
        ticket = self.reading.pop(0)
        for name, buffer in zip(ticket.names, ticket.buffers, strict=True):
            ticket.found.append(name in self.blocks)
            buffer[:] = self.blocks.get(name, b"\xee" * len(buffer))
        self._done.append(ticket)

    def poll(self) -> list[Ticket]:
        done, self._done = self._done, []
        return done

    def fileno(self) -> int:
        return self._wake

    def clear(self) -> None:
        self.blocks.clear()
        self.lent.clear()

    def stats(self) -> StoreStats:
        return StoreStats(len(self.blocks), 40, 0, 0, {"evicted": 3})

    def close(self) -> None:
        os.close(self._wake)


def content(number: int, block_id: int, group: int = 0) -> BlockContent:
    return BlockContent(hashlib.sha256(b"%d" % number).digest(), group, block_id)


def disk_plan(plan: StepPlan, **disk: object) -> StepPlan:
    return msgspec.structs.replace(plan, disk=DiskMoves(**disk))  # type: ignore[arg-type]


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    store = MemoryStore()
    yield store
    store.close()


class Worker:
    """A worker's protocol over a fake model with 16 blocks of 4 tokens, 8 CPU blocks, and `store`."""

    def __init__(self, directory: Path, store: MemoryStore, kind: type[SpoilableRunner] = SpoilableRunner) -> None:
        if not (directory / "config.json").exists():
            write_byte_model(directory)
        self.directory = directory
        self.store = store
        self.runner = kind(directory, block_size=4, num_blocks=16, num_cpu_blocks=8)
        identity = self.runner.kv_identity
        self.disk = BlockDisk(store, KVDisk(0.5, mirror=True), identity.block_bytes, self.runner.fill_cpu_block)
        self.protocol = WorkerProtocol("w0", self.runner, count(INCARNATION).__next__, disk=self.disk)
        self.protocol.receive(WorkerWelcome(EPOCH))

    def ask(self, step: StepPlan) -> StepResult:
        self.protocol.receive(step)
        return self.protocol.answer()

    def done(self, step: StepPlan) -> StepResult:
        result = self.ask(step)
        assert result.outcome is StepOutcome.DONE, result.detail
        return result

    def cpu(self, block_id: int) -> list[int]:
        """Returns the tokens in a CPU block."""
        return self.runner._cache._cpu[4 * block_id : 4 * block_id + 4].tolist()

    def prefill(self) -> None:
        self.done(plan(1, starts=[start(9, PROMPT)], work=[work(9, 9, [3, 4, 5])]))


@pytest.fixture
def worker(tmp_path: Path, store: MemoryStore) -> Worker:
    return Worker(tmp_path, store)


def tokens_in(store: MemoryStore, number: int) -> list[int]:
    store.write()
    payload = store.blocks[block_name(content(number, 0).value, 0)]
    return memoryview(payload).cast("i").tolist()[:4]


def test_the_hello_tells_of_the_disk(tmp_path: Path, store: MemoryStore) -> None:
    worker = Worker(tmp_path, store)
    worker.protocol.receive(WorkerUnregistered(EPOCH))
    hello = worker.protocol.beat()
    assert isinstance(hello, WorkerHello)
    assert hello.kv_disk == KVDisk(0.5, mirror=True)
    store.blocks[b"name"] = b""
    worker.protocol.receive(WorkerWelcome(EPOCH))
    beat = worker.protocol.beat()
    assert isinstance(beat, Heartbeat)
    assert beat.disk == DiskUse(1, 40, 3)
    plain = WorkerProtocol("w0", worker.runner, lambda: 1)
    hello = plain.beat()
    assert isinstance(hello, WorkerHello)
    assert (hello.kv_disk, plain.filenos(), plain.arrivals()) == (None, [], [])


@pytest.mark.parametrize("kind", [SpoilableRunner, DeferredRunner])
def test_blocks_are_stored_as_they_were_before_the_plan_moves_and_computes(
    tmp_path: Path, store: MemoryStore, kind: type[SpoilableRunner]
) -> None:
    worker = Worker(tmp_path, store, kind)
    # Both are under way at once where the device defers them: the second stores what the first is yet to compute.
    worker.protocol.receive(plan(1, starts=[start(9, PROMPT)], work=[work(9, 9, [3, 4, 5])]))
    overwriting = plan(
        2,
        answered=0,
        moves=moves(copy=[(4, 3)]),
        starts=[start(8, [70, 71, 72, 73])],
        work=[work(8, 4, [4])],
    )
    worker.protocol.receive(disk_plan(overwriting, store=[content(1, 3), content(2, 4)]))
    assert [worker.protocol.answer().outcome for _ in range(2)] == [StepOutcome.DONE] * 2
    assert tokens_in(store, 1) == PROMPT[:4]
    assert tokens_in(store, 2) == PROMPT[4:8]
    assert worker.runner._cache.read([4], 0, 4) == array("i", [70, 71, 72, 73]).tobytes()


GIVEN = {
    "a new sequence": {"starts": [start(8, [70, 71, 72, 73])], "work": [work(8, 4, [4])]},
    "a swap": {"moves": moves(swap_in=[(2, 4)])},
    "a copy": {"moves": moves(copy=[(5, 4)])},
}


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN.keys())
def test_what_waits_to_be_written_is_copied_only_where_a_plan_gives_its_block_away(
    worker: Worker, store: MemoryStore, given: dict[str, Any]
) -> None:
    worker.prefill()
    worker.done(disk_plan(plan(2), store=[content(1, 3), content(2, 4)]))
    worker.done(plan(3, work=[work(9, 1)]))
    assert (len(store.lent), store.num_copied) == (2, 0)
    worker.done(plan(4, **given))
    assert store.num_copied == 1
    assert (tokens_in(store, 1), tokens_in(store, 2)) == (PROMPT[:4], PROMPT[4:8])
    assert worker.runner._cache.read([4], 0, 4) != array("i", PROMPT[4:8]).tobytes()
    # What has been written nobody has to copy.
    worker.done(disk_plan(plan(5), store=[content(3, 6)]))
    worker.done(plan(6, moves=moves(copy=[(5, 3)])))
    assert store.num_copied == 1


def test_what_waits_to_be_written_outlives_the_workers_life(worker: Worker, store: MemoryStore) -> None:
    worker.prefill()
    worker.done(disk_plan(plan(2), store=[content(1, 3)]))
    worker.protocol.receive(WorkerUnregistered(EPOCH))
    worker.protocol.receive(WorkerWelcome(EPOCH))
    next_life = plan(1, incarnation=INCARNATION + 1, starts=[start(1, [70, 71, 72, 73])], work=[work(1, 4, [3])])
    worker.done(next_life)
    assert tokens_in(store, 1) == PROMPT[:4]


@pytest.mark.parametrize("is_fast", [True, False])
def test_a_fetch_is_read_while_its_step_is_under_way_and_answered_once_after_it(
    worker: Worker, store: MemoryStore, is_fast: bool
) -> None:
    worker.prefill()
    worker.done(disk_plan(plan(2), store=[content(1, 3), content(2, 4)]))
    worker.protocol.receive(disk_plan(plan(3), fetch=[content(2, 6), content(77, 2), content(1, 0)]))
    before = [worker.cpu(place) for place in range(8)]
    assert worker.protocol.arrivals() == []
    if is_fast:
        store.serve()
        assert worker.protocol.arrivals() == []
    assert [worker.cpu(place) for place in range(8)] == before
    result = worker.protocol.answer()
    assert (result.step_id, result.outcome) == (3, StepOutcome.DONE)
    if not is_fast:
        assert worker.protocol.arrivals() == []
        store.serve()
    untouched = worker.cpu(2)
    assert worker.protocol.arrivals() == [BlocksFetched(EPOCH, INCARNATION, 3, [True, False, True])]
    assert (worker.cpu(6), worker.cpu(0), worker.cpu(2)) == (PROMPT[4:8], PROMPT[:4], untouched)
    assert worker.protocol.arrivals() == []


def test_what_another_worker_stored_goes_on_with_the_same_tokens(tmp_path: Path, store: MemoryStore) -> None:
    first = Worker(tmp_path, store)
    first.prefill()
    first.done(disk_plan(plan(2), store=[content(1, 3), content(2, 4)]))
    second = Worker(tmp_path, store)
    second.done(disk_plan(plan(1), fetch=[content(1, 0), content(2, 1)]))
    store.serve()
    assert second.protocol.arrivals() == [BlocksFetched(EPOCH, INCARNATION, 1, [True, True])]
    result = second.done(
        plan(
            2,
            moves=moves(swap_in=[(0, 10), (1, 11)]),
            starts=[start(9, PROMPT, num_computed=8)],
            work=[work(9, 1, [10, 11, 12])],
        )
    )
    [token] = expected_tokens(PROMPT, sampling(), 0, 1, FakeVocabulary.read(tmp_path))
    assert result.sampled == [SampledToken(9, token)]


def test_nothing_is_read_for_a_step_that_fails_or_is_skipped(worker: Worker, store: MemoryStore) -> None:
    worker.prefill()
    failing = worker.ask(disk_plan(plan(2, work=[work(404, 1)]), store=[content(1, 3)], fetch=[content(1, 0)]))
    skipped = worker.ask(disk_plan(plan(3, answered=1), store=[content(1, 3)], fetch=[content(1, 0)]))
    assert (failing.outcome, skipped.outcome) == (StepOutcome.FAILED, StepOutcome.SKIPPED)
    assert (store.reading, store.lent, worker.protocol.arrivals()) == ([], [], [])


def test_copies_of_a_step_that_fails_on_its_device_are_dropped(tmp_path: Path, store: MemoryStore) -> None:
    worker = Worker(tmp_path, store, DeferredRunner)
    worker.prefill()
    assert isinstance(worker.runner, DeferredRunner)
    worker.runner.fails = True
    before, buffers = worker.cpu(0), len(worker.disk._spare)
    worker.protocol.receive(disk_plan(plan(2, work=[]), store=[content(1, 3)], fetch=[content(1, 0)]))
    worker.protocol.receive(disk_plan(plan(3, answered=1), fetch=[content(1, 1)]))
    # What the first step fetches comes before it fails, what the second does later.
    store.blocks[block_name(content(1, 0).value, 0)] = bytes(range(32))
    store.serve()
    assert worker.protocol.arrivals() == []
    outcomes = [worker.protocol.answer().outcome for _ in range(2)]
    assert outcomes == [StepOutcome.FAILED, StepOutcome.SKIPPED]
    store.serve()
    assert (worker.protocol.arrivals(), store.lent, store.reading) == ([], [], [])
    assert (worker.cpu(0), worker.cpu(1)) == (before, before)
    assert len(worker.disk._spare) == buffers


def test_what_arrives_for_an_earlier_life_changes_nothing(worker: Worker, store: MemoryStore) -> None:
    worker.prefill()
    worker.done(disk_plan(plan(2), store=[content(1, 3)]))
    worker.done(disk_plan(plan(3), fetch=[content(1, 0)]))
    before = worker.cpu(0)
    worker.protocol.receive(WorkerUnregistered(EPOCH))
    store.serve()
    assert worker.protocol.arrivals() == []
    assert worker.cpu(0) == before != PROMPT[:4]
    # The next life fetches as if nothing had been.
    worker.protocol.receive(WorkerWelcome(EPOCH))
    worker.done(disk_plan(plan(1, incarnation=INCARNATION + 1), fetch=[content(1, 0)]))
    store.serve()
    assert worker.protocol.arrivals() == [BlocksFetched(EPOCH, INCARNATION + 1, 1, [True])]
    assert worker.cpu(0) == PROMPT[:4]


def test_what_was_yet_to_be_read_for_an_earlier_life_is_not(
    tmp_path: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_disk, "_PIECES", 1)
    worker = Worker(tmp_path, store)
    worker.prefill()
    worker.done(disk_plan(plan(2), store=[content(1, 3)]))
    for step_id in (3, 4):
        worker.done(disk_plan(plan(step_id), fetch=[content(1, step_id)]))
    # Done, and not answered: the plan after it makes the worker look.
    worker.protocol.receive(disk_plan(plan(5), fetch=[content(1, 5)]))
    worker.protocol.receive(plan(6))
    worker.protocol.receive(WorkerUnregistered(EPOCH))
    worker.protocol.receive(WorkerWelcome(EPOCH))
    for step_id in range(1, 6):
        worker.done(plan(step_id, incarnation=INCARNATION + 1))
    while store.reading:
        store.serve()
        assert worker.protocol.arrivals() == []
    assert [worker.cpu(place) for place in (3, 4, 5)] == [[-1] * 4] * 3


def test_a_reset_before_the_answer_fills_nothing(worker: Worker, store: MemoryStore) -> None:
    before, buffers = worker.cpu(0), len(worker.disk._spare)
    store.blocks[block_name(content(1, 0).value, 0)] = bytes(range(32))
    for step_id in (1, 2):
        worker.protocol.receive(disk_plan(plan(step_id, answered=0), fetch=[content(1, step_id - 1)]))
    store.serve()
    assert worker.protocol.arrivals() == []
    worker.protocol.receive(WorkerUnregistered(EPOCH))
    store.serve()
    worker.protocol.receive(WorkerWelcome(EPOCH))
    assert (worker.protocol.arrivals(), worker.protocol.busy) == ([], False)
    assert (worker.cpu(0), worker.cpu(1), len(worker.disk._spare)) == (before, before, buffers)


def test_long_fetches_take_turns_in_a_few_buffers(
    tmp_path: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_disk, "_PIECE_BYTES", 2 * 32)
    monkeypatch.setattr(block_disk, "_PIECES", 2)
    worker = Worker(tmp_path, store)
    assert worker.runner.kv_identity.block_bytes == 32
    worker.prefill()
    worker.done(disk_plan(plan(2), store=[content(1, 3), content(2, 4)]))
    worker.done(disk_plan(plan(3), fetch=[content(1 + place % 2, place) for place in range(5)]))
    worker.done(disk_plan(plan(4), fetch=[content(2, 5), content(3, 6)]))
    assert [len(ticket.names) for ticket in store.reading] == [2, 2]
    answers: list[BlocksFetched] = []
    while store.reading:
        store.serve()
        answers += [each for each in worker.protocol.arrivals() if isinstance(each, BlocksFetched)]
    assert [(each.step_id, each.found) for each in answers] == [(3, [True] * 5), (4, [True, False])]
    assert [worker.cpu(place) for place in range(6)] == [PROMPT[:4], PROMPT[4:8]] * 2 + [PROMPT[:4], PROMPT[4:8]]
    assert len(store.buffers) <= 4


def test_clearing_comes_before_storing_and_after_what_is_under_way(tmp_path: Path, store: MemoryStore) -> None:
    worker = Worker(tmp_path, store, DeferredRunner)
    worker.prefill()
    worker.protocol.receive(disk_plan(plan(2), store=[content(1, 3)]))
    worker.protocol.receive(disk_plan(plan(3, answered=1), clear=True, store=[content(2, 4)]))
    assert [worker.protocol.answer().outcome for _ in range(2)] == [StepOutcome.DONE] * 2
    store.write()
    assert list(store.blocks) == [block_name(content(2, 0).value, 0)]


def test_a_plan_that_is_skipped_clears_all_the_same(worker: Worker, store: MemoryStore) -> None:
    worker.prefill()
    worker.done(disk_plan(plan(2), store=[content(1, 3)]))
    assert worker.ask(plan(3, work=[work(404, 1)])).outcome is StepOutcome.FAILED
    assert worker.ask(disk_plan(plan(4, answered=2), clear=True)).outcome is StepOutcome.SKIPPED
    store.write()
    assert store.blocks == {}


def test_a_worker_without_a_disk_refuses_what_is_for_one(tmp_path: Path, store: MemoryStore) -> None:
    runner = Worker(tmp_path, store).runner
    protocol = WorkerProtocol("w0", runner, count(INCARNATION).__next__)
    protocol.receive(WorkerWelcome(EPOCH))
    protocol.receive(disk_plan(plan(1), fetch=[content(1, 0)]))
    result = protocol.answer()
    assert (result.outcome, "a worker with a disk" in result.detail) == (StepOutcome.FAILED, True)


@pytest.mark.parametrize(
    ("disk", "why"),
    [
        ({"store": [content(1, 16)]}, "stores block 16 of KV group 0; there are 16 blocks and 1 groups"),
        ({"store": [content(1, 3, group=1)]}, "stores block 3 of KV group 1"),
        ({"fetch": [content(1, 8)]}, "fetches into block 8 of KV group 0; there are 8 blocks"),
        ({"fetch": [content(1, 0), content(2, 0)]}, "fetches two blocks into one"),
        ({"fetch": [content(1, 6)]}, r"fetches into CPU blocks \[6\] that it moves"),
        ({"fetch": [content(1, 7), content(2, 2)]}, r"fetches into CPU blocks \[7\] that it moves"),
    ],
)
def test_what_contradicts_the_blocks_or_the_moves_is_refused(
    worker: Worker, store: MemoryStore, disk: dict[str, list[BlockContent]], why: str
) -> None:
    result = worker.ask(disk_plan(plan(1, moves=moves(swap_out=[(0, 6)], swap_in=[(7, 1)])), **disk))
    assert result.outcome is StepOutcome.FAILED
    assert re.search(why, result.detail), result.detail
    assert (store.reading, store.lent) == ([], [])


def test_the_place_of_a_disk_can_be_told_whatever_its_name(tmp_path: Path) -> None:
    identity = Worker(tmp_path, MemoryStore()).runner.kv_identity
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/kv-\xff"))
    with opened_disk(odd, 1 << 24, identity, lambda block_id, payload: None, mirror=False, measures=False) as disk:
        description = disk.description
    assert description.place == f"{socket.gethostname()}:{tmp_path}/kv-\ufffd"
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(description), type=KVDisk) == description
