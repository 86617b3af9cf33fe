"""Gives the conversation with one scheduler its socket and its clock, and reports the scheduler's state."""

import asyncio
import contextlib
import enum
import functools
import logging
import math
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Final

import zmq

from octavo.frontend.errors import Overloaded, Reason, Unavailable
from octavo.frontend.scheduler.pinned_prefixes import PinnedPrefixes
from octavo.frontend.scheduler.prefix_router import CellLoad
from octavo.frontend.scheduler.session import LiveRequest, SchedulerSession
from octavo.runtime.transport.arrivals import Arrivals
from octavo.runtime.transport.curve_keys import ClientKeys
from octavo.runtime.transport.messages import may_send, receive, send
from octavo.runtime.transport.sockets import connect_dealer
from octavo.wire.codec import WireError, decode_to_frontend, encode
from octavo.wire.requests import (
    MAX_LIVE_REQUESTS,
    RENEW_INTERVAL_S,
    Deltas,
    FromFrontend,
    Notices,
    PrefixCacheReset,
    RejectReason,
    ServiceLoad,
    ServiceStatus,
)

_log = logging.getLogger(__name__)

# Every renewal is answered at once, so silence of three means that the scheduler is away.
_SILENCE_S = 3 * RENEW_INTERVAL_S
_HELLO_INTERVAL_S = 0.2
# A load that is older is not told any more: every answer to a renewal brings a new one.
_LOAD_LASTS_S = 2 * RENEW_INTERVAL_S
_COMPLAINT_INTERVAL_S = 1.0
# Messages that tell of requests alone.
_OF_REQUESTS: Final = (Deltas, Notices)


class SchedulerAvailability(enum.Enum):
    """Tells whether a request could run now, or what is missing."""

    READY = enum.auto()
    NO_SCHEDULER = enum.auto()
    NO_WORKER = enum.auto()
    MODEL_MISMATCH = enum.auto()
    # There is work, and the workers that could take more of it answer no step.
    STALLED = enum.auto()


class SchedulerRefused(Exception):
    """The scheduler speaks another schema version, so this process must not go on."""


class SchedulerClient:
    """Links one frontend to one scheduler. `run()` must be running; all methods belong to its event loop.

    `on_change` is called after each tick, after each message but tokens and notices, and whenever `availability` has
    changed. `own_prefixes`, `attempts` and `hand_over` are those of `SchedulerSession`; `hand_over` gets this client
    first.
    """

    def __init__(
        self,
        endpoint: str,
        model_fingerprint: str,
        grace_s: float,
        own_prefixes: Mapping[str, list[int]] | None = None,
        keys: ClientKeys | None = None,
        attempts: Iterator[int] | None = None,
        on_change: "Callable[[SchedulerClient], None]" = lambda _: None,
        hand_over: "Callable[[SchedulerClient, LiveRequest, RejectReason], bool]" = lambda link, request, reason: False,
    ) -> None:
        self.endpoint = endpoint
        self._grace_s = grace_s
        self._keys = keys
        self._on_change = on_change
        now = time.monotonic()
        # Half of the range, because msgpack has room for 64 bits and some readers only for 63.
        self._session = SchedulerSession(
            secrets.randbits(63), model_fingerprint, now, own_prefixes, attempts, functools.partial(hand_over, self)
        )
        self._socket: zmq.Socket[bytes] | None = None
        self._arrivals: Arrivals | None = None
        # A message could not leave, and is to be sent again once there is a connection.
        self._is_cut_off = False
        self._ready_at = now
        # As it was when `on_change` was called last.
        self._announced: SchedulerAvailability | None = None
        self._hurry = asyncio.Event()
        self.dropped_messages = 0
        self._complained_at = float("-inf")

    @property
    def frontend_id(self) -> str:
        """Returns the name of this registration, as the scheduler's Admin service and log write it."""
        return f"{self._session.frontend_id:016x}"

    @property
    def status(self) -> ServiceStatus | None:
        """Returns the latest status that the scheduler sent; None before its first message."""
        return self._session.status

    @property
    def epoch(self) -> int | None:
        """Returns the epoch (one start of the scheduler) with which this frontend is registered, or None."""
        return self._session.epoch

    @property
    def prefixes(self) -> PinnedPrefixes:
        """Returns the prefixes that the scheduler has pinned."""
        return self._session.prefixes

    @property
    def live(self) -> list[LiveRequest]:
        """Returns all requests that the scheduler holds."""
        return list(self._session.live.values())

    @property
    def work_tokens(self) -> int:
        """Returns the tokens that the cell is still to compute, of all frontends' requests."""
        return self._session.work_tokens

    @property
    def load(self) -> CellLoad | None:
        """Returns the load of the cell; None if a further request could not be sent there."""
        availability = self.availability
        if availability is SchedulerAvailability.MODEL_MISMATCH or len(self._session.live) >= MAX_LIVE_REQUESTS:
            return None
        status = self.status if availability is SchedulerAvailability.READY else None
        return CellLoad(status.replicas if status else 0, self.work_tokens)

    @property
    def status_age_s(self) -> float:
        """Returns the seconds since the scheduler's latest status came; infinite before its first message."""
        return time.monotonic() - self._session.status_at

    @property
    def service_load(self) -> ServiceLoad | None:
        """Returns how busy the cell is, all frontends together; None where that is not known of now, or where the cell
        serves another model."""
        unknown = SchedulerAvailability.NO_SCHEDULER, SchedulerAvailability.MODEL_MISMATCH
        if self.status is None or self.availability in unknown or self.status_age_s > _LOAD_LASTS_S:
            return None
        return self.status.load

    @property
    def availability(self) -> SchedulerAvailability:
        """Tells whether a request could run now, or what is missing."""
        status = self._session.status
        silent = self.away_s() > _SILENCE_S
        if status is None or self._session.epoch is None or silent:
            return SchedulerAvailability.NO_SCHEDULER
        if status.replicas == 0 or status.model is None:
            return SchedulerAvailability.NO_WORKER
        if status.model.fingerprint != self._session.model_fingerprint:
            return SchedulerAvailability.MODEL_MISMATCH
        return SchedulerAvailability.STALLED if status.stalled else SchedulerAvailability.READY

    def away_s(self) -> float:
        """Returns the seconds since the scheduler's last message, or since the start."""
        return time.monotonic() - self._session.last_heard

    def unready_s(self) -> float:
        """Returns the seconds for which no request could have run in the cell."""
        if self.availability is SchedulerAvailability.READY:
            return 0.0
        return max(self.away_s(), time.monotonic() - self._ready_at)

    def ask_prefixes(self) -> None:
        """Asks the scheduler what is pinned; until it has answered, `prefixes.reported` is False."""
        self._send(self._session.ask_prefixes())

    def ask_cache_reset(self, salt: str | None) -> int:
        """Asks for a reset of the prefix cache; returns the serial of the answer, which may never come."""
        serial, messages = self._session.reset_prefix_cache(salt)
        self._send(messages)
        return serial

    @property
    def cache_resets(self) -> dict[int, PrefixCacheReset | None]:
        """Returns the answers by their serial, None where they have not come; who asked takes its own out."""
        return self._session.cache_resets

    def submit(self, request: LiveRequest) -> None:
        """Sends a request. Raises `Overloaded` for more requests than one renewal can name."""
        if len(self._session.live) >= MAX_LIVE_REQUESTS:
            raise Overloaded(
                Reason.TOO_MANY_REQUESTS, f"{MAX_LIVE_REQUESTS} requests are running here; try again later"
            )
        self._send(self._session.submit(request, time.monotonic()))

    def end_sequence(self, request: LiveRequest, sequence_index: int) -> None:
        """Ends one sequence of a request whose others may run on."""
        self._send(self._session.end_sequence(request, sequence_index))

    def release(self, request: LiveRequest) -> None:
        """Ends a request, whatever its state; must be called for every submitted one."""
        self._send(self._session.release(request))

    @property
    def holds(self) -> bool:
        """Tells whether requests wait here for the scheduler to come back, and their grace is not over."""
        waiting = any(not request.journal.complete for request in self._session.live.values())
        return waiting and self.away_s() <= self._grace_s

    def fail_all(self) -> None:
        """Fails all requests that still wait for the scheduler."""
        for request in self._session.live.values():
            if not request.journal.complete:
                request.fail(unreachable(self.away_s()))

    async def run(self) -> None:
        """Keeps the conversation going until cancelled. Raises `SchedulerRefused`; may then be run again."""
        self._session.refused = None
        if self.status is None:
            # Seconds that loading the tokenizer took are no silence of the scheduler.
            self._session.last_heard = time.monotonic()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        lost = functools.partial(_call_on, asyncio.get_running_loop(), self._lost)
        self._socket = socket = connect_dealer(context, self.endpoint, self._keys, lost)
        self._arrivals = Arrivals(functools.partial(self._take, socket), [socket])
        try:
            await run_together(self._arrivals.run(), self._tick())
        finally:
            self._session.disconnected()
            self._socket = self._arrivals = None
            socket.close()
            context.term()

    def _lost(self) -> None:
        """Handles the end of the connection, with which the scheduler may have ended too."""
        self._session.disconnected()
        self._hurry.set()

    def _take(self, socket: "zmq.Socket[bytes]") -> float:
        """Takes one message, if there is any; returns that nothing else makes it look again. Raises
        `SchedulerRefused`."""
        if self._is_cut_off and may_send(socket):
            self._hurry.set()
        # Nearly always one has come, and to ask before costs as much as to receive it.
        try:
            frames = receive(socket)
        except zmq.Again:
            return math.inf
        self._receive(frames)
        return math.inf

    def _receive(self, frames: list[bytes]) -> None:
        try:
            if len(frames) != 1:
                raise WireError(f"a message of {len(frames)} frames")
            message = decode_to_frontend(frames[0])
        except WireError as error:
            self._drop(error)
            return
        now = time.monotonic()
        if answers := self._session.receive(message, now):
            self._send(answers)
        if self._session.refused is not None:
            raise SchedulerRefused(self._session.refused)
        if not isinstance(message, _OF_REQUESTS):
            self._announce(is_news=True)
        elif message.epoch == self._session.epoch and self._announced is SchedulerAvailability.READY:
            # Tokens are most of what comes, and tell only that the scheduler is still there.
            self._ready_at = now
        else:
            self._announce(is_news=False)

    def _drop(self, error: WireError) -> None:
        self.dropped_messages += 1
        if (now := time.monotonic()) - self._complained_at >= _COMPLAINT_INTERVAL_S:
            self._complained_at = now
            _log.warning("dropped a malformed message from the scheduler (%d so far): %s", self.dropped_messages, error)

    async def _tick(self) -> None:
        while True:
            self._hurry.clear()
            has_left = self._send(self._session.tick())
            self._announce(is_news=True)
            if self.away_s() > self._grace_s:
                self.fail_all()
            # Where there is no connection yet, the hello is sent again as soon as there is one.
            self._is_cut_off = not has_left
            await self._rest(RENEW_INTERVAL_S if self._session.epoch is not None else _HELLO_INTERVAL_S)

    async def _rest(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._hurry.wait()

    def _send(self, messages: list[FromFrontend]) -> bool:
        """Sends `messages`; returns whether all of them left."""
        for message in messages:
            if self._socket is None or not _has_left(self._socket, encode(message)):
                self._session.disconnected()
                return False
        if messages and self._arrivals:
            self._arrivals.look()
        return True

    def _announce(self, *, is_news: bool) -> None:
        availability = self.availability
        if availability is SchedulerAvailability.READY:
            self._ready_at = time.monotonic()
        if is_news or availability is not self._announced:
            self._announced = availability
            self._on_change(self)


def unreachable(away_s: float) -> Unavailable:
    """Returns the error for a request whose scheduler has been away for too long."""
    return Unavailable(
        Reason.SCHEDULER_UNREACHABLE, f"the scheduler has not answered for {away_s:.0f} s; try again later"
    )


async def run_together(*coroutines: Coroutine[None, None, None]) -> None:
    """Runs `coroutines` until one fails, or all are cancelled. Raises `SchedulerRefused` outside of any group."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for coroutine in coroutines:
                tasks.create_task(coroutine)
    except ExceptionGroup as failures:
        # Not `except*`, which may wrap what is raised in it once more.
        refusals = failures.subgroup(SchedulerRefused)
        if refusals is None:
            raise
        raise refusals.exceptions[0] from None


def _call_on(loop: asyncio.AbstractEventLoop, act: Callable[[], None]) -> None:
    """Calls `act` in `loop` from any thread; does nothing if the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(act)


def _has_left(socket: "zmq.Socket[bytes]", frame: bytes) -> bool:
    """Sends `frame` without waiting; returns whether the frame left. A renewal repairs the loss of one that did not."""
    try:
        send(socket, frame)
    except zmq.Again:
        return False
    return True
