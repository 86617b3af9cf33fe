"""Addresses for what cannot be told to choose a port itself."""

import socket


def free_address() -> str:
    """One of this machine's loopback, host:port, that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"
