"""The page at / and what it loads, and the live view that feeds it."""

import hashlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import PurePath
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.frontend.errors import NotFound, Reason, Unavailable
from octavo.frontend.http.sse import EventStream, data
from octavo.frontend.openai.endpoint import Api, check_trusted, route
from octavo.frontend.page.feed import snapshots
from octavo.frontend.page.live_view import LiveView

_INDEX: Final = "index.html"
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS: Final = {
    # Asked for again each time, and answered with 304 as long as it is the same.
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True)
class _File:
    content: bytes
    headers: dict[str, str]


def routes(api: Api) -> list[Route]:
    """GET /, /page/<file> and /live."""
    static = _read_static()
    live = LiveView(partial(snapshots, api.config.scheduler_admin), lambda: api.generation.draining)

    async def index(api: Api, request: Request) -> Response:
        return _answer(static[_INDEX], request)

    async def asset(api: Api, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in static:
            raise NotFound(Reason.ROUTE_NOT_FOUND, f"the page has no file {name[:100]!r}")
        return _answer(static[name], request)

    async def watch(api: Api, request: Request) -> Response:
        check_trusted(request, "the live view's requests and blocks")
        _check_has_source(api)
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        return EventStream(_events(live), ping_s=api.ping_s)

    paths = {"/": index, "/page/{name}": asset, "/live": watch}
    return [route(api, path, handler, "GET") for path, handler in paths.items()]


def _read_static() -> dict[str, _File]:
    found = {}
    for file in files(__package__).joinpath("static").iterdir():
        content = file.read_bytes()
        etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        headers = {"content-type": _TYPES[PurePath(file.name).suffix], "etag": etag, **_HEADERS}
        found[file.name] = _File(content, headers)
    return found


def _answer(file: _File, request: Request) -> Response:
    if file.headers["etag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=file.headers)
    return Response(file.content, headers=file.headers)


def _check_has_source(api: Api) -> None:
    """Raises `Unavailable` where nothing is shown."""
    if not api.config.scheduler_admin:
        raise Unavailable(
            Reason.SCHEDULER_UNREACHABLE,
            "this frontend has not been told of the scheduler's Admin service; start it with --scheduler-admin",
        )


async def _events(live: LiveView) -> AsyncGenerator[bytes]:
    async with aclosing(live.watch()) as found:
        async for snapshot in found:
            yield data(snapshot)
