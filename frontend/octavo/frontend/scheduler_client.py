"""The socket and the clock of the conversation with the scheduler, and what the rest of the frontend may know of it."""

import asyncio
import enum
import logging
import secrets
import time
from collections.abc import Mapping

import zmq
import zmq.asyncio

from octavo.frontend.errors import Overloaded, Reason, Unavailable
from octavo.frontend.journal import Journal
from octavo.frontend.pinned_prefixes import PinnedPrefixes
from octavo.frontend.reader import Reader
from octavo.frontend.scheduler_session import LiveRequest, SchedulerSession
from octavo.wire.codec import WireError, decode_to_frontend, encode
from octavo.wire.curve_keys import ClientKeys
from octavo.wire.requests import MAX_LIVE_REQUESTS, RENEW_INTERVAL_S, FromFrontend, ServiceStatus
from octavo.wire.sockets import connect_dealer

_log = logging.getLogger(__name__)

# Every renewal is answered at once, so silence of three means that the scheduler is away.
_SILENCE_S = 3 * RENEW_INTERVAL_S
_HELLO_INTERVAL_S = 0.2
_COMPLAINT_INTERVAL_S = 1.0


class Availability(enum.Enum):
    """Whether a request could run now, or what is missing."""

    READY = enum.auto()
    NO_SCHEDULER = enum.auto()
    NO_WORKER = enum.auto()
    MODEL_MISMATCH = enum.auto()


class SchedulerRefused(Exception):
    """The scheduler speaks another version; this process must not go on."""


class SchedulerClient:
    """One frontend's link to the scheduler. `run()` must be running; all methods belong to its event loop."""

    def __init__(
        self,
        endpoint: str,
        model_fingerprint: str,
        grace_s: float,
        own_prefixes: Mapping[str, list[int]] | None = None,
        keys: ClientKeys | None = None,
    ) -> None:
        self.grace_s = grace_s
        self._endpoint = endpoint
        self._keys = keys
        # Half of the range, because msgpack has room for 64 bits and some readers only for 63.
        self._session = SchedulerSession(secrets.randbits(63), model_fingerprint, time.monotonic(), own_prefixes)
        self._socket: zmq.asyncio.Socket | None = None
        self._changed = asyncio.Event()
        self.dropped_messages = 0
        self._complained_at = float("-inf")

    @property
    def status(self) -> ServiceStatus | None:
        """The last the scheduler said of itself; None before its first word."""
        return self._session.status

    @property
    def prefixes(self) -> PinnedPrefixes:
        """The pinned prefixes that requests may name."""
        return self._session.prefixes

    @property
    def model_fingerprint(self) -> str:
        """That of this frontend's model directory, which the workers' must equal."""
        return self._session.model_fingerprint

    @property
    def journals(self) -> list[Journal]:
        """Those of all requests in the scheduler's hands."""
        return [request.journal for request in self._session.live.values()]

    @property
    def availability(self) -> Availability:
        """What stands between a request and a worker, now."""
        status = self._session.status
        silent = self.away_s() > _SILENCE_S
        if status is None or self._session.epoch is None or silent:
            return Availability.NO_SCHEDULER
        if status.replicas == 0 or status.model is None:
            return Availability.NO_WORKER
        if status.model.fingerprint != self.model_fingerprint:
            return Availability.MODEL_MISMATCH
        return Availability.READY

    def away_s(self) -> float:
        """Seconds since the scheduler's last word, or since the start."""
        return time.monotonic() - self._session.last_heard

    async def changed(self) -> None:
        """Returns after the next message or tick, when `availability` may be another."""
        await self._changed.wait()

    def submit(self, journal: Journal, reader: Reader) -> LiveRequest:
        """Hands a request over. Raises `Overloaded` beyond what one renewal can name."""
        if len(self._session.live) >= MAX_LIVE_REQUESTS:
            raise Overloaded(
                Reason.TOO_MANY_REQUESTS, f"{MAX_LIVE_REQUESTS} requests are running here; try again later"
            )
        request = LiveRequest(journal, reader)
        self._send(self._session.submit(request, time.monotonic()))
        return request

    def end_sequence(self, request: LiveRequest, sequence_index: int) -> None:
        """Ends one sequence of a request whose others may run on."""
        self._send(self._session.end_sequence(request, sequence_index))

    def release(self, request: LiveRequest) -> None:
        """Ends a request, whatever its state; must be called for every submitted one."""
        self._send(self._session.release(request))

    async def run(self) -> None:
        """Keeps the conversation going until cancelled. Raises `SchedulerRefused`."""
        # Loading a tokenizer takes seconds that are no silence of the scheduler.
        self._session.last_heard = time.monotonic()
        context = zmq.asyncio.Context()
        self._socket = connect_dealer(context, self._endpoint, self._keys)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receive(self._socket))
                tasks.create_task(self._tick())
        except ExceptionGroup as failures:
            # Not `except*`, which may wrap what is raised in it once more.
            refusals = failures.subgroup(SchedulerRefused)
            if refusals is None:
                raise
            raise refusals.exceptions[0] from None
        finally:
            self._socket.close()
            self._socket = None
            context.term()

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            try:
                if len(frames) != 1:
                    raise WireError(f"a message of {len(frames)} frames")
                message = decode_to_frontend(frames[0])
            except WireError as error:
                self._drop(error)
                continue
            self._send(self._session.receive(message, time.monotonic()))
            if self._session.refused is not None:
                raise SchedulerRefused(self._session.refused)
            self._announce()

    def _drop(self, error: WireError) -> None:
        self.dropped_messages += 1
        if (now := time.monotonic()) - self._complained_at >= _COMPLAINT_INTERVAL_S:
            self._complained_at = now
            _log.warning("dropped a malformed message from the scheduler (%d so far): %s", self.dropped_messages, error)

    async def _tick(self) -> None:
        while True:
            self._send(self._session.tick())
            if self.away_s() > self.grace_s:
                self._fail_all()
            self._announce()
            await asyncio.sleep(RENEW_INTERVAL_S if self._session.epoch is not None else _HELLO_INTERVAL_S)

    def _send(self, messages: list[FromFrontend]) -> None:
        for message in messages:
            if self._socket is None or not _send_now(self._socket, encode(message)):
                self._session.disconnected()
                return

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _fail_all(self) -> None:
        for request in self._session.live.values():
            if not request.journal.complete:
                request.reader.fail(unreachable(self.away_s()))


def unreachable(away_s: float) -> Unavailable:
    """The error of a request that outlived its scheduler."""
    return Unavailable(
        Reason.SCHEDULER_UNREACHABLE, f"the scheduler has not answered for {away_s:.0f} s; try again later"
    )


def _send_now(socket: zmq.asyncio.Socket, frame: bytes) -> bool:
    """Whether the frame left: without waiting, for what cannot leave now is repaired by a renewal."""
    future = asyncio.ensure_future(socket.send(frame, flags=zmq.NOBLOCK))
    try:
        future.result()
    except zmq.Again:
        return False
    return True
