"""Whom connections count against."""

import ipaddress

# Of an IPv6 address: what one client is given, with all addresses below it.
_PREFIX = 64


def client_of(address: object) -> str:
    """The client behind a socket's or a call's address (host, port): one host, or one network of IPv6. Empty where
    there is none, as on a unix socket."""
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
