"""Connections that are read as fast as they bring anything, with the time of every piece.

Clients of the ordinary kind spend as much on a token as a frontend does; what reads these knows nothing but where a
message begins, so that a machine of few cores is left to what is measured.
"""

import selectors
import socket
import time
from collections.abc import Callable, Sequence


def connect(host: str, port: int) -> socket.socket:
    """A connection that sends at once what it is given."""
    connection = socket.create_connection((host, port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def read_all(connections: Sequence[socket.socket], take: Callable[[int, float, bytes], bool]) -> None:
    """Calls `take(place of the connection, time, what came)` until it has said of all that there will be no more.

    Raises `ConnectionError` if one ends before.
    """
    selector = selectors.DefaultSelector()
    for place, connection in enumerate(connections):
        selector.register(connection, selectors.EVENT_READ, place)
    while selector.get_map():
        for key, _ in selector.select():
            place, connection = key.data, connections[key.data]
            data = connection.recv(1 << 18)
            if not data:
                raise ConnectionError(f"connection {place} was closed in the midst of an answer")
            if take(place, time.monotonic(), data):
                selector.unregister(connection)
