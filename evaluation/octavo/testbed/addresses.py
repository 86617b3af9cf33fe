"""Addresses for processes that tests start."""

import socket
from random import SystemRandom

# Below what systems hand out by themselves, or another test's connection might have it before the process does.
_PORTS = range(20_000, 32_000)


def free_address() -> str:
    """One of this machine's loopback, host:port, that nobody listens on now."""
    while True:
        port = SystemRandom().choice(_PORTS)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return f"127.0.0.1:{port}"
