"""The worker's main loop, which alone has the socket and the clock. One thread receives plans, launches steps and
answers."""

import logging
import math
import secrets
import time
from collections.abc import Callable
from typing import Any

import zmq

from octavo.runtime.transport.curve_keys import ClientKeys
from octavo.runtime.transport.sockets import connect_dealer
from octavo.wire.base import Message
from octavo.wire.codec import WireError, decode_to_worker, encode
from octavo.wire.costs import StepCosts
from octavo.wire.steps import HEARTBEAT_INTERVAL_S, StepPlan, ToWorker, WorkerRole
from octavo.worker.block_disk import BlockDisk
from octavo.worker.block_pulls import BlockPulls
from octavo.worker.health import Liveness
from octavo.worker.metrics import WorkerMetrics
from octavo.worker.process import LastWords, StopSignal
from octavo.worker.protocol import WorkerProtocol
from octavo.worker.runner import Runner

logger = logging.getLogger(__name__)

# The seconds of a drain: longer than a scheduler lets requests go on here before it moves them, unless configured
# otherwise.
DRAIN_TIMEOUT_S = 30.0
_COMPLAINT_INTERVAL_S = 10.0
# The seconds between two looks at a step under way: a small share of the shortest step.
_STEP_WATCH_S = 50e-6
# The time that a goodbye may take to leave a process that is ending.
_GOODBYE_LINGER_MS = 1_000


def serve(
    runner: Runner,
    *,
    worker_id: str,
    endpoint: str,
    liveness: Liveness,
    keys: ClientKeys | None = None,
    costs: StepCosts | None = None,
    metrics: WorkerMetrics | None = None,
    on_beat: Callable[[], None] = lambda: None,
    drain_timeout_s: float = DRAIN_TIMEOUT_S,
    words: LastWords,
    disk: BlockDisk | None = None,
    pulls: BlockPulls | None = None,
    role: WorkerRole = WorkerRole.BOTH,
) -> None:
    """Serves plans of the scheduler at `endpoint` until the scheduler dismisses this worker.

    SIGTERM and SIGINT ask for that; the loop then drains for at most `drain_timeout_s` seconds. It must run on the main
    thread. `keys` are needed if the scheduler has keys. `costs` are the costs measured on the runner, if any. `on_beat`
    is called at every heartbeat. `words` records how this process ends, for the next process of the same name. `disk`
    keeps blocks, and `pulls` takes others' and gives them this one's, if there are such. `role` says what the worker is
    for.

    Raises `RefusedError` if the scheduler refuses this worker, `zmq.ZMQError` if `endpoint` cannot be used.
    """
    stop = StopSignal()
    protocol = WorkerProtocol(
        worker_id, runner, lambda: secrets.randbits(64), costs, words.predecessor, disk, pulls, role
    )
    with stop.installed(), zmq.Context() as context, connect_dealer(context, endpoint, keys) as socket:
        loop = WorkerLoop(
            *(socket, protocol, liveness, stop),
            metrics=metrics,
            on_beat=on_beat,
            on_welcome=lambda: words.begin(protocol.process),
            drain_timeout_s=drain_timeout_s,
        )
        with words.kept():
            loop.run()


class WorkerLoop:
    """Moves messages between the socket and the protocol, and sends a heartbeat every `HEARTBEAT_INTERVAL_S`."""

    def __init__(
        self,
        socket: "zmq.Socket[Any]",
        protocol: WorkerProtocol,
        liveness: Liveness,
        stop: StopSignal,
        clock: Callable[[], float] = time.monotonic,
        metrics: WorkerMetrics | None = None,
        on_beat: Callable[[], None] = lambda: None,
        on_welcome: Callable[[], None] = lambda: None,
        drain_timeout_s: float = DRAIN_TIMEOUT_S,
    ) -> None:
        self._socket = socket
        self._protocol = protocol
        self._liveness = liveness
        self._stop = stop
        self._clock = clock
        self._metrics = metrics or WorkerMetrics(clock)
        self._on_beat = on_beat
        self._on_welcome = on_welcome
        self._drain_timeout_s = drain_timeout_s
        # The time at which the loop ends, dismissed or not; known once it has been asked to end.
        self._leave_by = math.inf
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(stop.fileno(), zmq.POLLIN)
        for fileno in protocol.filenos():
            self._poller.register(fileno, zmq.POLLIN)
        self._next_beat = clock()
        self._next_complaint = clock()
        self.malformed = 0

    def run(self) -> None:
        """Runs until it is time to leave. Steps under way are finished and answered first."""
        while not self._is_over():
            self._liveness.turn(idle=not self._protocol.busy)
            self._beat_if_due()
            self._wait()
            # Answers before what is next: the scheduler plans the step after the next while the next is being launched.
            # What has arrived comes first, for the answer of a step is often what the next plan waits for.
            self._report_arrivals()
            self._answer_if_ready()
            # And what had to come behind the answer.
            self._report_arrivals()
            self._receive()
        self._leave()

    def _is_over(self) -> bool:
        """Tells whether the loop must end: it is dismissed, asked a second time to end, past its drain deadline, or
        draining without a scheduler that could dismiss it."""
        if self._stop.requested and not self._protocol.draining:
            self._begin_drain()
        # A scheduler that registers this worker anew has nothing here to wait for.
        is_alone = self._protocol.draining and self._protocol.epoch is None
        return self._protocol.dismissed or is_alone or self._stop.insisted or self._clock() >= self._leave_by

    def _begin_drain(self) -> None:
        self._stop.noticed()
        self._protocol.draining = self._liveness.draining = True
        self._next_beat = self._clock()
        self._leave_by = self._next_beat + self._drain_timeout_s
        if self._protocol.epoch is not None:
            logger.info("asked to end: for %g s requests may end, or be moved elsewhere", self._drain_timeout_s)

    def _answer_if_ready(self) -> None:
        if self._protocol.ready():
            self._answer()

    def _answer(self) -> None:
        result = self._protocol.answer()
        self._liveness.done()
        self._metrics.answered(result, self._protocol.num_sequences)
        self._send(result)

    def _report_arrivals(self) -> None:
        for message in self._protocol.arrivals():
            self._send(message)

    def _wait(self) -> None:
        """Waits until there is a message, a step is done, or a heartbeat is due."""
        if not self._protocol.busy:
            self._poll(max(0, math.ceil((self._next_beat - self._clock()) * 1000)))
            return
        while not self._protocol.ready() and not self._poll(0) and self._clock() < self._next_beat:
            time.sleep(_STEP_WATCH_S)

    def _poll(self, timeout_ms: int) -> bool:
        """Returns whether something came in time: a message, a signal, or a connection for what did not leave."""
        events = dict(self._poller.poll(timeout_ms))
        if events.get(self._socket, 0) & zmq.POLLOUT:
            self._poller.modify(self._socket, zmq.POLLIN)
            self._next_beat = self._clock()
        return bool(events)

    def _beat_if_due(self) -> None:
        now = self._clock()
        if now >= self._next_beat:
            self._next_beat = now + HEARTBEAT_INTERVAL_S
            self._send(self._protocol.beat())
            self._on_beat()

    def _receive(self) -> None:
        """Takes at most one message, so that a heartbeat is never late by more than one step."""
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        message = self._decode(frames)
        if message is None:
            return
        self._liveness.work()
        if isinstance(message, StepPlan):
            self._liveness.owe()
            self._metrics.received(message)
        self._protocol.receive(message)
        self._note_registration()

    def _note_registration(self) -> None:
        welcomed = self._protocol.epoch is not None
        if self._liveness.welcomed and not welcomed:
            # Say hello now: until the scheduler knows the new incarnation, this replica stands idle.
            self._next_beat = self._clock()
        if welcomed and not self._liveness.welcomed:
            self._on_welcome()
        self._liveness.welcomed = welcomed

    def _decode(self, frames: list[bytes]) -> ToWorker | None:
        try:
            if len(frames) != 1:
                raise WireError(f"{len(frames)} frames instead of one")
            return decode_to_worker(frames[0])
        except WireError as error:
            self._count_malformed(error)
            return None

    def _count_malformed(self, error: WireError) -> None:
        self.malformed += 1
        now = self._clock()
        if now >= self._next_complaint:
            self._next_complaint = now + _COMPLAINT_INTERVAL_S
            logger.warning("dropped a malformed message (%d so far): %s", self.malformed, error)

    def _send(self, message: Message) -> None:
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            self._lose_scheduler()
            # The hello is sent again as soon as there is a connection.
            self._poller.modify(self._socket, zmq.POLLIN | zmq.POLLOUT)

    def _lose_scheduler(self) -> None:
        # While it connects, the worker has promised nothing to a scheduler, so the incarnation may stay.
        if self._protocol.epoch is not None:
            logger.warning("the scheduler is away; registering anew when it is back")
            self._protocol.reset()
            self._note_registration()

    def _leave(self) -> None:
        self._liveness.welcomed = False
        while self._protocol.busy:
            self._answer()
        goodbye = self._protocol.goodbye()
        if goodbye is not None:
            self._send(goodbye)
        self._socket.setsockopt(zmq.LINGER, _GOODBYE_LINGER_MS)
        how = "dismissed" if self._protocol.dismissed else "stopped"
        logger.info("%s after step %d", how, self._protocol.last_step_id)
