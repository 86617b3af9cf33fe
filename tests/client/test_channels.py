"""Connections to servers that are far away."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from octavo.client import Client, RetryPolicy


@pytest.fixture
def far_address(address: str) -> Iterator[str]:
    """A server whose first word takes three tenths of a second."""
    host, _, port = address.rpartition(":")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve_one() -> None:
            near, _ = listener.accept()
            with near, socket.create_connection((host, int(port))) as far:
                back = threading.Thread(target=_pump, args=(far, near, 0.3))
                back.start()
                _pump(near, far)
                back.join()

        thread = threading.Thread(target=serve_one, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join(60)


def _pump(source: socket.socket, sink: socket.socket, delay_s: float = 0) -> None:
    """Until either ends, which ends both."""
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            time.sleep(delay_s)
            delay_s = 0
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_RDWR)


def test_a_connection_may_take_longer_than_the_pause_before_the_next_one(far_address: str) -> None:
    with Client(far_address, retries=RetryPolicy(max_retries=0)) as client:
        assert [model.ready for model in client.models()] == [True]
