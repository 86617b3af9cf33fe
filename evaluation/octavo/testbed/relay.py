"""A wire that can be cut, and one that loses and delays messages: what processes see of a network that fails."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# A port of this machine, or a unix socket.
Address = int | Path
# Passes on what comes from the first to the second, to the end.
Carry = Callable[[socket.socket, socket.socket], None]


def pass_on(source: socket.socket, target: socket.socket) -> None:
    """All bytes, at once."""
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
        """Of one that listens on a port."""
        return int(self._listener.getsockname()[1])

    def cut(self) -> None:
        """All connections end, without a word."""
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
