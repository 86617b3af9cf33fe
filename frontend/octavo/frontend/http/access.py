"""Nobody comes to a route, known or unknown, without credentials, where the server asks for them."""

from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.frontend.access.access import Access, authorization_of
from octavo.frontend.errors import Unauthenticated
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
