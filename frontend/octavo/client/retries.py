"""Decides what follows an error: going on where the stream was lost, asking again, or giving up.

The module uses no socket, and only the clock that it is given.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import grpc

from octavo.client.errors import NotFoundError, OctavoError, UnavailableError

STREAM_LOST: Final = "STREAM_LOST"
# Statuses of a broken connection, where the server has given no reason. A call that a server has not answered when the
# server ends gets the last.
LOST: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED)


@dataclass(frozen=True)
class RetryPolicy:
    """Bounds retries. Times are in seconds.

    A call of which nothing was received yet is made again up to `max_retries` times: when the server says, or soon
    after a lost connection. A stream that was begun is looked for again for `reconnect_s` after a loss, with pauses
    from `first_pause_s` to `longest_pause_s`.
    """

    max_retries: int = 2
    reconnect_s: float = 30.0
    first_pause_s: float = 0.1
    longest_pause_s: float = 2.0


@dataclass(frozen=True)
class Attempt:
    """Tells what to send after `pause_s` seconds: Attach, or the request itself."""

    attach: bool = False
    pause_s: float = 0.0


@dataclass
class Recovery:
    """Holds the state of one call. `deadline` is a time of `clock`, in seconds.

    A call that is `attachable` goes on through Attach. A call that is `restartable` hands nothing out before its end,
    and can begin anew at any time.
    """

    policy: RetryPolicy
    clock: Callable[[], float]
    deadline: float | None = None
    attachable: bool = False
    restartable: bool = False
    last_offset: int = 0
    _retries: int = 0
    _losses: int = 0
    _lost_at: float = field(default=0.0)

    def remaining_s(self) -> float | None:
        """Returns the seconds that are left for the call, or None for no limit."""
        return None if self.deadline is None else max(0.0, self.deadline - self.clock())

    def accept(self, offset: int) -> bool:
        """Takes an event's offset; returns whether the event is new."""
        self._losses = 0
        if offset <= self.last_offset:
            return False
        self.last_offset = offset
        return True

    def after(self, error: OctavoError, failed: Attempt) -> Attempt:
        """Returns the next attempt after `error`. Raises the caller's error if there is no further attempt."""
        if not error.reason and error.code in LOST:
            return self._after_loss(error)
        if failed.attach and isinstance(error, NotFoundError):
            return self._anew(error)
        if error.retry_after_s is None or not self._unseen:
            raise error
        if not failed.attach:
            self.last_offset = 0
        return self._retry(error, failed.attach, error.retry_after_s)

    @property
    def _unseen(self) -> bool:
        """Tells whether the caller has seen nothing of the answer yet."""
        return self.restartable or self.last_offset == 0

    def _after_loss(self, error: OctavoError) -> Attempt:
        pause_s = min(self.policy.first_pause_s * 2**self._losses, self.policy.longest_pause_s)
        if not self._losses:
            self._lost_at = self.clock()
        self._losses += 1
        if self.last_offset == 0:
            # There may be no server at all, for which nobody wants to wait long.
            return self._retry(error, self.attachable, pause_s)
        if self.attachable and self.clock() + pause_s <= self._lost_at + self.policy.reconnect_s:
            return self._pause(error, True, pause_s)
        return self._anew(error)

    def _anew(self, error: OctavoError) -> Attempt:
        """Returns an attempt that begins anew, for the server does not hold the request or cannot be found again.

        Raises `UnavailableError` if the caller has seen a part of the answer.
        """
        if self.last_offset == 0:
            # The request never reached this server.
            return self._retry(error, False, 0.0)
        if self.restartable:
            self.last_offset = 0
            return self._retry(error, False, self.policy.first_pause_s)
        raise UnavailableError(
            f"the stream was lost after event {self.last_offset}, and could not be gone on with: {error}; send the"
            " request again",
            grpc.StatusCode.UNAVAILABLE,
            STREAM_LOST,
        ) from error

    def _retry(self, error: OctavoError, attach: bool, pause_s: float) -> Attempt:
        if self._retries == self.policy.max_retries:
            raise error
        self._retries += 1
        return self._pause(error, attach, pause_s)

    def _pause(self, error: OctavoError, attach: bool, pause_s: float) -> Attempt:
        if self.deadline is not None and self.clock() + pause_s >= self.deadline:
            raise error
        return Attempt(attach, pause_s)
