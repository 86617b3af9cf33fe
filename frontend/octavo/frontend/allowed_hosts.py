"""The names under which the HTTP port may be called.

A page whose name its owner makes point at this machine (DNS rebinding) is, for the browser, at home here; only the Host
header tells. It tells a name: that of an address cannot be given to another, so addresses are always let in.
"""

import ipaddress
import socket
from collections.abc import Sequence
from typing import Final

EVERY: Final = "*"
_LOOPBACK: Final = ("localhost", "*.localhost")
# As addresses to listen on: all of the machine's.
_WILDCARDS: Final = frozenset({"", "0.0.0.0", "::"})


class AllowedHosts:
    """Those of loopback, that of `listen`, of the machine where that means all its addresses, and `further` ones.

    `*.name` is every name that ends so, `*` any. Behind a unix socket is a proxy, which has its own say.
    """

    def __init__(self, listen: str, further: Sequence[str] = ()) -> None:
        names = [*_LOOPBACK, *further, *([EVERY] if listen.startswith("unix:") else _own_names(listen))]
        patterns = [name.lower().rstrip(".") for name in names]
        self._every = EVERY in patterns
        self._names = frozenset(patterns)
        self._ends = tuple(pattern[1:] for pattern in patterns if pattern.startswith("*."))

    def allows(self, host: str) -> bool:
        """Whether a call whose Host header is this may come in."""
        if self._every:
            return True
        name = host_name(host)
        return name in self._names or name.endswith(self._ends) or _is_address(name)


def host_name(authority: str) -> str:
    """The name or address in `name:port`, in one spelling."""
    bracketed, _, _ = authority.partition("]")
    if bracketed.startswith("["):
        return bracketed[1:].lower()
    return authority.partition(":")[0].lower().rstrip(".")


def _own_names(listen: str) -> list[str]:
    name = host_name(listen if listen.startswith("[") else listen.rpartition(":")[0])
    return [socket.gethostname()] if name in _WILDCARDS else [name]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
