"""octavo.v1 messages to and from the types behind every door."""

from typing import Final

from google.protobuf.duration_pb2 import Duration

from octavo.frontend import events
from octavo.frontend.errors import bad_parameter
from octavo.frontend.tokenizer import ChatMessage
from octavo.frontend.validation import GenerationRequest, Prompt
from octavo.v1 import generation_pb2 as pb

_REASONS: Final = {
    events.FinishReason.STOP: pb.FINISH_REASON_STOP,
    events.FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}
_MATCH_FIELDS: Final = {
    events.MatchKind.STOP_STRING: "stop_string",
    events.MatchKind.STOP_TOKEN: "stop_token_id",
    events.MatchKind.EOS_TOKEN: "eos_token_id",
}


def read_request(message: pb.GenerateRequest) -> GenerationRequest:
    """Raises `InvalidRequest` where the message has no prompt."""
    sampling, stopping = message.sampling, message.stopping
    return GenerationRequest(
        prompt=_prompt(message),
        request_id=message.request_id,
        model=message.model,
        temperature=sampling.temperature if sampling.HasField("temperature") else None,
        top_p=sampling.top_p if sampling.HasField("top_p") else None,
        top_k=sampling.top_k if sampling.HasField("top_k") else None,
        seed=sampling.seed if sampling.HasField("seed") else None,
        max_new_tokens=stopping.max_new_tokens if stopping.HasField("max_new_tokens") else None,
        stop_strings=tuple(stopping.stop_strings),
        stop_token_ids=tuple(stopping.stop_token_ids),
        include_stop=stopping.include_stop,
        ignore_eos=stopping.ignore_eos,
        skip_special_tokens=default_true(message.response, "skip_special_tokens"),
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


def read_chat(message: pb.ChatPrompt) -> tuple[ChatMessage, ...]:
    """The conversation, in order."""
    return tuple(ChatMessage(role=m.role, content=m.content) for m in message.messages)


def default_true(options: pb.ResponseOptions, name: str) -> bool:
    """An optional switch that is on unless turned off."""
    return bool(getattr(options, name)) if options.HasField(name) else True


def write_event(event: events.Event, *, text: bool, token_ids: bool) -> pb.GenerateResponse:
    """The event as a message; deltas carry what was asked for."""
    match event:
        case events.Piece():
            delta = pb.TokenDelta(text=event.text if text else "", token_ids=event.token_ids if token_ids else ())
            return pb.GenerateResponse(delta=delta)
        case events.Started():
            started = pb.Started(
                request_id=event.request_id, model=event.model, prompt_tokens=event.prompt_tokens, seed=event.seed
            )
            return pb.GenerateResponse(started=started)
        case events.Finished():
            return pb.GenerateResponse(finished=_finished(event))
        case events.Usage():
            return pb.GenerateResponse(usage=_usage(event))


def _finished(event: events.Finished) -> pb.Finished:
    finished = pb.Finished(reason=_REASONS[event.reason])
    if event.match is not None:
        setattr(finished, _MATCH_FIELDS[event.match.kind], event.match.value)
    return finished


def _usage(event: events.Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=event.prompt_tokens,
        completion_tokens=event.completion_tokens,
        preemptions=event.preemptions,
        cached_prompt_tokens=event.cached_prompt_tokens,
        time_to_first_token=_duration(event.time_to_first_token_s),
        decode_time=_duration(event.decode_time_s),
    )


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration
