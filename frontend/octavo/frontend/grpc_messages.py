"""octavo.v1 messages to and from the types behind every door."""

from collections.abc import Sequence
from typing import Any, Final

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from octavo.frontend import events
from octavo.frontend.chat import Chat, ChatMessage
from octavo.frontend.errors import bad_parameter
from octavo.frontend.request import GenerationRequest, Prompt
from octavo.v1 import generation_pb2 as pb
from octavo.wire.requests import NoticeKind
from octavo.wire.sampling import BeamSearch, EarlyStopping, Logprobs

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
_EARLY_STOPPING: Final[dict[int, EarlyStopping]] = {
    pb.EARLY_STOPPING_UNSPECIFIED: EarlyStopping.OFF,
    pb.EARLY_STOPPING_ON: EarlyStopping.ON,
    pb.EARLY_STOPPING_OFF: EarlyStopping.OFF,
    pb.EARLY_STOPPING_NEVER: EarlyStopping.NEVER,
}
_SAMPLING: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "best_of",
)


def read_request(message: pb.GenerateRequest) -> GenerationRequest:
    """Raises `InvalidRequest` where the message has no prompt or an unknown value of an enum."""
    sampling, stopping, response = message.sampling, message.stopping, message.response
    return GenerationRequest(
        prompt=_prompt(message),
        request_id=message.request_id,
        model=message.model,
        **{field: _optional(sampling, field) for field in _SAMPLING},
        num_sequences=sampling.num_sequences if sampling.HasField("num_sequences") else 1,
        beam=_beam(sampling.beam_search) if sampling.HasField("beam_search") else None,
        logit_bias=dict(sampling.logit_bias),
        allowed_token_ids=tuple(sampling.allowed_token_ids),
        banned_token_ids=tuple(sampling.banned_token_ids),
        max_new_tokens=_optional(stopping, "max_new_tokens"),
        min_new_tokens=stopping.min_new_tokens,
        stop_strings=tuple(stopping.stop_strings),
        stop_token_ids=tuple(stopping.stop_token_ids),
        include_stop=stopping.include_stop,
        ignore_eos=stopping.ignore_eos,
        skip_special_tokens=default_true(response, "skip_special_tokens"),
        top_logprobs=_optional(response, "top_logprobs"),
        prompt_logprobs=_optional(response, "prompt_logprobs"),
        incremental=default_true(response, "incremental"),
        tenant=message.scheduling.tenant,
        priority=message.scheduling.priority,
        salt=message.cache.salt,
        pinned_prefix=message.cache.pinned_prefix,
    )


def _optional(message: Message, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None


def _beam(message: pb.BeamSearch) -> BeamSearch:
    length_penalty = _optional(message, "length_penalty")
    if message.early_stopping not in _EARLY_STOPPING:
        raise bad_parameter("early_stopping", message.early_stopping, "it must be a value of the enum EarlyStopping")
    return BeamSearch(
        width=message.beam_width,
        length_penalty=1.0 if length_penalty is None else length_penalty,
        early_stopping=_EARLY_STOPPING[message.early_stopping],
    )


def _prompt(message: pb.GenerateRequest) -> Prompt:
    match message.WhichOneof("prompt"):
        case "text":
            return message.text
        case "token_ids":
            return list(message.token_ids.ids)
        case "chat":
            return read_chat(message.chat)
    raise bad_parameter("prompt", "missing", "one of text, token_ids and chat must be set")


def read_chat(message: pb.ChatPrompt) -> Chat:
    """The conversation, in order."""
    messages = tuple(ChatMessage(role=m.role, content=m.content) for m in message.messages)
    return Chat(messages)


def default_true(options: pb.ResponseOptions, name: str) -> bool:
    """An optional switch that is on unless turned off."""
    return bool(getattr(options, name)) if options.HasField(name) else True


def write_event(emitted: events.Emitted, options: pb.ResponseOptions) -> pb.GenerateResponse:
    """The event as a message; deltas carry what was asked for."""
    offset, event = emitted
    match event:
        case events.Piece():
            return pb.GenerateResponse(event_offset=offset, delta=_delta(event, options))
        case events.Started():
            return pb.GenerateResponse(event_offset=offset, started=_started(event))
        case events.Finished():
            return pb.GenerateResponse(event_offset=offset, finished=_finished(event))
        case events.Usage():
            return pb.GenerateResponse(event_offset=offset, usage=_usage(event))
        case events.Notice():
            return pb.GenerateResponse(event_offset=offset, notice=_notice(event))


def _delta(event: events.Piece, options: pb.ResponseOptions) -> pb.TokenDelta:
    return pb.TokenDelta(
        index=event.index,
        text=event.text if default_true(options, "text") else "",
        token_ids=event.token_ids if default_true(options, "token_ids") else (),
        # They may be there for the server's own use.
        logprobs=_logprobs(event.token_ids, event.logprobs) if options.HasField("top_logprobs") else (),
    )


def _started(event: events.Started) -> pb.Started:
    return pb.Started(
        request_id=event.request_id,
        model=event.model,
        prompt_tokens=len(event.prompt_token_ids),
        prompt_logprobs=_logprobs(event.prompt_token_ids[1:], event.prompt_logprobs) if event.prompt_logprobs else (),
        seed=event.seed,
    )


def _logprobs(token_ids: Sequence[int], logprobs: Sequence[Logprobs]) -> list[pb.TokenLogprobs]:
    return [
        pb.TokenLogprobs(
            id=token_id,
            logprob=token.logprob,
            rank=token.rank,
            top=map(_candidate, token.top_token_ids, token.top_logprobs),
        )
        for token_id, token in zip(token_ids, logprobs, strict=True)
    ]


def _candidate(token_id: int, logprob: float) -> pb.Candidate:
    return pb.Candidate(id=token_id, logprob=logprob)


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
