"""Copies of other workers' blocks: piece by piece, into CPU blocks of this worker, for one life of it; and between two
workers over sockets."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
import zmq

from octavo.runtime.transport.curve_keys import ClientKeys, read_client_keys, write_keys
from octavo.wire.codec import encode
from octavo.wire.peers import BlocksRead, ReadBlocks
from octavo.wire.steps import BlockMove, BlockServer, PullBlocks
from octavo.worker import block_exchange, block_pulls
from octavo.worker.block_exchange import BlockExchange, chosen_endpoint, opened_exchange
from octavo.worker.block_pulls import Answer, BlockPulls, Exchange, answer_to
from octavo.worker.kv_store.loan import Payload

OWN, OTHER, EPOCH = 11, 22, 99
BLOCK = 4


def content(block_id: int) -> bytes:
    """What a block of the other worker holds."""
    return block_id.to_bytes(BLOCK, "little")


def peek(block_ids: Sequence[int], in_cpu: bool) -> list[Payload] | None:
    """The other worker's blocks: a hundred on the device, and as many beyond a thousand in CPU memory."""
    return None if max(block_ids) >= 100 else [content(each + 1000 * in_cpu) for each in block_ids]


class Replies(Exchange):
    """Answers reads when it is told to, as the other worker would."""

    endpoint = "here"

    def __init__(self) -> None:
        self.incarnation = 0
        self.asked: list[ReadBlocks] = []
        self.ready: list[Answer] = []

    def ask(self, endpoint: str, read: ReadBlocks) -> None:
        assert endpoint == "there"
        self.asked.append(read)

    def answers(self) -> list[Answer]:
        ready, self.ready = self.ready, []
        return ready

    def fileno(self) -> int:
        return -1

    def answer(self, count: int = 1) -> None:
        for _ in range(count):
            self.ready.append(answer_to(self.asked.pop(0), OTHER, peek))


class Puller:
    """A worker that pulls, its CPU blocks and its clock."""

    def __init__(self) -> None:
        self.exchange, self.cpu, self.now = Replies(), dict[int, bytes](), 0.0
        self.pulls = BlockPulls(self.exchange, "same", BLOCK, self._fill, lambda: self.now)
        self.pulls.serve_as(OWN)

    def _fill(self, block_id: int, payload: Payload) -> None:
        self.cpu[block_id] = bytes(payload)

    def pull(self, count: int, pull_id: int = 1, after: int = 0, source: int = OTHER) -> None:
        moves = [BlockMove(index, 50 + index) for index in range(count)]
        self.pulls.pull(PullBlocks(EPOCH, OWN, pull_id, after, "there", source, from_cpu=False, moves=moves))


@pytest.fixture
def puller(monkeypatch: pytest.MonkeyPatch) -> Puller:
    monkeypatch.setattr(block_pulls, "_READ_BYTES", 2 * BLOCK)
    return Puller()


def test_all_blocks_come_some_at_a_time_and_the_pull_is_answered_once(puller: Puller) -> None:
    puller.pull(11)
    assert [read.block_ids for read in puller.exchange.asked] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    puller.exchange.answer(2)
    assert puller.pulls.pulled(0) == []
    assert [read.block_ids for read in puller.exchange.asked] == [[4, 5], [6, 7], [8, 9], [10]]
    puller.exchange.answer(4)
    assert puller.pulls.pulled(0) == [(1, True)]
    assert puller.cpu == {50 + index: content(index) for index in range(11)}
    assert puller.pulls.pulled(0) == []


def test_nothing_is_written_before_the_step_is_done(puller: Puller) -> None:
    puller.pull(2, after=7)
    puller.exchange.answer()
    assert (puller.pulls.pulled(6), puller.cpu) == ([], {})
    assert puller.pulls.pulled(7) == [(1, True)]
    assert puller.cpu == {50: content(0), 51: content(1)}


@pytest.mark.parametrize("fault", ["another life", "no such block", "cut short", "too few"])
def test_what_does_not_come_whole_has_failed(puller: Puller, fault: str) -> None:
    puller.pull(2 if fault != "no such block" else 101, source=OWN if fault == "another life" else OTHER)
    if fault in ("cut short", "too few"):
        payloads = [content(0), content(1)[:3]] if fault == "cut short" else [content(0)]
        puller.exchange.ready.append((BlocksRead(puller.exchange.asked[0].read_id, found=True), payloads))
    else:
        while puller.exchange.asked:
            puller.exchange.answer()
            if over := puller.pulls.pulled(0):
                assert over == [(1, False)]
                return
    assert puller.pulls.pulled(0) == [(1, False)]


def test_a_worker_that_is_silent_is_given_up_and_what_it_says_later_is_dropped(puller: Puller) -> None:
    puller.pull(3)
    puller.now = 4.0
    puller.exchange.answer()
    assert puller.pulls.pulled(0) == []
    puller.now = 8.0
    assert puller.pulls.pulled(0) == []
    puller.now = 9.1
    assert puller.pulls.pulled(0) == [(1, False)]
    written = dict(puller.cpu)
    puller.exchange.answer()
    assert puller.pulls.pulled(0) == []
    assert puller.cpu == written


def test_nothing_of_one_life_reaches_the_blocks_of_the_next(puller: Puller) -> None:
    puller.pull(2)
    puller.exchange.answer()
    puller.pulls.serve_as(OWN + 1)
    assert (puller.pulls.pulled(0), puller.cpu) == ([], {})
    assert puller.exchange.incarnation == OWN + 1


def test_what_is_refused_is_answered_once(puller: Puller) -> None:
    puller.pulls.refuse(PullBlocks(EPOCH, OWN, 5, 0, "there", OTHER, from_cpu=False, moves=[BlockMove(0, 1)]))
    assert puller.pulls.pulled(0) == [(5, False)]
    assert puller.pulls.pulled(0) == []
    assert puller.exchange.asked == []


def test_others_are_told_where_and_for_whom_blocks_are_read(puller: Puller) -> None:
    assert puller.pulls.description == BlockServer("here", "same", has_device=True)


# -- over sockets -----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["ipc", "tcp", "keys"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[BlockExchange, BlockExchange]]:
    """Two workers' exchanges; the second has the blocks."""
    keys: ClientKeys | None = None
    if request.param == "keys":
        write_keys(tmp_path / "keys")
        keys = read_client_keys(tmp_path / "keys", "worker")
    with ExitStack() as opened:
        ends = []
        for name in ("one", "two"):
            endpoint = f"ipc://{tmp_path}/{name}" if request.param == "ipc" else "tcp://127.0.0.1:*"
            ends.append(opened.enter_context(opened_exchange(endpoint, peek, keys)))
        ends[1].incarnation = OTHER
        yield ends[0], ends[1]


def answers_of(exchange: BlockExchange, count: int) -> list[Answer]:
    """Waits for so many answers."""
    poller = zmq.Poller()
    poller.register(exchange.fileno(), zmq.POLLIN)
    found: list[Answer] = []
    until = time.monotonic() + 60
    while len(found) < count and time.monotonic() < until:
        poller.poll(1000)
        found += exchange.answers()
    return found


def test_a_worker_reads_another_ones_blocks(pair: tuple[BlockExchange, BlockExchange]) -> None:
    here, there = pair
    for read_id, in_cpu in ((1, False), (2, True)):
        here.ask(there.endpoint, ReadBlocks(read_id, OTHER, from_cpu=in_cpu, block_ids=[3, 9]))
    found = {header.read_id: [bytes(each) for each in payloads] for header, payloads in answers_of(here, 2)}
    assert found == {1: [content(3), content(9)], 2: [content(1003), content(1009)]}


def test_a_worker_gives_nothing_of_another_life_and_no_block_that_it_has_not(
    pair: tuple[BlockExchange, BlockExchange],
) -> None:
    here, there = pair
    here.ask(there.endpoint, ReadBlocks(1, OWN, from_cpu=False, block_ids=[3]))
    here.ask(there.endpoint, ReadBlocks(2, OTHER, from_cpu=False, block_ids=[3, 100]))
    assert [(header, list(payloads)) for header, payloads in answers_of(here, 2)] == [
        (BlocksRead(1, found=False), []),
        (BlocksRead(2, found=False), []),
    ]


def test_reads_wait_for_a_worker_that_is_yet_to_come(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/late"
    with opened_exchange(f"ipc://{tmp_path}/early", peek, None) as here:
        # Until it knows better, it is as it was made.
        here.ask(endpoint, ReadBlocks(1, 0, from_cpu=False, block_ids=[3]))
        with opened_exchange(endpoint, peek, None):
            ((header, payloads),) = answers_of(here, 1)
            assert (header.found, [bytes(each) for each in payloads]) == (True, [content(3)])


def test_what_is_no_read_harms_nobody(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/one"
    good = encode(ReadBlocks(1, OTHER, from_cpu=False, block_ids=[3]))
    bad = [
        [b""],
        [b"\xc1"],
        [good[:-1]],
        [good, good],
        [encode(BlocksRead(1, found=True))],
        [msgspec.msgpack.encode(7)],
    ]
    with opened_exchange(endpoint, peek, None) as there, zmq.Context() as context:
        there.incarnation = OTHER
        with context.socket(zmq.DEALER) as stranger:
            stranger.connect(endpoint)
            for frames in (*bad, [good]):
                stranger.send_multipart(frames)
            assert stranger.poll(60_000)
            assert stranger.recv_multipart()[1:] == [content(3)]


def test_a_place_that_is_none_and_many_that_are_gone_harm_nobody(tmp_path: Path) -> None:
    with (
        opened_exchange(f"ipc://{tmp_path}/one", peek, None) as here,
        opened_exchange(f"ipc://{tmp_path}/two", peek, None) as there,
    ):
        there.incarnation = OTHER
        gone = [f"ipc://{tmp_path}/gone-{number}" for number in range(2 * block_exchange._MAX_CONNECTIONS)]
        for number, endpoint in enumerate(["nowhere", "tcp://host:port", "", *gone, there.endpoint]):
            here.ask(endpoint, ReadBlocks(number, OTHER, from_cpu=False, block_ids=[3]))
        ((header, payloads),) = answers_of(here, 1)
        assert (header.found, [bytes(each) for each in payloads]) == (True, [content(3)])
        assert len(here._dealers) == block_exchange._MAX_CONNECTIONS


def test_the_address_is_of_the_kind_at_which_the_scheduler_is_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_RUNTIME_DIR", str(tmp_path / "run"))
    long = "w" * 128
    local = chosen_endpoint("", "ipc:///somewhere/workers.sock", long)
    assert local.startswith(f"ipc://{tmp_path}/run/blocks-")
    assert local != chosen_endpoint("", "ipc:///somewhere/workers.sock", "other")
    assert chosen_endpoint("", "tcp://localhost:5555", long) == "tcp://127.0.0.1:*"
    assert chosen_endpoint("tcp://10.0.0.1:7", "tcp://localhost:5555", long) == "tcp://10.0.0.1:7"
