"""Writes the events of a generation as octavo.v1 messages."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from google.protobuf.duration_pb2 import Duration

from octavo.frontend.grpc.requests import default_true
from octavo.frontend.request import events
from octavo.frontend.stream.pacing import apart
from octavo.v1 import generation_pb2 as pb
from octavo.wire.requests import NoticeKind
from octavo.wire.sampling import Logprobs

_REASONS: Final = {
    events.FinishReason.STOP: pb.FINISH_REASON_STOP,
    events.FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
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


class EventWriter:
    """Writes the messages of one stream. Deltas carry the fields that `options` ask for."""

    def __init__(self, options: pb.ResponseOptions, piece: Pieces) -> None:
        self._shows_text = default_true(options, "text")
        self._shows_ids = default_true(options, "token_ids")
        # Events may have logprobs for the server's own use.
        self._shows_logprobs = options.HasField("top_logprobs")
        self._piece = piece

    async def written(self, emitted: events.Emitted) -> pb.GenerateResponse:
        """Does the same as `write`, but in a thread where the event is long, so that other calls go on."""
        return await apart(partial(self.write, emitted)) if events.is_long(emitted.event) else self.write(emitted)

    def write(self, emitted: events.Emitted) -> pb.GenerateResponse:
        """Returns the event as a message."""
        offset, event = emitted
        if isinstance(event, events.TextDelta):
            return pb.GenerateResponse(event_offset=offset, delta=self._delta(event))
        return _rare(offset, event, self._piece)

    def _delta(self, event: events.TextDelta) -> pb.TokenDelta:
        return pb.TokenDelta(
            index=event.index,
            text=event.text if self._shows_text else "",
            token_ids=event.token_ids if self._shows_ids else (),
            logprobs=_logprobs(event.token_ids, event.logprobs, self._piece) if self._shows_logprobs else (),
        )


def _rare(
    offset: int, event: events.Started | events.Finished | events.Usage | events.Notice, piece: Pieces
) -> pb.GenerateResponse:
    match event:
        case events.Started():
            return pb.GenerateResponse(event_offset=offset, started=_started(event, piece))
        case events.Finished():
            return pb.GenerateResponse(event_offset=offset, finished=_finished(event))
        case events.Usage():
            return pb.GenerateResponse(event_offset=offset, usage=_usage(event))
        case events.Notice():
            return pb.GenerateResponse(event_offset=offset, notice=_notice(event))


def _started(event: events.Started, piece: Pieces) -> pb.Started:
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


def _notice(event: events.Notice) -> pb.Notice:
    return pb.Notice(kind=_NOTICES[event.kind], queue_position=event.queue_position or None)


def _finished(event: events.Finished) -> pb.Finished:
    finished = pb.Finished(
        index=event.index, reason=_REASONS[event.reason], cumulative_logprob=event.cumulative_logprob
    )
    if event.match is not None:
        setattr(finished, _MATCH_FIELDS[event.match.kind], event.match.value)
    return finished


def _usage(event: events.Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=event.prompt_tokens,
        completion_tokens=event.completion_tokens,
        preemptions=event.preemptions,
        swaps=event.swaps,
        cached_prompt_tokens=event.cached_prompt_tokens,
        time_to_first_token=_duration(event.time_to_first_token_s),
        decode_time=_duration(event.decode_time_s),
    )


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration
