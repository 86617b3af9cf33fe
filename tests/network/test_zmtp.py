"""That a noisy relay loses and delays messages, and nothing else."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from octavo.runtime.transport.sockets import bind_router, connect_dealer
from octavo.testbed import relay as relays
from octavo.testbed.relay import Noise, Relay, relayed

_WAIT_MS = 60_000


@contextmanager
def wire(directory: Path, noise: Noise) -> Iterator[tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]", Relay]]:
    """A scheduler's socket and a peer's, with a noisy relay between them."""
    server, public = directory / "server.sock", directory / "public.sock"
    with (
        zmq.Context() as context,
        bind_router(context, f"ipc://{server}") as router,
        relayed(server, public, noise.carry) as relay,
        connect_dealer(context, f"ipc://{public}") as dealer,
    ):
        for socket in (router, dealer):
            socket.setsockopt(zmq.RCVTIMEO, _WAIT_MS)
        dealer.setsockopt(zmq.SNDTIMEO, _WAIT_MS)
        yield router, dealer, relay


def test_it_passes_everything_on_in_both_directions(tmp_path: Path) -> None:
    with wire(tmp_path, Noise()) as (router, dealer, _):
        sent = [bytes([i % 251]) * size for i, size in enumerate((0, 1, 255, 256, 70_000))]
        for message in sent:
            dealer.send(message)
        received = [router.recv_multipart() for _ in sent]
        assert [message for _, message in received] == sent
        for message in sent:
            router.send_multipart([received[0][0], message])
        assert [dealer.recv() for _ in sent] == sent


def test_it_loses_its_share_and_keeps_the_order_of_the_rest(tmp_path: Path) -> None:
    noise = Noise(loss=0.3)
    with wire(tmp_path, noise) as (router, dealer, _):
        dealer.send(b"0")
        for number in range(1, 1000):
            dealer.send(str(number).encode())
        while noise.lost + noise.carried < 1000:
            time.sleep(0.001)
        noise.loss = 0.0
        dealer.send(b"end")
        received = list(map(int, iter(lambda: router.recv_multipart()[1].replace(b"end", b"-1"), b"-1")))
    assert received == sorted(set(received))
    assert 600 < len(received) < 800
    assert noise.lost == 1000 - len(received)


class HeldTime:
    """The relay's clock: it stands still, and whoever sleeps by it sleeps until it is let go. Knows for how long each
    wanted to."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return 0.0

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        assert self.goes_on.wait(_WAIT_MS / 1000)


def test_it_delays_without_slowing_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldTime()
    monkeypatch.setattr(relays, "time", held)
    noise = Noise()
    with wire(tmp_path, noise) as (router, dealer, _):
        dealer.send(b"connected")
        router.recv_multipart()
        noise.delay_s = 0.2
        for _ in range(50):
            dealer.send(b"late")
        # All are on their way while the first has not arrived.
        limit = time.monotonic() + _WAIT_MS / 1000
        while noise.carried < 51:
            assert time.monotonic() < limit, f"only {noise.carried} messages are on their way"
            time.sleep(0.001)
        assert router.poll(0) == 0
        held.goes_on.set()
        assert [router.recv_multipart()[1] for _ in range(50)] == [b"late"] * 50
        assert held.slept == [0.2] * 50


def test_a_cut_wire_is_made_again(tmp_path: Path) -> None:
    with wire(tmp_path, Noise()) as (router, dealer, relay):
        dealer.send(b"before")
        router.recv_multipart()
        relay.cut()
        while router.poll(0) == 0:
            dealer.send(b"after")
            router.poll(10)
        assert router.recv_multipart()[1] == b"after"
    assert relay.connections >= 2
