"""Plays all replicas and frontends of a cell towards a real scheduler, without computing anything, in one loop of one
thread, which costs little beside the scheduler.

A replica's socket is read when its step has ended, not before, and frontends' a few hundred times a second: so there is
one send, one receive and one wait per step and no more.
"""

import contextlib
import heapq
import select
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from random import Random
from typing import Final

import msgspec
import zmq

from octavo.bench.parts.scheduler_alone import VOCAB_SIZE, hello, make_request
from octavo.runtime.transport.sockets import connect_dealer
from octavo.wire.base import SCHEMA_VERSION, Message
from octavo.wire.codec import decode_to_frontend, decode_to_worker, encode
from octavo.wire.requests import (
    RENEW_INTERVAL_S,
    Deltas,
    FrontendHello,
    FrontendWelcome,
    Lease,
    Refused,
    Rejected,
    Renew,
    Submit,
    Unregistered,
)
from octavo.wire.sampling import SamplingParams
from octavo.wire.steps import (
    HEARTBEAT_INTERVAL_S,
    Heartbeat,
    SampledToken,
    StepOutcome,
    StepPlan,
    StepResult,
    StepTimes,
    WorkerHello,
    WorkerWelcome,
)


class Peer:
    """Talks to the scheduler over a DEALER socket. A peer is welcome once it knows the scheduler's `epoch`."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str) -> None:
        self.socket = connect_dealer(context, endpoint)
        self.epoch: int | None = None

    def receive(self) -> bytes | None:
        """Returns the next frame, or None if none is there."""
        try:
            return self.socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def send(self, message: Message) -> int:
        """Sends `message` and returns its size in bytes. Raises `zmq.Again` if the scheduler is away."""
        frame = encode(message)
        self.socket.send(frame, zmq.NOBLOCK)
        return len(frame)

    def call(self, hello: Message) -> None:
        """Sends what is sent again and again until there is a scheduler."""
        with contextlib.suppress(zmq.Again):
            self.send(hello)


# How a message of deltas begins, and what is in it where a sequence ends: all others need not be decoded.
_DELTAS: Final = b"\x93\xa6Deltas"
_ENDS: Final = b"\xa6length"


@dataclass(frozen=True)
class RequestLengths:
    """Holds the tokens of a prompt, and the fewest and the most tokens of an answer."""

    prompt: int = 256
    shortest: int = 128
    longest: int = 384


class FakeFrontend(Peer):
    """Keeps `live` requests under way once it is welcome: for each that ends it submits another."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, number: int, live: int, lengths: RequestLengths
    ) -> None:
        super().__init__(context, endpoint)
        self.messages = self.message_bytes = self.ended = 0
        self._id, self._random = number + 1, Random(-1 - number)
        self._num_live, self._lengths = live, lengths
        self._live: set[str] = set()
        self._submitted = 0

    def beat(self) -> None:
        """Says hello, or renews its lease."""
        if self.epoch is None:
            self.call(FrontendHello(SCHEMA_VERSION, self._id))
        else:
            self.send(Renew(self.epoch, [Lease(request_id, 1) for request_id in self._live]))

    def fill(self) -> None:
        """Submits what is missing."""
        while len(self._live) < self._num_live:
            self._submit()

    def drain(self) -> None:
        """Takes in all that has come. Raises `RuntimeError` if the scheduler will not do as it is asked."""
        while frame := self.receive():
            if frame.startswith(_DELTAS):
                self.messages += 1
                self.message_bytes += len(frame)
                if _ENDS not in frame:
                    continue
            self._take(decode_to_frontend(frame))

    def new_tally(self) -> None:
        self.messages = self.message_bytes = self.ended = 0

    def _take(self, message: Message) -> None:
        match message:
            case Deltas(_, deltas):
                for request_id in (delta.request_id for delta in deltas if delta.finish_reason):
                    self._live.remove(request_id)
                    self.ended += 1
                    self._submit()
            case FrontendWelcome(epoch):
                self.epoch = epoch
            case Rejected() | Refused() | Unregistered():
                raise RuntimeError(f"frontend {self._id} is not served: {message}")

    def _submit(self) -> None:
        assert self.epoch is not None
        self._submitted += 1
        request_id = f"chatcmpl-{self._id:08x}{self._submitted:024x}"
        prompt = self._random.choices(range(VOCAB_SIZE), k=self._lengths.prompt)
        max_tokens = self._random.randint(self._lengths.shortest, self._lengths.longest)
        self.send(Submit(self.epoch, make_request(request_id, prompt, SamplingParams(max_tokens=max_tokens))))
        self._live.add(request_id)


# A step takes up to so much more or less than its `step_s`, so that replicas keep no time together.
_SPREAD: Final = 0.05
_TOKEN: Final = 7


class Answers:
    """Makes a worker's results of plans without beams, one after the other: every sequence that reaches its last known
    token samples the same next token."""

    def __init__(self) -> None:
        # Tokens still to be computed of those sequences that have not sampled yet.
        self._uncomputed: dict[int, int] = {}
        self._decoding: list[int] = []
        self._sampled: list[SampledToken] = []

    def to(self, plan: StepPlan, model_us: int) -> StepResult:
        sampling = self._sampling(plan)
        # Nearly always it is those of the last step again.
        if sampling != self._decoding:
            self._decoding, self._sampled = sampling, [SampledToken(each, _TOKEN) for each in sampling]
        return StepResult(
            plan.epoch,
            plan.incarnation,
            plan.step_id,
            StepOutcome.DONE,
            self._sampled,
            [],
            [],
            [],
            StepTimes(0, model_us, 0),
            "",
        )

    def _sampling(self, plan: StepPlan) -> list[int]:
        for start in plan.starts:
            known = len(start.prompt_token_ids) + len(start.generated_token_ids)
            self._uncomputed[start.sequence_id] = known - start.num_computed
        if not self._uncomputed:
            return [work.sequence_id for work in plan.work]
        return [work.sequence_id for work in plan.work if self._computes_all(work.sequence_id, work.num_tokens)]

    def _computes_all(self, sequence_id: int, num_tokens: int) -> bool:
        if (left := self._uncomputed.pop(sequence_id, num_tokens) - num_tokens) > 0:
            self._uncomputed[sequence_id] = left
        return left <= 0


@dataclass
class ReplicaTally:
    """Counts the work of a replica since the tally was made, and seconds: `idle_s` without a plan, and `late_s`, at
    most `latest_s` at a time, between the end of a step and the moment when this process noticed the end."""

    steps: int = 0
    tokens: int = 0
    idle_s: float = 0.0
    late_s: float = 0.0
    latest_s: float = 0.0
    plan_bytes: int = 0
    result_bytes: int = 0


class FakeReplica(Peer):
    """Plays one worker, which says hello with its first beat."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, number: int, step_s: float) -> None:
        super().__init__(context, endpoint)
        self.ends_at: float | None = None
        self.tally = ReplicaTally()
        self._worker_id, self._incarnation = f"fake-{number}", number + 1
        self._step_s, self._random = step_s, Random(number)
        self._answers = Answers()
        self._plan: StepPlan | None = None
        self._idle_since = 0.0

    def _hello(self, num_blocks: int) -> WorkerHello:
        return msgspec.structs.replace(
            hello(num_blocks, 16), worker_id=self._worker_id, incarnation=self._incarnation, device="cuda"
        )

    def beat(self, num_blocks: int) -> None:
        """Says hello, or that it lives."""
        if self.epoch is None:
            self.call(self._hello(num_blocks))
        else:
            self.send(Heartbeat(self.epoch, self._incarnation, self._plan.step_id if self._plan else 0))

    def new_tally(self, now: float) -> None:
        self.tally, self._idle_since = ReplicaTally(), now

    def end_tally(self, now: float) -> ReplicaTally:
        """Returns the tally so far, with the idle time under way."""
        if self.ends_at is None:
            self.tally.idle_s += now - self._idle_since
        return self.tally

    def finish(self, now: float) -> None:
        """Answers the step that has ended, and begins the next if its plan is there."""
        assert self._plan is not None
        assert self.ends_at is not None
        tally, late_s = self.tally, now - self.ends_at
        result = self._answers.to(self._plan, int(self._step_s * 1e6))
        tally.result_bytes += self.send(result)
        tally.steps += 1
        tally.tokens += len(result.sampled)
        tally.late_s += late_s
        tally.latest_s = max(tally.latest_s, late_s)
        self.ends_at = None
        if not self.begin(now):
            self._idle_since = now

    def begin(self, at: float) -> bool:
        """Begins the next step at this time, if its plan is there. Raises `RuntimeError` if the scheduler has lost this
        worker."""
        while frame := self.receive():
            match decode_to_worker(frame):
                case StepPlan() as plan:
                    self._plan = plan
                    self.tally.plan_bytes += len(frame)
                    self.ends_at = at + self._step_s * self._random.uniform(1 - _SPREAD, 1 + _SPREAD)
                    return True
                case WorkerWelcome(epoch):
                    self.epoch = epoch
                case message:
                    raise RuntimeError(f"{self._worker_id} was not kept: {message}")
        return False

    def resume(self, now: float) -> bool:
        """Begins a step like `begin`, and counts the idle time before the step."""
        if not self.begin(now):
            return False
        self.tally.idle_s += now - self._idle_since
        return True


def busy_shares(tallies: Sequence[ReplicaTally], wall_s: float) -> list[float]:
    """Returns for each replica the share of `wall_s` with a plan under way. Late time does not count, as nobody knows
    whether a plan was there."""
    return [1 - (tally.idle_s + tally.late_s) / wall_s for tally in tallies]


_DRAIN_S: Final = 0.005
_WELCOME_S: Final = 20.0
_BLOCK_SIZE: Final = 16


@dataclass(frozen=True)
class Size:
    """Describes a cell. Each frontend has its share of the requests, which are as many as can run at once; replicas
    have blocks enough for all of them."""

    replicas: int
    sequences: int
    frontends: int
    step_s: float
    lengths: RequestLengths = field(default_factory=RequestLengths)

    @property
    def num_blocks(self) -> int:
        longest = self.lengths.prompt + self.lengths.longest
        return (self.sequences + 8) * (longest // _BLOCK_SIZE + 2)


@dataclass(frozen=True)
class Played:
    """Holds what the replicas and frontends of a cell counted in `wall_s` seconds."""

    wall_s: float
    tallies: list[ReplicaTally]
    messages: int
    message_bytes: int
    ended: int


class PlayedCell(ExitStack):
    """Plays all replicas and frontends of a cell. They are connected to the scheduler within the `with` block."""

    def __init__(self, size: Size, frontend_endpoint: str, worker_endpoint: str) -> None:
        super().__init__()
        context: zmq.Context[zmq.Socket[bytes]] = self.enter_context(zmq.Context())
        self._num_blocks = size.num_blocks
        self._replicas = [FakeReplica(context, worker_endpoint, i, size.step_s) for i in range(size.replicas)]
        shares = _shares(size.replicas * size.sequences, size.frontends)
        self._frontends = [
            FakeFrontend(context, frontend_endpoint, number, live, size.lengths) for number, live in enumerate(shares)
        ]
        for peer in (*self._replicas, *self._frontends):
            self.enter_context(peer.socket)
        self._chores = [
            _Chore(_DRAIN_S, self._drain),
            _Chore(HEARTBEAT_INTERVAL_S, self._beat),
            _Chore(RENEW_INTERVAL_S, self._renew),
        ]
        # Replicas at work, by the end of their step, and the others.
        self._busy: list[tuple[float, int]] = []
        self._idle = set(range(size.replicas))

    def begin(self) -> None:
        """Registers all, and submits all. Raises `RuntimeError` if the scheduler does not answer."""
        peers = (*self._replicas, *self._frontends)
        until = time.monotonic() + _WELCOME_S
        while any(peer.epoch is None for peer in peers):
            if time.monotonic() > until:
                raise RuntimeError("the scheduler welcomes nobody")
            self._turn()
        for frontend in self._frontends:
            frontend.fill()

    def play(self, seconds: float) -> Played:
        """Goes on for so long, and tells what happened meanwhile."""
        began = time.monotonic()
        for replica in self._replicas:
            replica.new_tally(began)
        for frontend in self._frontends:
            frontend.new_tally()
        while (now := time.monotonic()) < began + seconds:
            self._turn()
        tallies = [replica.end_tally(now) for replica in self._replicas]
        counts = zip(*((f.messages, f.message_bytes, f.ended) for f in self._frontends), strict=True)
        return Played(now - began, tallies, *map(sum, counts))

    def _turn(self) -> None:
        self._end_steps()
        self._begin_steps()
        now = time.monotonic()
        for chore in self._chores:
            chore.do_if_due(now)
        due_at = min(chore.due_at for chore in self._chores)
        if self._busy:
            due_at = min(due_at, self._busy[0][0])
        if (wait_s := due_at - time.monotonic()) > 0:
            select.select([self._replicas[number].socket for number in self._idle], [], [], wait_s)

    def _end_steps(self) -> None:
        while self._busy and self._busy[0][0] <= (now := time.monotonic()):
            _, number = heapq.heappop(self._busy)
            self._replicas[number].finish(now)
            self._place(number)

    def _begin_steps(self) -> None:
        for number in [n for n in self._idle if self._replicas[n].resume(time.monotonic())]:
            self._idle.discard(number)
            self._place(number)

    def _place(self, number: int) -> None:
        if (ends_at := self._replicas[number].ends_at) is None:
            self._idle.add(number)
        else:
            heapq.heappush(self._busy, (ends_at, number))

    def _drain(self) -> None:
        for frontend in self._frontends:
            frontend.drain()

    def _beat(self) -> None:
        for replica in self._replicas:
            replica.beat(self._num_blocks)

    def _renew(self) -> None:
        for frontend in self._frontends:
            frontend.beat()


class _Chore:
    """Repeats a call every `interval_s` seconds."""

    def __init__(self, interval_s: float, do: Callable[[], None]) -> None:
        self.due_at = time.monotonic()
        self._interval_s, self._do = interval_s, do

    def do_if_due(self, now: float) -> None:
        if now >= self.due_at:
            self.due_at = now + self._interval_s
            self._do()


def _shares(whole: int, parts: int) -> list[int]:
    return [whole // parts + (number < whole % parts) for number in range(parts)]
