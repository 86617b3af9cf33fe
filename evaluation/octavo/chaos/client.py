"""Plays a client of the real frontend: it asks, and reports all that comes to a judge."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final

import grpc

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
from octavo.v1 import generation_pb2 as pb

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
