"""Events out of octavo.v1 messages."""

from collections.abc import Callable, Iterable
from typing import Any, Final

from octavo.client.events import (
    Candidate,
    Delta,
    Event,
    Finished,
    FinishReason,
    Notice,
    NoticeKind,
    Started,
    TokenLogprobs,
    Usage,
)
from octavo.v1 import generation_pb2 as pb

_REASONS: Final[dict[int, FinishReason]] = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}
_NOTICES: Final[dict[int, NoticeKind]] = {
    pb.Notice.KIND_QUEUED: "queued",
    pb.Notice.KIND_PREEMPTED: "preempted",
    pb.Notice.KIND_RESUMED: "resumed",
    pb.Notice.KIND_WORKER_LOST: "worker_lost",
}


def read_event(message: pb.GenerateResponse) -> Event | None:
    """The event of a message; None where it is one that this client is too old to know."""
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
    return Delta(offset, message.index, message.text, tuple(message.token_ids), _logprobs(message.logprobs))


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
