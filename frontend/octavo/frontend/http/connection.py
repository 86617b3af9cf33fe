"""Reads what a client sends, and notices when the client has gone."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from octavo.frontend.errors import InvalidRequest, Reason

T = TypeVar("T")

MAX_BODY: Final = 4 << 20


class ClientGone(Exception):
    """The client went away before its answer was complete."""


async def read_body(request: Request) -> bytes:
    """Returns the request's JSON text of at most `MAX_BODY` bytes. The HTTP server bounds the time.

    Raises `InvalidRequest` for a body that is larger or has another content type, `ClientGone` where the client leaves.
    """
    _check_content_type(request.headers.get("content-type", ""))
    if int(request.headers.get("content-length", 0)) > MAX_BODY:
        raise _too_large()
    chunks, size, more = [], 0, True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > MAX_BODY:
            raise _too_large()
        more = message.get("more_body", False)
    return b"".join(chunks)


async def until_gone(receive: Receive) -> None:
    """Returns when the client is gone, or its answer complete."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`. Raises `ClientGone` if the client goes away first; `work` is cancelled then."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(until_gone(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def _check_content_type(content_type: str) -> None:
    kind = content_type.partition(";")[0].strip().lower()
    # Pages of other sites can make a browser send plain text or a form here, but not JSON.
    if kind and kind != "application/json" and not kind.endswith("+json"):
        raise InvalidRequest(
            Reason.BAD_JSON, "the body's content-type is not application/json; send JSON and say so in that header"
        )


def _too_large() -> InvalidRequest:
    return InvalidRequest(
        Reason.TOO_LARGE, f"the request's body has more than {MAX_BODY} bytes; send less", max_bytes=MAX_BODY
    )
