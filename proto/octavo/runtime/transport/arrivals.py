"""Calls a function of an event loop when messages have come at ZMQ sockets: to wait for each would cost the loop more
than most messages do."""

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import zmq


class Readable(Protocol):
    """An object that can be waited for until it is readable."""

    def fileno(self) -> int: ...


class Arrivals:
    """Calls `take` in the event loop in which it runs: when messages have come at `sockets`, when one of `others` is
    readable, and after as many seconds without a call as the latest call has returned (infinity: never).

    What one call leaves is taken by the next, and other tasks run in between. A descriptor of ZMQ reports only changes
    since its socket was last used, and sending is a use: so who sends outside of `take` calls `look` then.
    """

    def __init__(self, take: Callable[[], float], sockets: "Sequence[zmq.Socket[Any]]", *others: Readable) -> None:
        self._take = take
        self._sockets = sockets
        self._poller = zmq.Poller()
        for socket in sockets:
            self._poller.register(socket, zmq.POLLIN)
        self._others = others
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: asyncio.Future[None] | None = None
        self._soon: asyncio.Handle | None = None
        self._timer: asyncio.Handle | None = None
        self._fires = math.inf
        self._due = 0.0

    async def run(self) -> None:
        """Runs until cancelled, from a first call on. Raises what a call raises."""
        self._loop = loop = asyncio.get_running_loop()
        self._failure = failure = loop.create_future()
        descriptors = [readable.fileno() for readable in (*self._sockets, *self._others)]
        for descriptor in descriptors:
            loop.add_reader(descriptor, self._call)
        self._soon = loop.call_soon(self._call)
        try:
            await failure
        finally:
            self._failure = None
            for descriptor in descriptors:
                loop.remove_reader(descriptor)
            for handle in (self._soon, self._timer):
                if handle:
                    handle.cancel()
            self._soon = self._timer = None
            self._fires = math.inf

    def look(self) -> None:
        """Has what is there taken soon, if anything is; does nothing where it does not run."""
        if self._loop and self._failure and not self._soon and self._poller.poll(0):
            self._soon = self._loop.call_soon(self._call)

    def _call(self) -> None:
        if self._soon:
            self._soon.cancel()
            self._soon = None
        loop, failure = self._loop, self._failure
        if loop is None or failure is None or failure.done():
            return
        try:
            self._due = loop.time() + self._take()
        except Exception as error:
            with contextlib.suppress(asyncio.InvalidStateError):
                failure.set_exception(error)
            return
        # Nearly every call comes before it is due: a timer that is too early is put off when it fires.
        if self._due < self._fires:
            self._set_timer(loop)
        self.look()

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer:
            self._timer.cancel()
        self._fires = self._due
        self._timer = loop.call_at(self._due, self._on_time, loop)

    def _on_time(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer, self._fires = None, math.inf
        if self._due <= loop.time():
            self._call()
        elif self._due < math.inf:
            self._set_timer(loop)
