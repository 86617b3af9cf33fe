"""Relays connections through wires that can be cut, and that lose or delay single messages.

TCP never loses a message of a connection that lives. The relay that does so reads ZMTP 3 (RFC 23/ZMTP) without
encryption.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from random import Random
from typing import Final

# A port of this machine, or a unix socket.
Address = int | Path
# Passes on what comes from the first to the second, to the end.
Carry = Callable[[socket.socket, socket.socket], None]


def pass_on(source: socket.socket, target: socket.socket) -> None:
    """Passes all bytes on, at once."""
    while data := source.recv(65536):
        target.sendall(data)


class Relay:
    """Carries what is said between whoever connects to `address` (a free `port` unless it is given) and the server."""

    def __init__(self, server: Address, address: Address = 0, carry: Carry = pass_on) -> None:
        self._server = server
        self._carry = carry
        self._listener = _listen(address)
        self._open: list[socket.socket] = []
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        """Returns the port of a relay that listens on a port."""
        return int(self._listener.getsockname()[1])

    def cut(self) -> None:
        """Ends all connections, without a word."""
        while self._open:
            end = self._open.pop()
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._connect(client)

    def _connect(self, client: socket.socket) -> None:
        try:
            server = _connect(self._server)
        except OSError:
            client.close()
            return
        self.connections += 1
        self._open += [client, server]
        for source, target in ((client, server), (server, client)):
            threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            self._carry(source, target)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        source.close()


def _listen(address: Address) -> socket.socket:
    if isinstance(address, int):
        return socket.create_server(("127.0.0.1", address))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(address))
    listener.listen()
    return listener


def _connect(address: Address) -> socket.socket:
    if isinstance(address, int):
        return socket.create_connection(("127.0.0.1", address))
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(address))
    except OSError:
        connection.close()
        raise
    return connection


@contextmanager
def relayed(server: Address, address: Address = 0, carry: Carry = pass_on) -> Iterator[Relay]:
    relay = Relay(server, address, carry)
    try:
        yield relay
    finally:
        relay.close()


_GREETING_BYTES: Final = 64
_MORE, _LONG, _COMMAND = 1, 2, 4


@dataclass
class Noise:
    """Loses this share of the messages, and delivers the others so many seconds late. Handshakes and the sockets' own
    heartbeats are never lost. May be changed at any time."""

    loss: float = 0.0
    delay_s: float = 0.0
    random: Random = field(default_factory=lambda: Random(0))
    lost: int = 0
    carried: int = 0

    def carry(self, source: socket.socket, target: socket.socket) -> None:
        """Carries one direction of a connection, in order, to its end."""
        arrivals: SimpleQueue[tuple[float, bytes]] = SimpleQueue()
        delivery = threading.Thread(target=_deliver, args=(arrivals, target), daemon=True)
        delivery.start()
        try:
            for message, is_command in messages(source):
                if is_command or self._survives():
                    arrivals.put((time.monotonic() + self.delay_s, message))
        finally:
            arrivals.put((0.0, b""))
            delivery.join()

    def _survives(self) -> bool:
        if self.random.random() < self.loss:
            self.lost += 1
            return False
        self.carried += 1
        return True


def messages(source: socket.socket) -> Iterator[tuple[bytes, bool]]:
    """Yields what comes from a peer, as it is on the wire: the greeting piece by piece, then one message or command
    after the other. A flag beside each is true where libzmq itself sends the message."""
    remaining = _GREETING_BYTES
    # Each peer waits for the beginning of the other's before it sends the rest.
    while remaining and (piece := source.recv(remaining)):
        remaining -= len(piece)
        yield piece, True
    with source.makefile("rb") as stream:
        message = b""
        while flags := stream.read(1):
            length = stream.read(8 if flags[0] & _LONG else 1)
            message += flags + length + stream.read(int.from_bytes(length))
            if not flags[0] & _MORE:
                yield message, bool(flags[0] & _COMMAND)
                message = b""


def _deliver(arrivals: "SimpleQueue[tuple[float, bytes]]", target: socket.socket) -> None:
    while True:
        due, message = arrivals.get()
        if not message:
            return
        if (seconds := due - time.monotonic()) > 0:
            time.sleep(seconds)
        try:
            target.sendall(message)
        except OSError:
            return
