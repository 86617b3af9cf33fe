"""The loop between the core and the outside: two ROUTER sockets, the clock, and who is behind which connection."""

import logging
import time
from collections.abc import Callable, Iterator

import msgspec
import zmq

from octavo.runtime.transport.arrivals import Arrivals
from octavo.runtime.transport.messages import has_arrived, receive, send_to
from octavo.runtime.transport.wakeup import Wakeup
from octavo.scheduler.core.config import Preemption
from octavo.scheduler.core.events import (
    CacheReset,
    DiskAnswered,
    Effect,
    Event,
    FrontendJoined,
    FrontendLost,
    LeaseRenewed,
    LossCause,
    PrefixesNamed,
    PrefixGivenUp,
    PullAnswered,
    ReplicaDismissed,
    ReplicaHeard,
    ReplicaJoined,
    ReplicaLeft,
    ReplicaLost,
    ReplicaMovedOn,
    ReplicaStalled,
    RequestQuarantined,
    RequestsAborted,
    RequestSubmitted,
    SendToFrontend,
    SendToReplica,
    SequenceEnded,
    StepAnswered,
    Tick,
)
from octavo.scheduler.core.explain import describe, explain
from octavo.scheduler.core.scheduler import Scheduler
from octavo.scheduler.server.event_log import Began, Handled, Planned, Recorder, Scheduled
from octavo.wire.base import SCHEMA_VERSION, Message
from octavo.wire.codec import WireError, decode_from_frontend, decode_from_worker
from octavo.wire.requests import (
    Abort,
    EndSequence,
    FrontendHello,
    PinPrefixes,
    Refused,
    Renew,
    Request,
    ResetPrefixCache,
    Submit,
    Unregistered,
)
from octavo.wire.steps import (
    BlocksFetched,
    BlocksPulled,
    Ending,
    Heartbeat,
    StepPlan,
    StepResult,
    ToWorker,
    WorkerGoodbye,
    WorkerHello,
    WorkerRefused,
    WorkerUnregistered,
    WorkerWelcome,
)
from octavo.wire.versions import encode_for, refusal, refusal_of_newer

_log = logging.getLogger(__name__)

_TICK_S = 0.1
# Seconds from the wakeup's ring, which may be quicker than the socket, to each look at who is gone.
_LOOKS_S = (0.0, 0.005, 0.02, 0.1)
# Messages taken from one socket before the other is looked at again.
_BATCH = 1024


class Wire:
    """Joins a ROUTER socket with the peers known on it: `id` (frontend id or incarnation) to connection and back, and
    the schema that each connection speaks."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self.socket = socket
        self._connection_of: dict[int, bytes] = {}
        self._id_of: dict[bytes, int] = {}
        self._version_of: dict[bytes, int] = {}

    def bind(self, peer_id: int, connection: bytes, version: int = SCHEMA_VERSION) -> None:
        """Notes that the peer said hello on this connection; messages on an older connection of the peer no longer
        count as its."""
        self.unbind(peer_id)
        if (other := self._id_of.get(connection)) is not None:
            self.unbind(other)
        self._connection_of[peer_id] = connection
        self._id_of[connection] = peer_id
        self._version_of[connection] = version

    def unbind(self, peer_id: int) -> None:
        if (connection := self._connection_of.pop(peer_id, None)) is not None:
            del self._id_of[connection]
            del self._version_of[connection]

    def peer(self, connection: bytes) -> int | None:
        return self._id_of.get(connection)

    def receive(self) -> Iterator[list[bytes]]:
        """Yields the messages that have arrived, without waiting."""
        for _ in range(_BATCH):
            if not has_arrived(self.socket):
                return
            yield receive(self.socket)

    def send(self, peer_id: int, message: Message) -> bool:
        """Sends a message and returns whether it left; False if the peer has gone or does not read."""
        connection = self._connection_of.get(peer_id)
        return connection is not None and self.reply(connection, message)

    def reply(self, connection: bytes, message: Message) -> bool:
        """Sends a message to a connection, known peer or not, and returns whether it left: messages for strangers read
        the same in every schema."""
        frame = encode_for(message, self._version_of.get(connection, SCHEMA_VERSION))
        # A peer whose schema has no such message goes on without it.
        return frame is None or self._has_left(connection, frame)

    def encoded(self, peer_id: int, message: Message) -> bytes | None:
        """Encodes a message for a peer; None if nobody is known by that id, or its schema has no such message."""
        connection = self._connection_of.get(peer_id)
        return None if connection is None else encode_for(message, self._version_of[connection])

    def send_encoded(self, peer_id: int, frame: bytes) -> bool:
        """Sends what was encoded for a peer, and returns whether it left: see `send`."""
        connection = self._connection_of.get(peer_id)
        return connection is not None and self._has_left(connection, frame)

    def _has_left(self, connection: bytes, frame: bytes) -> bool:
        try:
            send_to(self.socket, connection, frame)
        except zmq.ZMQError:
            return False
        return True


class SchedulerShell:
    """Feeds the core what arrives and carries out its effects. `departure` rings when a worker's connection ends;
    `after_turn` is called at the end of every turn."""

    def __init__(
        self,
        core: Scheduler,
        frontend_socket: "zmq.Socket[bytes]",
        worker_socket: "zmq.Socket[bytes]",
        record: Recorder | None = None,
        clock: Callable[[], float] = time.monotonic,
        begin_span: Callable[[Request], Request] = lambda request: request,
        departure: Wakeup | None = None,
        after_turn: Callable[[], None] | None = None,
    ) -> None:
        self.core = core
        self._record = record
        self._begin_span = begin_span
        if record is not None:
            record(Began(SCHEMA_VERSION, core.epoch, core.config))
        self.dropped_messages = 0
        self._frontends = Wire(frontend_socket)
        self._workers = Wire(worker_socket)
        self._clock = clock
        self._ticked_at = clock()
        self._complained_at = float("-inf")
        self._departure = departure
        self._looks_at: list[float] = []
        self._after_turn = after_turn
        # Messages to frontends, by their ids and in bytes, which leave together at the end of a turn.
        self._for_frontends: list[tuple[int, bytes]] = []

    async def run(self) -> None:
        """Serves until cancelled."""
        others = [self._departure] if self._departure else []
        await Arrivals(self.timed_turn, [self._frontends.socket, self._workers.socket], *others).run()

    def timed_turn(self) -> float:
        """Takes a turn, and returns how many seconds the next may wait if nothing arrives."""
        self.turn()
        return min(_TICK_S, max(0.0, self._looks_at[0] - self.now())) if self._looks_at else _TICK_S

    def now(self) -> float:
        """Returns the core's time: seconds of the clock."""
        return self._clock()

    def handle(self, event: Event) -> None:
        """Takes in an event that did not come through a socket; what follows from it is planned at the next turn."""
        self._handle(event, self.now())
        self._send_to_frontends()

    def turn(self) -> None:
        """Takes in all that has arrived, looks at the clock, then plans."""
        now = self._clock()
        for frames in self._workers.receive():
            self._receive(frames, self._from_worker, now)
        for frames in self._frontends.receive():
            self._receive(frames, self._from_frontend, now)
        if self._departure and self._departure.heard():
            self._looks_at = [now + delay for delay in _LOOKS_S]
        if self._looks_at and now >= self._looks_at[0]:
            self._looks_at.pop(0)
            self._look_for_departed(now)
        if now - self._ticked_at >= _TICK_S:
            self._ticked_at = now
            self._handle(Tick(), now)
        if self._record is not None:
            self._record(Scheduled(now))
        self._perform(self.core.schedule(now), now)
        self._send_to_frontends()
        if self._after_turn is not None:
            self._after_turn()

    def _look_for_departed(self, now: float) -> None:
        """Finds out which workers are gone, by a message that means nothing new to any of them."""
        for replica_id in list(self.core.replicas):
            self._send_to_replica(replica_id, WorkerWelcome(self.core.epoch), now)

    def _receive(self, frames: list[bytes], take: Callable[[bytes, bytes, float], None], now: float) -> None:
        try:
            if len(frames) != 2:
                raise WireError(f"{len(frames)} frames instead of 2")
            take(frames[0], frames[1], now)
        except WireError as error:
            if not self._refuse_newer(frames):
                self._drop(f"malformed: {error}")

    def _refuse_newer(self, frames: list[bytes]) -> bool:
        """Refuses the hello of a peer whose schema is newer, and may hold what this one cannot read; returns whether
        the message was one."""
        answer = refusal_of_newer(frames[1]) if len(frames) == 2 else None
        if answer is not None:
            (self._frontends if isinstance(answer, Refused) else self._workers).reply(frames[0], answer)
        return answer is not None

    def _drop(self, why: str) -> None:
        self.dropped_messages += 1
        if (now := self._clock()) - self._complained_at >= 1.0:
            self._complained_at = now
            _log.warning("dropped a message (%d so far): %s", self.dropped_messages, why)

    # -- frontends --------------------------------------------------------------------------------------------------

    def _from_frontend(self, connection: bytes, frame: bytes, now: float) -> None:
        message = decode_from_frontend(frame)
        if isinstance(message, FrontendHello):
            self._frontend_hello(connection, message, now)
            return
        frontend_id = self._frontends.peer(connection)
        if frontend_id is None or message.epoch != self.core.epoch:
            self._drop(f"{type(message).__name__} from an unregistered frontend")
            self._frontends.reply(connection, Unregistered(self.core.epoch))
            return
        if isinstance(message, Submit):
            message = msgspec.structs.replace(message, request=self._begin_span(message.request))
        self._handle(_frontend_event(frontend_id, message), now)

    def _frontend_hello(self, connection: bytes, hello: FrontendHello, now: float) -> None:
        if detail := refusal("frontend", hello.schema_version):
            self._frontends.reply(connection, Refused(detail))
            return
        # A frontend that is here says hello to ask what is pinned.
        if self._frontends.peer(connection) != hello.frontend_id:
            _log.info("frontend %016x joined", hello.frontend_id)
        self._frontends.bind(hello.frontend_id, connection, hello.schema_version)
        self._handle(FrontendJoined(hello.frontend_id), now)

    # -- workers ----------------------------------------------------------------------------------------------------

    def _from_worker(self, connection: bytes, frame: bytes, now: float) -> None:
        message = decode_from_worker(frame)
        if isinstance(message, WorkerHello):
            self._worker_hello(connection, message, now)
            return
        current = message.epoch == self.core.epoch and message.incarnation == self._workers.peer(connection)
        if not current or message.incarnation not in self.core.replicas:
            self._drop(f"{type(message).__name__} of another epoch or incarnation")
            self._workers.reply(connection, WorkerUnregistered(self.core.epoch))
            return
        self._handle(_worker_event(message), now)

    def _worker_hello(self, connection: bytes, hello: WorkerHello, now: float) -> None:
        if detail := refusal("worker", hello.schema_version):
            self._workers.reply(connection, WorkerRefused(detail))
            return
        if self._is_rivalled(hello, connection):
            self._drop(f"a second worker calls itself {hello.worker_id}; it must wait, or get a --worker-id of its own")
            return
        former = self._workers.peer(connection)
        self._workers.bind(hello.incarnation, connection, hello.schema_version)
        known = hello.incarnation in self.core.replicas
        self._handle(ReplicaJoined(hello), now)
        if former in self.core.replicas and hello.incarnation not in self.core.replicas:
            # The hello of a life that is over came late: the connection is still that of the worker's present one.
            self._workers.bind(former, connection, hello.schema_version)
        if not known and hello.incarnation in self.core.replicas:
            per_slot = hello.kv_bytes_per_token / max(1, len(hello.kv_groups))
            gib = hello.num_blocks * hello.block_size * per_slot / 2**30
            _log.info(
                "worker %s joined: %s on %s, %d blocks of %d tokens (%.2f GiB of KV, %d bytes per token)",
                *(hello.worker_id, hello.model.dtype, hello.device, hello.num_blocks, hello.block_size),
                *(gib, hello.kv_bytes_per_token),
            )
            if before := hello.predecessor:
                what = "crashed" if before.ending is Ending.CRASHED else "did not leave in order"
                _log.warning("the process before worker %s %s: %s", hello.worker_id, what, before.detail)
            if self.core.config.preemption is Preemption.MEASURED and hello.num_cpu_blocks and hello.costs is None:
                _log.warning("worker %s has not measured its costs: preemption there is as with auto", hello.worker_id)

    def _is_rivalled(self, hello: WorkerHello, connection: bytes) -> bool:
        """Tells whether another living worker has this one's name: its connection takes a message and is not this
        one."""
        former = self.core.replica_of_worker(hello.worker_id)
        if former is None or self._workers.peer(connection) == former.replica_id:
            return False
        return self._workers.send(former.replica_id, WorkerWelcome(self.core.epoch))

    # -- effects ----------------------------------------------------------------------------------------------------

    def _handle(self, event: Event, now: float) -> None:
        if self._record is not None:
            self._record(Handled(now, event))
        self._perform(self.core.handle(event, now), now)

    def _perform(self, effects: list[Effect], now: float) -> None:
        for effect in effects:
            match effect:
                case SendToFrontend(frontend_id, message):
                    if (frame := self._frontends.encoded(frontend_id, message)) is not None:
                        self._for_frontends.append((frontend_id, frame))
                case SendToReplica(replica_id, message):
                    self._send_to_replica(replica_id, message, now)
                case FrontendLost(frontend_id):
                    _log.warning("frontend %016x lost: its lease ran out", frontend_id)
                    self._frontends.unbind(frontend_id)
                case ReplicaLost(replica_id, cause, reason, worker_id):
                    _log.warning("worker %s lost (%s): %s", worker_id, cause, reason)
                    self._workers.unbind(replica_id)
                case ReplicaDismissed(replica_id, worker_id):
                    _log.info("worker %s was drained and is let go", worker_id)
                    self._workers.unbind(replica_id)
                case ReplicaStalled(_, request_id, reason):
                    _log.error("%s: %s", reason, self._why_it_waits(request_id, now))
                case ReplicaMovedOn(_, worker_id):
                    _log.info("worker %s answers steps again, or has nothing left to do", worker_id)
                case RequestQuarantined(request_id, reason):
                    _log.error("request %r is quarantined: %s", request_id, reason)
                case PrefixGivenUp(replica_id, name, reason):
                    _log.warning("replica %016x goes on without the pinned prefix %r: %s", replica_id, name, reason)

    def _why_it_waits(self, request_id: str, now: float) -> str:
        return (
            "; ".join(describe(found) for found in explain(self.core.state, self.core.policy, request_id, now))
            or f"{request_id} is its own"
        )

    def _send_to_frontends(self) -> None:
        """Sends what has gathered, right behind the plans: workers wait for those, and the thread that writes to
        sockets is woken once for both."""
        frames, self._for_frontends = self._for_frontends, []
        for frontend_id, frame in frames:
            # A frontend that cannot be reached asks again, or its lease runs out.
            self._frontends.send_encoded(frontend_id, frame)

    def _send_to_replica(self, replica_id: int, message: ToWorker, now: float) -> None:
        if self._record is not None and isinstance(message, StepPlan):
            self._record(Planned(message))
        sent = self._workers.send(replica_id, message)
        if isinstance(message, WorkerRefused):
            _log.warning("refused a worker: %s", message.detail)
            self._workers.unbind(replica_id)
        elif not sent and replica_id in self.core.replicas:
            reason = "its connection has ended"
            self._handle(ReplicaLeft(replica_id, LossCause.UNREACHABLE, reason), now)


def _frontend_event(
    frontend_id: int, message: Submit | Renew | Abort | EndSequence | PinPrefixes | ResetPrefixCache
) -> Event:
    match message:
        case Submit(_, request):
            return RequestSubmitted(frontend_id, request)
        case Renew(_, live):
            return LeaseRenewed(frontend_id, live)
        case Abort(_, request_ids):
            return RequestsAborted(frontend_id, request_ids)
        case EndSequence(_, request_id, attempt, sequence_index):
            return SequenceEnded(frontend_id, request_id, attempt, sequence_index)
        case PinPrefixes(_, prefixes):
            return PrefixesNamed(frontend_id, prefixes)
        case ResetPrefixCache(_, serial, salt):
            return CacheReset(salt, frontend_id, serial)


def _worker_event(message: StepResult | BlocksFetched | BlocksPulled | Heartbeat | WorkerGoodbye) -> Event:
    match message:
        case StepResult():
            return StepAnswered(message.incarnation, message)
        case BlocksFetched():
            return DiskAnswered(message.incarnation, message)
        case BlocksPulled():
            return PullAnswered(message.incarnation, message)
        case Heartbeat():
            return ReplicaHeard(message.incarnation, message.draining, message.disk)
        case WorkerGoodbye():
            return ReplicaLeft(message.incarnation, LossCause.GOODBYE, "said goodbye")
