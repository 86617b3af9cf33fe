"""Handles what is the same for calls of all routes: ids, the time of day, and the bound of headers."""

import secrets
from datetime import UTC, datetime
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.frontend.errors import InvalidRequest, Reason
from octavo.frontend.http.errors import error_response, is_anthropic


def unix_time() -> int:
    """Returns the time in whole seconds since 1970."""
    return int(datetime.now(UTC).timestamp())


MAX_HEADERS: Final = 32 << 10
_MAX_ID: Final = 128
_HEADER: Final = b"x-request-id"
CACHED_TOKENS_HEADER: Final = b"x-octavo-cached-tokens"
# Where clients of Anthropic's API look for the id.
_ANTHROPIC_HEADER: Final = b"request-id"


class Envelope:
    """Puts `x-request-id` on every response, and into `scope["state"]["request_id"]`: the client's id where that is
    printable, or a fresh one. A response to prompts says how many of their tokens were found computed, as far as
    `scope["state"]["cached_tokens"]` has it by then.

    Refuses calls with more than `MAX_HEADERS` bytes of headers with status 431.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope["headers"])
        scope.setdefault("state", {})["request_id"] = request_id.decode()
        own = [(_HEADER, request_id), *([(_ANTHROPIC_HEADER, request_id)] if is_anthropic(scope) else [])]

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                cached = scope["state"].get("cached_tokens")
                found = [] if cached is None else [(CACHED_TOKENS_HEADER, str(cached).encode())]
                message["headers"] = [*message.get("headers", ()), *own, *found]
            await send(message)

        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADERS:
            await error_response(_too_large(), scope, 431)(scope, receive, send_with_id)
        else:
            await self._app(scope, receive, send_with_id)


def _request_id(headers: list[tuple[bytes, bytes]]) -> bytes:
    for name, value in headers:
        if name == _HEADER and 0 < len(value) <= _MAX_ID and value.isascii() and value.decode().isprintable():
            return value
    return secrets.token_hex(16).encode()


def _too_large() -> InvalidRequest:
    return InvalidRequest(
        Reason.TOO_LARGE, f"the request's headers have more than {MAX_HEADERS} bytes; send less", max_bytes=MAX_HEADERS
    )
