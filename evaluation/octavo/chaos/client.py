"""Plays a client of the real frontend: draws what to ask, asks, and reports all that comes to a judge."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from math import inf
from random import Random
from typing import Any, Final

import grpc

from octavo.frontend.request.request import bounds_of
from octavo.testbed.grpc_calls import reason_of
from octavo.testbed.history import (
    WORKER_LOST,
    Answer,
    Came,
    ChoiceEnded,
    Closed,
    Event,
    Left,
    Notified,
    SequenceAnswer,
    Tokens,
)
from octavo.testbed.stack import token_request
from octavo.v1 import generation_pb2 as pb
from octavo.wire.sampling import NEUTRAL, PENALTIES

PREFIX_NAME: Final = "chaos"
PREFIX: Final = [(5 * i) % 250 for i in range(37)]
_SCHEMA: Final = {
    # Whatever a version's own is, so that answers are the same across an upgrade.
    "x-guidance": {"whitespace_pattern": "[ ]?"},
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 24}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Question:
    """Holds a request without an id, and what is special about it."""

    kind: str
    request: pb.GenerateRequest


def questions(random: Random, num_tokens: int, *, pinned: bool = True) -> Iterator[Question]:
    """Yields questions without end, all kinds in turn, of about `num_tokens` tokens; `pinned` if `PREFIX` is pinned."""
    beginning = random.choices(range(250), k=40)
    makers = dict(_MAKERS) if pinned else {kind: make for kind, make in _MAKERS.items() if kind != "pinned prefix"}
    for kind, make in cycle(makers.items()):
        own = random.choices(range(250), k=random.randint(3, 30))
        shared = beginning[: random.choice((0, 0, 17, 40))]
        request = token_request([*shared, *own], random.randint(num_tokens // 2, num_tokens))
        request.sampling.seed = random.getrandbits(32)
        make(random, request)
        yield Question(kind, request)


def _greedy(random: Random, request: pb.GenerateRequest) -> None:
    pass


def _sampled(random: Random, request: pb.GenerateRequest) -> None:
    request.sampling.temperature = random.choice((0.5, 1.0))


def _penalised(random: Random, request: pb.GenerateRequest) -> None:
    request.sampling.temperature = 1.0
    for name in PENALTIES:
        # As far as half-way from none to the most.
        most = bounds_of(name).high
        setattr(request.sampling, name, random.uniform(NEUTRAL[name], (NEUTRAL[name] + most) / 2))


def _with_logprobs(random: Random, request: pb.GenerateRequest) -> None:
    request.response.top_logprobs = 2
    request.response.prompt_logprobs = 1


def _parallel(random: Random, request: pb.GenerateRequest) -> None:
    request.sampling.temperature = 1.0
    request.sampling.num_sequences = random.randint(2, 3)


def _best(random: Random, request: pb.GenerateRequest) -> None:
    request.sampling.temperature = 1.0
    request.sampling.num_sequences, request.sampling.best_of = 1, 3


def _beams(random: Random, request: pb.GenerateRequest) -> None:
    request.sampling.beam_search.beam_width = 3
    request.sampling.num_sequences = 2
    request.stopping.max_new_tokens = min(12, request.stopping.max_new_tokens)


def _at_least(random: Random, request: pb.GenerateRequest) -> None:
    """Half of the vocabulary would end it, and may not at first."""
    request.stopping.stop_token_ids.extend(range(0, 250, 2))
    request.stopping.min_new_tokens = request.stopping.max_new_tokens // 2


def _constrained(random: Random, request: pb.GenerateRequest) -> None:
    request.sampling.temperature = 1.0
    request.stopping.ignore_eos = False
    if random.random() < 0.5:
        request.constraint.json_schema = json.dumps(_SCHEMA)
    else:
        request.constraint.regex = "([a-f]{3} ){5,12}"


def _pinned(random: Random, request: pb.GenerateRequest) -> None:
    request.cache.pinned_prefix = PREFIX_NAME


_MAKERS: Final[dict[str, Callable[[Random, pb.GenerateRequest], None]]] = {
    "greedy": _greedy,
    "sampled": _sampled,
    "penalties": _penalised,
    "logprobs": _with_logprobs,
    "parallel": _parallel,
    "best of": _best,
    "beam search": _beams,
    "min tokens": _at_least,
    "structured output": _constrained,
    "pinned prefix": _pinned,
}
KINDS: Final = tuple(_MAKERS)


Witness = Callable[[Event], None]
# Instead of a reason: the frontend took nothing, and another may.
TURNED_AWAY: Final = "turned away"
# The second is what gRPC itself makes of a call that comes in the moment in which a server ends, and that nobody took.
_TURNING_AWAY: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
# No stream of these campaigns takes so long.
TIMEOUT_S: Final = 120.0


@dataclass
class JudgedClient:
    """Sends one request through `stub`. `leaves` says of each event whether the client has had enough by then. A client
    that `is_patient` counts as turned away, not as failed, if UNAVAILABLE is its first answer: the caller may ask
    another frontend."""

    stub: Any
    witness: Witness
    request: pb.GenerateRequest
    leaves: Callable[[pb.GenerateResponse], bool] = lambda response: False
    timeout_s: float = TIMEOUT_S
    is_patient: bool = False
    num_events: int = 0
    error: grpc.aio.AioRpcError | None = None
    came_at: float = 0.0
    token_at: list[float] = field(default_factory=list)

    async def ask(
        self, answer: Answer | None, allowed: frozenset[str] = frozenset(), start_within_s: float = inf
    ) -> str:
        """Asks, and reads to the end. Returns the reason of the error, if the answer ended with one."""
        name, self.came_at = self.request.request_id, time.monotonic()
        self.witness(Came(self.came_at, name, answer, allowed, self.came_at + start_within_s))
        call = self.stub.Generate(self.request, timeout=self.timeout_s)
        try:
            async for response in call:
                self._take(response)
                if self.leaves(response):
                    call.cancel()
                    self.witness(Left(time.monotonic(), name))
                    return ""
        except grpc.aio.AioRpcError as error:
            return self._failed(error)
        except asyncio.CancelledError:
            call.cancel()
            self.witness(Left(time.monotonic(), name))
            raise
        self.witness(Closed(time.monotonic(), name))
        return ""

    def _failed(self, error: grpc.aio.AioRpcError) -> str:
        self.error, now, name = error, time.monotonic(), self.request.request_id
        if self.is_patient and not self.num_events and error.code() in _TURNING_AWAY:
            self.witness(Left(now, name))
            return TURNED_AWAY
        reason = reason_or_code(error)
        self.witness(Closed(now, name, reason, error.details() or ""))
        return reason

    def _take(self, response: pb.GenerateResponse) -> None:
        now = time.monotonic()
        self.num_events += 1
        if response.HasField("delta"):
            self.token_at.append(now)
        self.witness(_event(now, self.request.request_id, response))


async def record(stub: Any, request: pb.GenerateRequest) -> Answer:
    """Returns what a request gets when nothing goes wrong."""
    choices: dict[int, list[pb.TokenDelta]] = {}
    ends: dict[int, pb.Finished] = {}
    stream: AsyncIterator[pb.GenerateResponse] = stub.Generate(request, timeout=TIMEOUT_S)
    async for response in stream:
        if response.HasField("delta"):
            choices.setdefault(response.delta.index, []).append(response.delta)
        elif response.HasField("finished"):
            ends[response.finished.index] = response.finished
    return [_choice(choices.get(index, []), ends[index]) for index in range(len(ends))]


def reason_or_code(error: grpc.aio.AioRpcError) -> str:
    """Ours if the error has one, else that of gRPC."""
    try:
        return reason_of(error)
    except (AttributeError, AssertionError, ValueError):
        return str(error.code().name)


def _event(now: float, name: str, response: pb.GenerateResponse) -> Event:
    offset = response.event_offset
    match response.WhichOneof("event"):
        case "delta":
            delta = response.delta
            return Tokens(now, name, offset, delta.index, list(delta.token_ids), delta.text, _logprobs([delta]))
        case "finished":
            return ChoiceEnded(now, name, offset, response.finished.index, _end(response.finished))
        case "notice" if response.notice.kind == pb.Notice.KIND_WORKER_LOST:
            return Notified(now, name, offset, WORKER_LOST)
    return Notified(now, name, offset)


def _choice(deltas: list[pb.TokenDelta], finished: pb.Finished) -> SequenceAnswer:
    token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
    return SequenceAnswer(token_ids, "".join(delta.text for delta in deltas), _logprobs(deltas), _end(finished))


def _logprobs(deltas: list[pb.TokenDelta]) -> list[object]:
    return [entry.SerializeToString(deterministic=True) for delta in deltas for entry in delta.logprobs]


def _end(finished: pb.Finished) -> object:
    return finished.SerializeToString(deterministic=True)
