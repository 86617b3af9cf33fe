"""Describes a load on the frontend, reads its streams, and prints when how many tokens came.

A load is a process: it prints one line of JSON, a list of `Receipts` by stream, once all its streams have ended.
Clients of the ordinary kind spend as much on a token as a frontend does; what reads these streams knows nothing but
where a message begins, so that a machine of few cores is left to what is measured.
"""

import json
import selectors
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# The time of each piece of an answer, and the number of its tokens.
Receipts = list[tuple[float, int]]

# All tokens of the answers have as many characters, so that the tokens of a text can be counted.
TOKEN_CHARACTERS = 4


@dataclass(frozen=True)
class StreamLoad:
    """Describes a load of `streams` streams of `tokens` tokens each, which are `among` those named, if any are. `api`
    chooses the HTTP interface: completions, chat or messages."""

    port: int
    streams: int
    tokens: int
    prompt: str
    connections: int = 1
    api: str = ""
    host: str = "127.0.0.1"
    among: Sequence[int] = ()


def run(load: Callable[[StreamLoad], list[Receipts]]) -> None:
    """Runs the process: takes a `StreamLoad` from the command line and prints the receipts. Raises `RuntimeError` as
    `check` does."""
    asked = StreamLoad(**json.loads(sys.argv[1]))
    print(json.dumps(check(asked, load(asked))), flush=True)


def check(asked: StreamLoad, receipts: list[Receipts]) -> list[Receipts]:
    """Returns `receipts`. Raises `RuntimeError` for another number of streams, or a stream with another number of
    tokens, than was asked for."""
    for one in receipts:
        if (came := sum(count for _, count in one)) != asked.tokens:
            raise RuntimeError(f"{came} tokens came where {asked.tokens} were asked for")
    if len(receipts) != asked.streams:
        raise RuntimeError(f"{len(receipts)} streams came of {asked.streams}")
    return receipts


def connect(host: str, port: int) -> socket.socket:
    """Opens a connection that sends at once what it is given."""
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
