"""Writes the events of a generation as octavo.v1 messages."""

from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Final

from google.protobuf.duration_pb2 import Duration

from octavo.frontend.grpc.requests import default_true
from octavo.frontend.request import events
from octavo.frontend.stream.pacing import apart
from octavo.v1 import generation_pb2 as pb
from octavo.wire.requests import FinishReason, NoticeKind
from octavo.wire.sampling import Logprobs

_REASONS: Final = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}
_MATCH_FIELDS: Final = {
    events.MatchKind.STOP_STRING: "stop_string",
    events.MatchKind.STOP_TOKEN: "stop_token_id",
    events.MatchKind.EOS_TOKEN: "eos_token_id",
}
_NOTICES: Final = {
    NoticeKind.QUEUED: pb.Notice.KIND_QUEUED,
    NoticeKind.PREEMPTED: pb.Notice.KIND_PREEMPTED,
    NoticeKind.RESUMED: pb.Notice.KIND_RESUMED,
    NoticeKind.WORKER_LOST: pb.Notice.KIND_WORKER_LOST,
}

# Returns the bytes that a token stands for.
Pieces = Callable[[int], bytes]


def shown_fields(options: pb.ResponseOptions) -> frozenset[str]:
    """Returns the fields of a `TokenDelta` that `options` ask for, of text, token_ids and logprobs."""
    # Events may have logprobs for the server's own use.
    logprobs = {"logprobs"} if options.HasField("top_logprobs") else set()
    return frozenset(logprobs | {name for name in ("text", "token_ids") if default_true(options, name)})


async def written(emitted: events.Emitted, shown: Set[str], piece: Pieces) -> pb.GenerateResponse:
    """Does the same as `write`, but in a thread where the event is long, so that other calls go on."""
    if events.is_long(emitted.event):
        return await apart(partial(write, emitted, shown, piece))
    return write(emitted, shown, piece)


def write(emitted: events.Emitted, shown: Set[str], piece: Pieces) -> pb.GenerateResponse:
    """Returns the event as a message; deltas have the fields in `shown`."""
    offset, event = emitted
    if not isinstance(event, events.TextDelta):
        assert not isinstance(event, events.OutputReady), "what has a stream generates tokens"
        return _rare(offset, event, piece)
    # Filled in place: a delta that is made by itself is copied into the response, at twice the cost of all of this.
    response = pb.GenerateResponse()
    response.event_offset, delta = offset, response.delta
    delta.index = event.index
    if "text" in shown:
        delta.text = event.text
        if event.reasoning:
            delta.reasoning = event.reasoning
    if "token_ids" in shown:
        delta.token_ids.extend(event.token_ids)
    if "logprobs" in shown:
        delta.logprobs.extend(_logprobs(event.token_ids, event.logprobs, piece))
    return response


def _rare(
    offset: int,
    event: events.RequestStarted | events.SequenceFinished | events.RequestUsage | events.RequestNotice,
    piece: Pieces,
) -> pb.GenerateResponse:
    match event:
        case events.RequestStarted():
            return pb.GenerateResponse(event_offset=offset, started=_started(event, piece))
        case events.SequenceFinished():
            return pb.GenerateResponse(event_offset=offset, finished=_finished(event))
        case events.RequestUsage():
            return pb.GenerateResponse(event_offset=offset, usage=_usage(event))
        case events.RequestNotice():
            return pb.GenerateResponse(event_offset=offset, notice=_notice(event))


def _started(event: events.RequestStarted, piece: Pieces) -> pb.Started:
    return pb.Started(
        request_id=event.request_id,
        model=event.model,
        prompt_tokens=len(event.prompt_token_ids),
        prompt_logprobs=_logprobs(event.prompt_token_ids[1:], event.prompt_logprobs, piece)
        if event.prompt_logprobs
        else (),
        seed=event.seed,
    )


def _logprobs(token_ids: Sequence[int], logprobs: Sequence[Logprobs], piece: Pieces) -> list[pb.TokenLogprobs]:
    return [
        pb.TokenLogprobs(
            id=token_id,
            logprob=token.logprob,
            rank=token.rank,
            top=[
                pb.Candidate(id=other_id, logprob=logprob, piece=piece(other_id))
                for other_id, logprob in zip(token.top_token_ids, token.top_logprobs, strict=True)
            ],
            piece=piece(token_id),
        )
        for token_id, token in zip(token_ids, logprobs, strict=True)
    ]


def _notice(event: events.RequestNotice) -> pb.Notice:
    return pb.Notice(kind=_NOTICES[event.kind], queue_position=event.queue_position or None)


def _finished(event: events.SequenceFinished) -> pb.Finished:
    finished = pb.Finished(
        index=event.index, reason=_REASONS[event.reason], cumulative_logprob=event.cumulative_logprob
    )
    if event.match is not None:
        setattr(finished, _MATCH_FIELDS[event.match.kind], event.match.value)
    return finished


def _usage(event: events.RequestUsage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=event.prompt_tokens,
        completion_tokens=event.completion_tokens,
        preemptions=event.preemptions,
        swaps=event.swaps,
        cached_prompt_tokens=event.cached_prompt_tokens,
        time_to_first_token=_duration(event.time_to_first_token_s),
        decode_time=_duration(event.decode_time_s),
        drafted_tokens=event.drafted_tokens,
        accepted_tokens=event.accepted_tokens,
        accepted_prediction_tokens=event.accepted_predictions,
        rejected_prediction_tokens=event.rejected_predictions,
        reasoning_tokens=event.reasoning_tokens,
    )


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration
