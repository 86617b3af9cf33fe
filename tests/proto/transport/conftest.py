"""Fixtures of tests of messages between processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from octavo.runtime.transport.sockets import bind_router, connect_dealer

Socket = zmq.Socket[bytes]


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[Socket, Socket]]:
    """A router and a dealer, of contexts of their own."""
    endpoint = f"ipc://{tmp_path}/s"
    with (
        zmq.Context() as context,
        zmq.Context() as other,
        bind_router(context, endpoint) as router,
        connect_dealer(other, endpoint) as dealer,
    ):
        assert dealer.poll(60_000, zmq.POLLOUT)
        yield router, dealer
