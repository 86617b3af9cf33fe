"""Carries messages between processes: sockets, addresses, keys and handshakes."""
