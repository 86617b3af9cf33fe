"""How messages travel between processes: sockets, addresses, keys and handshakes."""
