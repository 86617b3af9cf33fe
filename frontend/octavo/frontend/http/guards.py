"""Guards the HTTP port: refuses calls without credentials, under a foreign host name or from pages of other sites, and
answers CORS preflights for the origins that are named."""

import ipaddress
import socket
from collections.abc import Iterable, Sequence
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.frontend.access.access import Access, authorization_of
from octavo.frontend.errors import Forbidden, Reason, Unauthenticated
from octavo.frontend.http.errors import error_response
from octavo.frontend.request.request import STRANGER, Caller

_READING: Final = frozenset({"GET", "HEAD"})
# For these methods: probes carry no key, and the page asks its reader for one.
EXEMPT: Final = frozenset({"/livez", "/health", "/ready", "/"})
EXEMPT_BELOW: Final = "/page/"
METRICS: Final = "/metrics"
_REFUSED_WEBSOCKET: Final = 1008


class AccessMiddleware:
    """Refuses calls without credentials, but for `EXEMPT` paths, and sets the caller in `scope["state"]["caller"]`.

    With `public_metrics`, who reads the metrics without credentials is let in as a `STRANGER`.
    """

    def __init__(self, app: ASGIApp, access: Access, *, public_metrics: bool = False) -> None:
        self._app = app
        self._access = access
        self._public_metrics = public_metrics and access.asks_for_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" and not _is_exempt(scope):
            try:
                caller = self._identify(scope)
            except Unauthenticated as error:
                await _refuse(error, scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)

    def _identify(self, scope: Scope) -> Caller:
        authorization = authorization_of(Headers(scope=scope))
        reads_metrics = scope.get("method") in _READING and scope["path"] == METRICS
        if self._public_metrics and reads_metrics and authorization is None:
            return STRANGER
        return self._access.identify(authorization)


def _is_exempt(scope: Scope) -> bool:
    path = scope["path"]
    return scope.get("method") in _READING and (path in EXEMPT or path.startswith(EXEMPT_BELOW))


async def _refuse(error: Unauthenticated, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": _REFUSED_WEBSOCKET})
        return
    await error_response(error, scope)(scope, receive, send)


EVERY: Final = "*"
_LOOPBACK: Final = ("localhost", "*.localhost")
# These addresses to listen on mean all of the machine's.
_WILDCARDS: Final = frozenset({"", "0.0.0.0", "::"})


class AllowedHosts:
    """Knows the host names under which the HTTP port may be called; any address may be used.

    The names are those of loopback, the one in `listen` (the machine's own where `listen` means all addresses), and
    `further` ones. `*.name` is every name that ends so, `*` any name. A unix socket allows all names: the proxy that
    calls it has its own rules.
    """

    def __init__(self, listen: str, further: Sequence[str] = ()) -> None:
        names = [*_LOOPBACK, *further, *([EVERY] if listen.startswith("unix:") else _own_names(listen))]
        patterns = [name.lower().rstrip(".") for name in names]
        self._every = EVERY in patterns
        self._names = frozenset(patterns)
        self._ends = tuple(pattern[1:] for pattern in patterns if pattern.startswith("*."))

    def allows(self, host: str) -> bool:
        """Tells whether a call with the Host header `host` is allowed."""
        if self._every:
            return True
        name = host_name(host)
        return name in self._names or name.endswith(self._ends) or _is_address(name)


def host_name(authority: str) -> str:
    """Returns the name or address of `name:port` in lower case, without brackets and final dot."""
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


# These routes reveal nothing, and probes call them under whatever name they know.
_PROBES: Final = frozenset({"/livez", "/health", "/ready"})
# Values of sec-fetch-site for requests that no other site has caused.
_OWN: Final = frozenset({"same-origin", "none"})
_PORTS: Final = {"http": ":80", "https": ":443"}


class BrowserGuard:
    """Refuses calls under a host name that is not allowed, and calls that a page of another site makes a browser send.

    Such a page could use all that its reader can reach; only pages of the named `origins` may. Of the headers that
    decide, programs that are no browsers send Host alone.
    """

    def __init__(self, app: ASGIApp, hosts: AllowedHosts, origins: frozenset[str] = frozenset()) -> None:
        self._app = app
        self._hosts = hosts
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (objection := self._objection(scope)):
            await error_response(objection, scope)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _objection(self, scope: Scope) -> Forbidden | None:
        headers, reads = Headers(scope=scope), scope["method"] in _READING
        if reads and scope["path"] in _PROBES:
            return None
        host = headers.get("host", "")
        # A client that sends no Host header is no browser.
        if host and not self._hosts.allows(host):
            return Forbidden(
                Reason.HOST_NOT_ALLOWED,
                f"this server is not to be called as {host[:128]!r}; use its address, or name it in --allowed-hosts",
            )
        if headers.get("origin") in self._origins:
            return None
        return _foreign() if _is_foreign(headers, host, reads=reads) else None


def _is_foreign(headers: Headers, host: str, *, reads: bool) -> bool:
    """Tells whether a page of another site has caused the call. A reader who follows a link has caused it, no page."""
    if site := headers.get("sec-fetch-site"):
        return site not in _OWN and not (reads and headers.get("sec-fetch-mode") == "navigate")
    # Browsers send sec-fetch-site over trustworthy connections only, and Origin wherever a call could change something.
    origin = headers.get("origin")
    return origin is not None and not reads and not _is_of(origin, host)


def _is_of(origin: str, host: str) -> bool:
    """Tells whether pages of `origin` come from `host`. The scheme may differ: a proxy may end TLS on the way."""
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


# Browsers leave these ports out of the origins that they send.

_METHODS: Final = "DELETE, GET, HEAD, POST"
_PREFLIGHT_S: Final = "600"


def parse_origins(texts: Iterable[str]) -> frozenset[str]:
    """Returns origins as browsers write them. Raises `ValueError` for a text that is no origin, or any page's."""
    return frozenset(map(_origin, texts))


def _origin(text: str) -> str:
    origin = text.lower().removesuffix("/")
    parts = urlsplit(origin)
    if "*" in origin or origin == "null":
        raise ValueError(f"{text!r} would be anybody's page; name each origin, as https://app.example")
    if not (parts.scheme and parts.netloc and origin.isascii() and origin == f"{parts.scheme}://{parts.netloc}"):
        raise ValueError(f"{text!r} is no origin; write SCHEME://HOST or SCHEME://HOST:PORT, as https://app.example")
    return origin.removesuffix(_PORTS.get(parts.scheme, "\n"))


class CrossOrigin:
    """Answers CORS preflights, and lets browsers hand responses to pages of the named `origins`.

    Belongs before the check of credentials: browsers send none with a preflight. No cookies are asked for or taken: a
    page sends its key itself.
    """

    def __init__(self, app: ASGIApp, origins: frozenset[str]) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin", "")
        is_allowed = origin in self._origins

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                marked = MutableHeaders(scope=message)
                marked.add_vary_header("Origin")
                if is_allowed:
                    marked["Access-Control-Allow-Origin"] = origin
                    marked["Access-Control-Expose-Headers"] = "*"
            await send(message)

        if is_allowed and scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await _preflight(headers)(scope, receive, send_marked)
        else:
            await self._app(scope, receive, send_marked)


def _preflight(asked: Headers) -> Response:
    """Returns the answer to a preflight. The page may send any header: each is named, for `*` leaves out the key's."""
    allowed = {"Access-Control-Allow-Methods": _METHODS, "Access-Control-Max-Age": _PREFLIGHT_S}
    if wanted := asked.get("access-control-request-headers"):
        allowed["Access-Control-Allow-Headers"] = wanted
    if asked.get("access-control-request-private-network") == "true":
        allowed["Access-Control-Allow-Private-Network"] = "true"
    return Response(status_code=204, headers=allowed)
