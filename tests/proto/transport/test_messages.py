"""Messages pass whole, or not at all, and nobody waits for them."""

from pathlib import Path

import pytest
import zmq

from octavo.runtime.transport.messages import has_arrived, may_send, receive, send, send_to
from octavo.runtime.transport.sockets import connect_dealer

Socket = zmq.Socket[bytes]
_LONG_MS = 60_000


def test_a_message_comes_with_all_its_frames_and_no_others(ends: tuple[Socket, Socket]) -> None:
    router, dealer = ends
    many = [b"", b"x" * 100_000, b"z"]
    send(dealer, b"one")
    dealer.send_multipart(many)
    assert router.poll(_LONG_MS)
    assert receive(router)[1:] == [b"one"]
    assert router.poll(_LONG_MS)
    assert receive(router)[1:] == many


def test_an_answer_goes_to_the_connection_it_is_for(ends: tuple[Socket, Socket]) -> None:
    router, dealer = ends
    send(dealer, b"question")
    assert router.poll(_LONG_MS)
    connection, _ = receive(router)
    send_to(router, connection, b"answer")
    assert dealer.poll(_LONG_MS)
    assert receive(dealer) == [b"answer"]


def test_what_is_for_nobody_is_refused_and_leaves_nothing_behind(ends: tuple[Socket, Socket]) -> None:
    router, dealer = ends
    send(dealer, b"question")
    assert router.poll(_LONG_MS)
    connection, _ = receive(router)
    with pytest.raises(zmq.ZMQError):
        send_to(router, b"nobody", b"lost")
    send_to(router, connection, b"answer")
    assert dealer.poll(_LONG_MS)
    assert receive(dealer) == [b"answer"]


def test_nobody_waits_where_nothing_has_come_or_can_leave(tmp_path: Path) -> None:
    with zmq.Context() as context, connect_dealer(context, f"ipc://{tmp_path}/nobody") as dealer:
        assert not has_arrived(dealer)
        assert not may_send(dealer)
        with pytest.raises(zmq.Again):
            receive(dealer)
        with pytest.raises(zmq.Again):
            send(dealer, b"x")
