"""What a page of another site makes a browser send here is refused, whatever it sends, unless its origin is named: such
a page could use all that its reader can reach."""

from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.frontend.allowed_hosts import AllowedHosts
from octavo.frontend.errors import Forbidden, Reason
from octavo.frontend.openai.errors import error_response

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
