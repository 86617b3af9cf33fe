"""Who gets through to the scheduler's sockets, over real connections, and what the logs say of who does not."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from octavo.runtime.transport.curve_keys import ClientKeys, Peer, read_client_keys, read_server_keys, write_keys
from octavo.runtime.transport.handshakes import Complaints
from octavo.runtime.transport.sockets import bind_router, connect_dealer

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]

_PATIENCE_S = 60


@pytest.fixture
def context() -> Iterator[Context]:
    with zmq.Context() as context:
        yield context


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made") / "keys"
    write_keys(directory)
    return directory


@pytest.fixture(scope="module")
def other_keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made") / "other"
    write_keys(directory)
    return directory


@contextmanager
def door(context: Context, keys: Path | None, admits: Peer = "worker") -> Iterator[tuple[Socket, str]]:
    """A socket of the scheduler, and its address."""
    server_keys = None if keys is None else read_server_keys(keys, admits)
    with bind_router(context, "tcp://127.0.0.1:0", server_keys) as router:
        yield router, router.get_string(zmq.LAST_ENDPOINT)


def arrives(dealer: Socket, router: Socket) -> bool:
    """Whether a message goes through, both ways."""
    assert dealer.poll(_PATIENCE_S * 1000, zmq.POLLOUT), "no connection"
    dealer.send(b"question")
    sender, message = router.recv_multipart()
    router.send_multipart([sender, b"answer"])
    return message == b"question" and dealer.recv() == b"answer"


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "the awaited line was not logged"
        time.sleep(0.005)


def stays_out(dealer: Socket, router: Socket, caplog: pytest.LogCaptureFixture, *lines: str) -> bool:
    """Whether it is out once all lines are logged."""
    wait_for(lambda: all(line in caplog.text for line in lines))
    return not dealer.poll(0, zmq.POLLOUT) and not router.poll(0)


@pytest.mark.parametrize("peer", ["frontend", "worker"])
def test_a_peer_with_its_own_key_gets_in(
    context: Context, keys: Path, peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        door(context, keys, peer) as (router, address),
        connect_dealer(context, address, read_client_keys(keys, peer)) as dealer,
    ):
        assert dealer.getsockopt(zmq.MECHANISM) == zmq.CURVE
        assert arrives(dealer, router)
    assert not caplog.records


def test_two_doors_of_one_context_each_let_in_their_own(
    context: Context, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    frontend_keys, worker_keys = read_client_keys(keys, "frontend"), read_client_keys(keys, "worker")
    with (
        door(context, keys, "frontend") as (frontends, frontend_address),
        door(context, keys, "worker") as (workers, worker_address),
        connect_dealer(context, frontend_address, frontend_keys) as frontend,
        connect_dealer(context, worker_address, worker_keys) as worker,
        connect_dealer(context, frontend_address, worker_keys) as lost,
    ):
        assert arrives(frontend, frontends)
        assert arrives(worker, workers)
        assert stays_out(lost, frontends, caplog, "kept out a peer at '127.0.0.1': its key is not the frontend's")


def test_the_key_of_another_run_stays_out(
    context: Context, keys: Path, other_keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = read_client_keys(other_keys, "worker")
    stolen = ClientKeys(stranger.public, stranger.secret, read_client_keys(keys, "worker").scheduler)
    with door(context, keys) as (router, address), connect_dealer(context, address, stolen) as dealer:
        lines = [
            "its key is not the worker's",
            f"scheduler at {address} does not let this process in: it does not know",
        ]
        assert stays_out(dealer, router, caplog, *lines)


def test_a_peer_that_takes_the_scheduler_for_another_stays_out(
    context: Context, keys: Path, other_keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        door(context, keys) as (router, address),
        connect_dealer(context, address, read_client_keys(other_keys, "worker")) as dealer,
    ):
        lines = ["its scheduler.public is not the public key of this scheduler", "scheduler.public may be the key of"]
        assert stays_out(dealer, router, caplog, *lines)


def test_a_peer_without_keys_stays_out(context: Context, keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    with door(context, keys) as (router, address), connect_dealer(context, address) as dealer:
        lines = ["it has no keys; a worker needs --curve-keys", "does not let this process in", "give --curve-keys"]
        assert stays_out(dealer, router, caplog, *lines)


def test_a_scheduler_without_keys_gets_nothing_from_a_peer_with_keys(
    context: Context, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        door(context, None) as (router, address),
        connect_dealer(context, address, read_client_keys(keys, "worker")) as dealer,
    ):
        assert stays_out(dealer, router, caplog, f"the scheduler at {address} does not let this process in")


def test_a_peer_that_was_kept_out_gets_in_once_the_scheduler_has_the_right_keys(
    context: Context, keys: Path, other_keys: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    address, mine = f"ipc://{tmp_path}/s.sock", read_client_keys(keys, "worker")
    with connect_dealer(context, address, mine) as dealer:
        with bind_router(context, address, read_server_keys(other_keys, "worker")) as router:
            assert stays_out(dealer, router, caplog, "does not let this process in")
        with bind_router(context, address, read_server_keys(keys, "worker")) as router:
            assert arrives(dealer, router)


def test_strangers_do_not_hinder_a_peer_that_is_in(
    context: Context, keys: Path, other_keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        door(context, keys) as (router, address),
        connect_dealer(context, address) as bare,
        connect_dealer(context, address, read_client_keys(other_keys, "worker")) as wrong,
        connect_dealer(context, address, read_client_keys(keys, "worker")) as right,
    ):
        wait_for(lambda: caplog.text.count("does not let this process in") >= 2)
        assert all(arrives(right, router) for _ in range(100))
        assert not bare.poll(0, zmq.POLLOUT)
        assert not wrong.poll(0, zmq.POLLOUT)


def test_a_door_without_a_gate_stays_shut(
    context: Context, keys: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.runtime.transport.sockets.open_gate", lambda context: None)
    monkeypatch.setattr("octavo.runtime.transport.sockets._HANDSHAKE_MS", 200)
    with (
        door(context, keys) as (router, address),
        connect_dealer(context, address, read_client_keys(keys, "worker")) as dealer,
    ):
        assert stays_out(dealer, router, caplog, "does not let this process in")


def test_what_repeats_is_logged_once_in_ten_seconds_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    times = iter([0.0, 1.0, 9.9, 10.0, 12.0])
    complaints = Complaints(lambda: next(times))
    for _ in range(5):
        complaints.add("kept out")
    assert [record.getMessage() for record in caplog.records] == ["kept out (1 so far)", "kept out (4 so far)"]
    assert complaints.count == 5
