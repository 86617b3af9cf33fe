"""Serves POST /infill, llama.cpp's route for editors: fills the gap between two texts, with pieces of other files."""

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from octavo.frontend.api.body import Neutral, read_call, unknown_fields_header
from octavo.frontend.api.endpoint import Api, IndexedEvent, fresh_id, generations, origin_of
from octavo.frontend.errors import bad_parameter
from octavo.frontend.http.connection import while_connected
from octavo.frontend.http.streaming import EventStream, data
from octavo.frontend.openai.answers import encode
from octavo.frontend.openai.completions import gap_format, without_answers
from octavo.frontend.request.events import (
    MatchKind,
    RequestStarted,
    RequestUsage,
    SequenceFinished,
    TextDelta,
)
from octavo.frontend.request.infill import FilePiece, Infill
from octavo.frontend.request.request import GenerationRequest
from octavo.wire.requests import FinishReason

_MAX_PIECES: Final = 1024
# Tokens of an answer for which room is kept where the call sets no limit.
_ROOM: Final = 128
# No tokenizer in use needs more bytes for a token on average: what is longer cannot fit.
_BYTES_PER_TOKEN: Final = 8


class _Piece(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Holds a piece of another file."""

    text: str
    filename: str = ""


class InfillBody(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Holds the body of /infill, by llama.cpp's names. None means "left out"."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Annotated[list[_Piece], Meta(max_length=_MAX_PIECES)] = msgspec.field(default_factory=list)
    # The beginning of the filling.
    prompt: str = ""
    n_predict: int = -1
    stream: bool = False
    stop: Annotated[list[str], Meta(max_length=64)] = msgspec.field(default_factory=list)
    seed: int = -1
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], Meta(max_length=1024)] = msgspec.field(default_factory=dict)
    response_fields: Annotated[list[str], Meta(max_length=64)] = msgspec.field(default_factory=list)
    model: str = ""
    # What is computed of a prompt is always kept.
    cache_prompt: bool = True


INFILL_UNSUPPORTED: Final[Neutral] = {
    "grammar": (b'""',),
    "json_schema": (b"{}",),
    "n_probs": (b"0",),
    "lora": (b"[]",),
}


async def infill(api: Api, request: Request) -> Response:
    """Answers one call."""
    body, unknown = await read_call(request, InfillBody, INFILL_UNSUPPORTED, api.generation.beginnings)
    events = generations(api, request, [_asked(api, body, request)], None)
    if body.n_predict == 0:
        # Editors have the pieces computed ahead of the first gap.
        events = without_answers(events)
    answer = _Answer(body.model or api.generation.model_name, body.response_fields)
    headers = unknown_fields_header(unknown)
    if body.stream:
        return EventStream(_stream(answer, events), ping_s=api.ping_s, headers=headers)
    whole = await while_connected(request, _whole(answer, events))
    return Response(encode(whole), headers=headers, media_type="application/json")


def _asked(api: Api, body: InfillBody, request: Request) -> GenerationRequest:
    form = gap_format(api, "infill")
    context = api.generation.max_model_len
    if not -1 <= body.n_predict < context:
        rule = f"it must be at least 0 and below the context's {context} tokens, or -1 for no limit"
        raise bad_parameter("n_predict", body.n_predict, rule)
    answer = _ROOM if body.n_predict < 0 else max(1, body.n_predict)
    # What the model recommends or OpenAI defaults to is for conversations: unless told otherwise, the likeliest.
    return GenerationRequest(
        prompt=_gap(body, context * _BYTES_PER_TOKEN, most_tokens=max(1, context - answer)),
        request_id=fresh_id(),
        model=body.model,
        max_new_tokens=None if body.n_predict < 0 else answer,
        stop_strings=tuple(body.stop),
        stop_token_ids=form.ends,
        seed=None if body.seed < 0 else body.seed,
        temperature=0.0 if body.temperature is None else max(0.0, body.temperature),
        top_k=None if body.top_k is None else max(0, body.top_k),
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repeat_penalty,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        logit_bias=body.logit_bias,
        incremental=body.stream,
        **origin_of(request),
    )


def _gap(body: InfillBody, most_characters: int, most_tokens: int) -> Infill:
    """Returns the gap that a call asks to have filled, without what is too far from it to be worth tokenizing."""
    room, extra = most_characters, body.input_extra
    first = len(extra)
    while first and (room := room - len(extra[first - 1].text)) >= 0:
        first -= 1
    pieces = tuple(FilePiece(piece.filename, piece.text) for piece in extra[first:])
    before, after = body.input_prefix[-most_characters:], body.input_suffix[:most_characters]
    return Infill(before, after, body.prompt, pieces, most_tokens)


@dataclass
class _Answer:
    """Gathers what llama.cpp's clients are told at the end of a filling. Times are of a monotonic clock, in seconds."""

    model: str
    response_fields: list[str]
    texts: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    predicted: int = 0
    cached: int = 0
    finished: SequenceFinished | None = None
    asked_at: float = field(default_factory=time.monotonic)
    started_at: float = 0.0
    ended_at: float = 0.0

    def take(self, event: object) -> None:
        """Takes in the next event of the generation."""
        match event:
            case RequestStarted():
                self.prompt_tokens, self.started_at = len(event.prompt_token_ids), time.monotonic()
            case TextDelta():
                self.texts.append(event.text)
            case SequenceFinished():
                self.finished, self.ended_at = event, time.monotonic()
            case RequestUsage():
                self.predicted, self.cached = event.completion_tokens, event.cached_prompt_tokens

    def object(self, content: str) -> dict[str, Any]:
        """Returns the last object of an answer, or its only one, whose text is `content`."""
        assert self.finished
        match, prompt_ms = self.finished.match, 1e3 * (self.started_at - self.asked_at)
        predicted_ms = 1e3 * (self.ended_at - self.started_at)
        computed = self.prompt_tokens - self.cached
        whole: dict[str, Any] = {
            "index": 0,
            "content": content,
            "stop": True,
            "model": self.model,
            "tokens_predicted": self.predicted,
            "tokens_evaluated": self.prompt_tokens,
            "tokens_cached": self.cached,
            "truncated": False,
            "has_new_line": "\n" in "".join(self.texts),
            "stop_type": _stop_type(self.finished),
            "stopping_word": match.value if match and match.kind is MatchKind.STOP_STRING else "",
            "timings": {
                "cache_n": self.cached,
                "prompt_n": computed,
                "prompt_ms": prompt_ms,
                "prompt_per_second": _rate(computed, prompt_ms),
                "predicted_n": self.predicted,
                "predicted_ms": predicted_ms,
                "predicted_per_second": _rate(self.predicted, predicted_ms),
            },
        }
        return _chosen(whole, self.response_fields) if self.response_fields else whole


async def _whole(answer: _Answer, events: AsyncGenerator[IndexedEvent]) -> dict[str, Any]:
    async with aclosing(events):
        async for _, event in events:
            answer.take(event)
    return answer.object("".join(answer.texts))


async def _stream(answer: _Answer, events: AsyncGenerator[IndexedEvent]) -> AsyncGenerator[bytes]:
    async with aclosing(events):
        async for _, event in events:
            answer.take(event)
            if isinstance(event, TextDelta) and event.text:
                yield data(encode({"index": 0, "content": event.text, "stop": False}))
    yield data(encode(answer.object("")))


def _stop_type(finished: SequenceFinished) -> str:
    """Returns llama.cpp's word for what ended the filling; a token that ends fillings counts as EOS."""
    if finished.reason is FinishReason.LENGTH:
        return "limit"
    return "word" if finished.match and finished.match.kind is MatchKind.STOP_STRING else "eos"


def _rate(count: int, milliseconds: float) -> float:
    return 1e3 * count / milliseconds if milliseconds > 0 else 0.0


def _chosen(whole: Mapping[str, Any], paths: list[str]) -> dict[str, Any]:
    """Returns the fields at `paths`, whose steps are divided by slashes, each under its path; unknown ones are left
    out."""
    found: dict[str, Any] = {}
    for path in paths:
        value: Any = whole
        for step in path.split("/"):
            value = value.get(step) if isinstance(value, Mapping) else None
        if value is not None:
            found[path] = value
    return found
