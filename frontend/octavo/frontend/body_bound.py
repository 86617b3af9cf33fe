"""Counts what calls send as it comes in: `receive` raises what a body that has to give way is told."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.frontend.bodies import Bodies, Body
from octavo.frontend.client_address import client_of


class BodyBound:
    """Stands behind whoever asks for keys: of a call without one nothing is read."""

    def __init__(self, app: ASGIApp, bodies: Bodies) -> None:
        self._app = app
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        counted = _Counted(self._bodies, client_of(scope.get("client")), receive)
        try:
            await self._app(scope, counted.receive, send)
        finally:
            counted.close()


class _Counted:
    """One call's body."""

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
        """The next message. Raises `Overloaded` as soon as the body has to give way, for what has come is kept until
        then."""
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
