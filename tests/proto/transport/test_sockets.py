import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from octavo.runtime.transport.endpoints import EndpointError
from octavo.runtime.transport.sockets import bind_router, connect_dealer
from octavo.wire.base import MAX_MESSAGE_BYTES


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    with zmq.Context() as context:
        yield context


def test_every_socket_carries_the_guards(context: "zmq.Context[zmq.Socket[bytes]]", tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/s.sock"
    with bind_router(context, endpoint) as router, connect_dealer(context, endpoint) as dealer:
        for socket in (router, dealer):
            assert socket.getsockopt(zmq.MAXMSGSIZE) == MAX_MESSAGE_BYTES
            assert 0 < int(socket.getsockopt(zmq.SNDHWM)) <= 4096
            assert 0 < int(socket.getsockopt(zmq.RCVHWM)) <= 4096
            assert socket.getsockopt(zmq.LINGER) == 0
            assert int(socket.getsockopt(zmq.HEARTBEAT_IVL)) > 0
            assert int(socket.getsockopt(zmq.HANDSHAKE_IVL)) > 0


def test_a_libzmq_with_known_holes_is_refused(
    context: "zmq.Context[zmq.Socket[bytes]]", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq, "zmq_version_info", lambda: (4, 3, 4))
    for make in (bind_router, connect_dealer):
        with pytest.raises(EndpointError, match=r"libzmq is 4\.3\.4, and 4\.3\.5 or newer is needed; upgrade pyzmq"):
            make(context, f"ipc://{tmp_path}/s.sock")


def test_a_router_says_when_its_peer_is_gone(context: "zmq.Context[zmq.Socket[bytes]]", tmp_path: Path) -> None:
    with bind_router(context, f"ipc://{tmp_path}/s.sock") as router, pytest.raises(zmq.ZMQError) as error:
        router.send_multipart([b"nobody", b"message"], zmq.NOBLOCK)
    assert error.value.errno == zmq.EHOSTUNREACH


def send_for_ever(router: "zmq.Socket[bytes]", name: bytes) -> None:
    while not router.poll(10):
        router.send_multipart([name, b"message"], zmq.NOBLOCK)


def test_the_end_of_a_connection_is_told(context: "zmq.Context[zmq.Socket[bytes]]", tmp_path: Path) -> None:
    endpoint, ended = f"ipc://{tmp_path}/s.sock", threading.Event()
    with bind_router(context, endpoint, on_disconnect=ended.set) as router:
        with connect_dealer(context, endpoint) as dealer:
            dealer.send(b"hello")
            name, _ = router.recv_multipart()
            assert not ended.is_set()
        assert ended.wait(60)
        with pytest.raises(zmq.ZMQError) as error:
            send_for_ever(router, name)
    assert error.value.errno == zmq.EHOSTUNREACH


def test_nothing_queues_for_a_scheduler_that_is_away(context: "zmq.Context[zmq.Socket[bytes]]", tmp_path: Path) -> None:
    with connect_dealer(context, f"ipc://{tmp_path}/nobody.sock") as dealer, pytest.raises(zmq.Again):
        dealer.send(b"message", zmq.NOBLOCK)


def test_a_message_above_the_limit_never_arrives(context: "zmq.Context[zmq.Socket[bytes]]", tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/s.sock"
    with bind_router(context, endpoint) as router, connect_dealer(context, endpoint) as dealer:
        dealer.send(b"x" * (MAX_MESSAGE_BYTES + 1))
        # The router cuts the connection; the next message comes over a new one.
        while not router.poll(50):
            if dealer.poll(0, zmq.POLLOUT):
                dealer.send(b"small")
        assert router.recv_multipart()[1] == b"small"
