"""Bounds the bytes of request bodies that are held at once, over all clients.

A body counts from its first byte until its call is answered. Where bodies that are still coming exceed their bound, the
oldest body of the client that sends most gives way: a client that sends without pause is done long before that.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.frontend.errors import Overloaded, Reason
from octavo.runtime.transport.clients import client_of

UPLOADS: Final = "/v1/files"
MAX_UNFINISHED: Final = 64 << 20
MAX_HELD: Final = 256 << 20


class Body:
    """Counts the bytes of one body that `client` sends. `evict` is called when the body has to give way."""

    def __init__(self, client: str, evict: Callable[[], None]) -> None:
        self.client = client
        self.size = 0
        self.evict = evict


class Bodies:
    """Counts the bodies of one HTTP port. Belongs to one event loop."""

    def __init__(self, max_unfinished: int = MAX_UNFINISHED, max_held: int = MAX_HELD) -> None:
        self._max_unfinished = max_unfinished
        self._max_held = max_held
        # Oldest first.
        self._unfinished: dict[Body, None] = {}
        self._finished: set[Body] = set()
        self._of_client: Counter[str] = Counter()
        self._unfinished_bytes = self._finished_bytes = 0

    @property
    def held(self) -> int:
        """Returns the number of bytes that are held."""
        return self._unfinished_bytes + self._finished_bytes

    def grow(self, body: Body, size: int) -> None:
        """Counts `size` more bytes of `body`. Raises `Overloaded` where `body` itself must give way."""
        self._unfinished.setdefault(body)
        self._change(body, size)
        while self._unfinished_bytes > self._max_unfinished:
            most = max(self._of_client.values())
            oldest = next(each for each in self._unfinished if self._of_client[each.client] == most)
            self.close(oldest)
            if oldest is body:
                raise self.refusal()
            oldest.evict()

    def finish(self, body: Body) -> None:
        """Marks `body` as complete. Raises `Overloaded` where there is no room to keep a body of this size."""
        if body not in self._unfinished:
            return
        size = body.size
        self.close(body)
        if self.held + size > self._max_held:
            raise self.refusal()
        body.size = size
        self._finished.add(body)
        self._finished_bytes += size

    def close(self, body: Body) -> None:
        """Stops counting `body`, which is not held any more. Idempotent."""
        if body in self._unfinished:
            del self._unfinished[body]
            self._change(body, -body.size)
        elif body in self._finished:
            self._finished.discard(body)
            self._finished_bytes -= body.size
            body.size = 0

    def refusal(self) -> Overloaded:
        """Returns the error for the client of a body that had to give way."""
        return Overloaded(
            Reason.TOO_MUCH_WORK,
            f"the server holds {self.held} bytes of bodies, and at most {self._max_unfinished} of those that are still"
            f" coming and {self._max_held} in all may be; try again, and send the body without a pause",
        )

    def _change(self, body: Body, size: int) -> None:
        body.size += size
        self._unfinished_bytes += size
        self._of_client[body.client] += size
        if not self._of_client[body.client]:
            del self._of_client[body.client]


def is_upload(scope: Scope) -> bool:
    """Tells whether the body of a call goes to the disk as it comes, however large it is, and is not held."""
    return scope["type"] == "http" and scope["method"] == "POST" and scope["path"] == UPLOADS


class BodyBound:
    """Counts each call's body as the app reads it; `receive` raises `Overloaded` where the body has to give way.

    Belongs behind the check of credentials, so that nothing is read of a call without a key.
    """

    def __init__(self, app: ASGIApp, bodies: Bodies) -> None:
        self._app = app
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_upload(scope):
            await self._app(scope, receive, send)
            return
        counted = _Counted(self._bodies, client_of(scope.get("client")), receive)
        try:
            await self._app(scope, counted.receive, send)
        finally:
            counted.close()


class _Counted:
    """Receives and counts one call's body."""

    def __init__(self, bodies: Bodies, client: str, receive: Receive) -> None:
        self._bodies = bodies
        self._receive = receive
        self._body = Body(client, self._evict)
        self._is_coming = self._is_evicted = False
        self._waiting: asyncio.Future[Message] | None = None

    async def receive(self) -> Message:
        message = await self._next()
        if message["type"] == "http.request":
            self._is_coming = message.get("more_body", False)
            if chunk := message.get("body", b""):
                self._bodies.grow(self._body, len(chunk))
            if not self._is_coming:
                self._bodies.finish(self._body)
        return message

    async def _next(self) -> Message:
        """Returns the next message. Raises `Overloaded` as soon as the body has to give way: until then the app keeps
        what has come of the body."""
        if self._is_evicted:
            raise self._bodies.refusal()
        if not self._is_coming:
            return await self._receive()
        self._waiting = asyncio.ensure_future(self._receive())
        try:
            await asyncio.wait((self._waiting,))
            if self._is_evicted:
                raise self._bodies.refusal()
            return self._waiting.result()
        finally:
            self._waiting.cancel()
            self._waiting = None

    def _evict(self) -> None:
        self._is_evicted = True
        if self._waiting:
            self._waiting.cancel()

    def close(self) -> None:
        self._bodies.close(self._body)
