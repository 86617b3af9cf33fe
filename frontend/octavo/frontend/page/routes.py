"""Routes the page at / and its files, the live view, and the calls that explain or abort single requests."""

import hashlib
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import PurePath
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.frontend.api.endpoint import Api, check_trusted, route
from octavo.frontend.api.explanations import Explainer, check_has_source
from octavo.frontend.errors import NotFound, Reason
from octavo.frontend.http.streaming import EventStream, data
from octavo.frontend.page.live_view import LiveView, snapshots
from octavo.frontend.page.requests import abort_request, explain_request

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


def routes(api: Api, explainer: Explainer) -> list[Route]:
    """Returns the routes GET /, /page/<file> and /live; GET and DELETE /requests/<id>."""
    static = _read_static()
    source = partial(snapshots, api.config.scheduler_admin, partial(_own_figures, api))
    live = LiveView(source, lambda: api.generation.draining)

    async def index(api: Api, request: Request) -> Response:
        return _answer(static[_INDEX], request)

    async def asset(api: Api, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in static:
            raise NotFound(Reason.ROUTE_NOT_FOUND, f"the page has no file {name[:100]!r}")
        return _answer(static[name], request)

    async def watch(api: Api, request: Request) -> Response:
        check_trusted(request, "the live view's requests and blocks")
        check_has_source(api)
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        return EventStream(_events(live), ping_s=api.ping_s)

    async def single(api: Api, request: Request) -> Response:
        if request.method == "DELETE":
            return await abort_request(api, request)
        return await explain_request(api, request, explainer)

    paths = {"/": index, "/page/{name}": asset, "/live": watch}
    found = [route(api, path, handler, "GET") for path, handler in paths.items()]
    return [*found, route(api, "/requests/{request_id:path}", single, "GET", "DELETE")]


def _own_figures(api: Api) -> dict[str, Any]:
    """Returns what this frontend adds to a snapshot: when it was taken, by a clock that only goes on, which requests
    are its own to abort, and counts and sums of what its clients have waited for."""
    latencies = api.generation.latencies
    return {
        "at_s": time.monotonic(),
        "frontend_ids": api.generation.frontend_ids,
        "first_tokens": latencies.first_tokens,
        "first_token_s": latencies.first_token_s,
        "between_tokens": latencies.between_tokens,
        "between_tokens_s": latencies.between_tokens_s,
    }


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


async def _events(live: LiveView) -> AsyncGenerator[bytes]:
    async with aclosing(live.watch()) as found:
        async for snapshot in found:
            yield data(snapshot)
