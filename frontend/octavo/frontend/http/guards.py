"""Guards the HTTP port: refuses calls without credentials, under a foreign host name or caused by pages of other sites, and
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

# For GET and HEAD: probes carry no key, and the page asks its reader for one.
EXEMPT: Final = frozenset({"/livez", "/health", "/ready", "/"})
EXEMPT_BELOW: Final = "/page/"
_REFUSED_WEBSOCKET: Final = 1008


class AccessMiddleware:
    """Stands before all routes, and says in `scope["state"]["caller"]` who calls."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" and not _is_exempt(scope):
            try:
                caller = self._access.identify(authorization_of(Headers(scope=scope)))
            except Unauthenticated as error:
                await _refuse(error, scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)


def _is_exempt(scope: Scope) -> bool:
    path = scope["path"]
    return scope.get("method") in ("GET", "HEAD") and (path in EXEMPT or path.startswith(EXEMPT_BELOW))


async def _refuse(error: Unauthenticated, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": _REFUSED_WEBSOCKET})
        return
    await error_response(error)(scope, receive, send)


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


# Browsers leave them out of what they send.

_METHODS: Final = "DELETE, GET, HEAD, POST"
_PREFLIGHT_S: Final = "600"


def parse_origins(texts: Iterable[str]) -> frozenset[str]:
    """Origins as browsers write them. Raises `ValueError` for what is none, or could be anybody's."""
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
    """Stands before whatever asks for keys: browsers send none with the question whether a page may call at all.

    No cookies are asked for or taken: a page says its key itself.
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
    """What the page may send: any header, for `*` would leave out the one with its key."""
    told = {"Access-Control-Allow-Methods": _METHODS, "Access-Control-Max-Age": _PREFLIGHT_S}
    if wanted := asked.get("access-control-request-headers"):
        told["Access-Control-Allow-Headers"] = wanted
    if asked.get("access-control-request-private-network") == "true":
        told["Access-Control-Allow-Private-Network"] = "true"
    return Response(status_code=204, headers=told)
