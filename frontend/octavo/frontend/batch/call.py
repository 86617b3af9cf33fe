"""Sends a call to the frontend's own application, as if it had come over HTTP."""

import asyncio
from dataclasses import dataclass

from starlette.types import ASGIApp, Message

from octavo.frontend.api.body import UNKNOWN_FIELDS_HEADER
from octavo.frontend.request.request import Caller


@dataclass(frozen=True)
class Answer:
    """Holds the answer to a call. `retry_after_s` is the server's own word for it, None where it says none; `ignored`
    are the fields that it has not honoured, as its header names them."""

    status: int
    body: bytes
    retry_after_s: float | None = None
    ignored: str = ""


async def call(app: ASGIApp, path: str, body: bytes, request_id: str, caller: Caller) -> Answer:
    """Answers a call of `caller`. The call ends with the task that waits for it."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope = {
        **{"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "method": "POST"},
        **{"path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"", "headers": headers},
        **{"client": None, "server": None, "state": {"caller": caller, "request_id": request_id}},
    }
    sent: list[bytes] = []
    status = 0
    headers_sent: dict[bytes, bytes] = {}
    is_read = False

    async def receive() -> Message:
        nonlocal is_read
        if is_read:
            # The client stays until it has its answer.
            await asyncio.get_running_loop().create_future()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            headers_sent.update(message.get("headers", ()))
        else:
            sent.append(message.get("body", b""))

    await app(scope, receive, send)
    retry_after = headers_sent.get(b"retry-after")
    return Answer(
        status,
        b"".join(sent),
        None if retry_after is None else float(retry_after),
        headers_sent.get(UNKNOWN_FIELDS_HEADER.encode(), b"").decode("latin-1"),
    )
