"""Tells which client is behind an address, so that one client can be kept from crowding out others."""

import ipaddress
from typing import Final
from urllib.parse import unquote

# An address and a port.
Peer = tuple[str, int]
# Bits of an IPv6 address: one client is given a network of that prefix, with all addresses in it.
_PREFIX: Final = 64


def client_of(address: object) -> str:
    """Returns the client behind a socket's or a call's address (host, port): one host, or one network of IPv6.

    Returns "" where there is no host, as on a unix socket.
    """
    if not isinstance(address, tuple | list) or not address:
        return ""
    host = str(address[0]).partition("%")[0]
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(found, ipaddress.IPv6Address):
        mapped = found.ipv4_mapped
        return str(mapped or ipaddress.ip_network((found, _PREFIX), strict=False))
    return str(found)


def parse_peer(text: str) -> Peer | None:
    """Parses gRPC's spelling of a peer, as ipv4:127.0.0.1:5 or ipv6:[::1]:5. Returns None for other kinds."""
    kind, _, address = unquote(text).partition(":")
    host, _, port = address.rpartition(":")
    return (plain(host.strip("[]")), int(port)) if kind in ("ipv4", "ipv6") and port.isdecimal() else None


def plain(host: str) -> str:
    """Returns the address in lower case without its zone, and an IPv4 address without the prefix of IPv6 sockets."""
    return host.partition("%")[0].lower().removeprefix("::ffff:")
