"""What a page of another site makes a browser send here is refused; and the names under which the HTTP port may be
called."""

import ipaddress
import socket
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.frontend.errors import Forbidden, Reason
from octavo.frontend.http.errors import error_response

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


# What a page of another site makes a browser send here is refused, whatever it sends, unless its origin is named: such
# a page could use all that its reader can reach.


# They tell nothing, and probes call them under whatever name they know.
_PROBES: Final = frozenset({"/livez", "/health", "/ready"})
_READING: Final = frozenset({"GET", "HEAD"})
# What browsers say of requests that no other site has caused.
_OWN: Final = frozenset({"same-origin", "none"})
_PORTS: Final = {"http": ":80", "https": ":443"}


class BrowserGuard:
    """Stands before all else. Programs that are no browsers send none of the headers that it looks at but Host."""

    def __init__(self, app: ASGIApp, hosts: AllowedHosts, origins: frozenset[str] = frozenset()) -> None:
        self._app = app
        self._hosts = hosts
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (objection := self._objection(scope)):
            await error_response(objection)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _objection(self, scope: Scope) -> Forbidden | None:
        headers, reads = Headers(scope=scope), scope["method"] in _READING
        if reads and scope["path"] in _PROBES:
            return None
        host = headers.get("host", "")
        # What does not say where it means to go is no browser.
        if host and not self._hosts.allows(host):
            return Forbidden(
                Reason.HOST_NOT_ALLOWED,
                f"this server is not to be called as {host[:128]!r}; use its address, or name it in --allowed-hosts",
            )
        if headers.get("origin") in self._origins:
            return None
        return _foreign() if _is_foreign(headers, host, reads=reads) else None


def _is_foreign(headers: Headers, host: str, *, reads: bool) -> bool:
    """Whether a page of another site has caused it. Following a link to here is its reader's own deed."""
    if site := headers.get("sec-fetch-site"):
        return site not in _OWN and not (reads and headers.get("sec-fetch-mode") == "navigate")
    # Browsers say the above only where the connection cannot be listened to, and this wherever something could change.
    origin = headers.get("origin")
    return origin is not None and not reads and not _is_of(origin, host)


def _is_of(origin: str, host: str) -> bool:
    """Whether pages of that origin come from that host. What ends TLS before this server does not change its name."""
    try:
        found = urlsplit(origin)
    except ValueError:
        return False
    port = _PORTS.get(found.scheme, "")
    return bool(found.netloc) and found.netloc.lower().removesuffix(port) == host.lower().removesuffix(port)


def _foreign() -> Forbidden:
    return Forbidden(
        Reason.CROSS_SITE,
        "a page of another site has caused this call; call from a page of this server or no browser, or name the page's"
        " origin in --allowed-origins",
    )
