"""Declares the events of a stream, and reads them from octavo.v1 messages.

The order is: one `Started`; `Delta`s, with one `Finished` after the last of each sequence; one `Usage`, the last.
`Notice`s may come anywhere, before `Started` too.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from octavo.v1 import generation_pb2 as pb

# "other" is a reason that this client is too old to know.
FinishReason = Literal["stop", "length", "other"]
NoticeKind = Literal["queued", "preempted", "resumed", "worker_lost"]


@dataclass(frozen=True)
class Candidate:
    """Holds one of the tokens with the highest logprobs at one position.

    `piece` is the bytes that the token stands for, which may be part of a character.
    """

    token_id: int
    logprob: float
    piece: bytes = b""


@dataclass(frozen=True)
class TokenLogprobs:
    """Holds a token's natural logprob and its rank, 1 being the highest. `top` is in falling order."""

    token_id: int
    logprob: float
    rank: int
    top: Sequence[Candidate] = ()
    piece: bytes = b""


@dataclass(frozen=True)
class Started:
    """The first token was computed. `seed` is the seed in force, given or drawn.

    `prompt_logprobs`, where asked for, has one entry for every prompt token but the first.
    """

    offset: int
    request_id: str
    model: str
    prompt_tokens: int
    seed: int
    prompt_logprobs: Sequence[TokenLogprobs] = ()


@dataclass(frozen=True)
class Delta:
    """Brings new tokens of the sequence `index`, and the text that is certain: whole characters only.

    Either may be empty. `reasoning` is what the model has thought; it comes before `text`.
    """

    offset: int
    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] = ()
    reasoning: str = ""


@dataclass(frozen=True)
class Finished:
    """The sequence `index` has ended.

    `stop_reason` is the stop string or the stop token that ended the sequence; None at EOS and at the limit.
    """

    offset: int
    index: int
    reason: FinishReason
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True)
class Usage:
    """Tells what the request has taken: counts in tokens, of all sequences together, and times in seconds.

    `drafted_tokens` are guesses that were checked along with the tokens before them, `accepted_tokens` the right ones;
    `accepted_prediction_tokens` and `rejected_prediction_tokens` are those that the request's prediction gave.
    `reasoning_tokens` are those of the completion that the model has thought with.
    """

    offset: int
    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int
    preemptions: int
    swaps: int
    time_to_first_token_s: float
    decode_time_s: float
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True)
class Notice:
    """Reports progress that is no output. `queue_position` counts from 1 on while the request is queued."""

    offset: int
    kind: NoticeKind
    queue_position: int | None = None


Event = Started | Delta | Finished | Usage | Notice


_REASONS: Final[dict[int, FinishReason]] = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}
_NOTICES: Final[dict[int, NoticeKind]] = {
    pb.Notice.KIND_QUEUED: "queued",
    pb.Notice.KIND_PREEMPTED: "preempted",
    pb.Notice.KIND_RESUMED: "resumed",
    pb.Notice.KIND_WORKER_LOST: "worker_lost",
}


def read_event(message: pb.GenerateResponse) -> Event | None:
    """Reads the event of a message; returns None for an event that this client is too old to know."""
    kind = message.WhichOneof("event")
    return _READERS[kind](message.event_offset, getattr(message, kind)) if kind in _READERS else None


def _started(offset: int, message: pb.Started) -> Started:
    return Started(
        offset,
        message.request_id,
        message.model,
        message.prompt_tokens,
        message.seed,
        _logprobs(message.prompt_logprobs),
    )


def _delta(offset: int, message: pb.TokenDelta) -> Delta:
    token_ids, logprobs = tuple(message.token_ids), _logprobs(message.logprobs)
    return Delta(offset, message.index, message.text, token_ids, logprobs, message.reasoning)


def _finished(offset: int, message: pb.Finished) -> Finished:
    matched = message.WhichOneof("matched")
    return Finished(
        offset,
        message.index,
        _REASONS.get(message.reason, "other"),
        getattr(message, matched) if matched in ("stop_string", "stop_token_id") else None,
        message.cumulative_logprob if message.HasField("cumulative_logprob") else None,
    )


def _usage(offset: int, message: pb.Usage) -> Usage:
    return Usage(
        offset,
        message.prompt_tokens,
        message.completion_tokens,
        message.cached_prompt_tokens,
        message.preemptions,
        message.swaps,
        message.time_to_first_token.ToNanoseconds() / 1e9,
        message.decode_time.ToNanoseconds() / 1e9,
        message.drafted_tokens,
        message.accepted_tokens,
        message.accepted_prediction_tokens,
        message.rejected_prediction_tokens,
        message.reasoning_tokens,
    )


def _notice(offset: int, message: pb.Notice) -> Notice | None:
    if message.kind not in _NOTICES:
        return None
    position = message.queue_position if message.HasField("queue_position") else None
    return Notice(offset, _NOTICES[message.kind], position)


def _logprobs(messages: Iterable[pb.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(m.id, m.logprob, m.rank, tuple(Candidate(c.id, c.logprob, c.piece) for c in m.top), m.piece)
        for m in messages
    )


_READERS: Final[dict[str | None, Callable[[int, Any], Event | None]]] = {
    "started": _started,
    "delta": _delta,
    "finished": _finished,
    "usage": _usage,
    "notice": _notice,
}
