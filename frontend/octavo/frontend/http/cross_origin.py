"""CORS: what lets a browser hand the answers to pages of other origins, for those that are named and no others."""

from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Browsers leave them out of what they send.
_PORTS: Final = {"http": ":80", "https": ":443"}
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
