"""Serves POST /v1/completions."""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
from msgspec import Raw
from starlette.requests import Request
from starlette.responses import Response

from octavo.frontend.api.body import UNREADABLE, Reading, given, read_call, unsupported_field
from octavo.frontend.api.endpoint import Api, IndexedEvent, caller_of, fresh_id, generations, origin_of
from octavo.frontend.api.sampling import number_of_choices, sampling_of, seconds
from octavo.frontend.errors import InvalidRequest, bad_parameter
from octavo.frontend.http.connection import while_connected
from octavo.frontend.openai.answers import AnswerFormat, encode, finish_reason, respond, stop_reason, usage_options
from octavo.frontend.openai.logprobs import CompletionLogprobs, prompt_logprobs_of
from octavo.frontend.openai.schemas import COMPLETION_UNSUPPORTED, CompletionBody
from octavo.frontend.request.events import RequestStarted, RequestUsage, SequenceFinished, TextDelta
from octavo.frontend.request.infill import Infill
from octavo.frontend.request.request import Caller, GenerationRequest, Prompt
from octavo.frontend.request.validation import check_prompt_size, check_room
from octavo.frontend.text.infill import InfillFormat
from octavo.frontend.text.tokenizer import ModelTokenizer
from octavo.wire.requests import FinishReason
from octavo.wire.sampling import MAX_TOP_LOGPROBS, Logprobs

MAX_PROMPTS: Final = 256

_decode_text = msgspec.json.Decoder(str).decode
_decode_ids = msgspec.json.Decoder(list[int]).decode
_decode_texts = msgspec.json.Decoder(list[str]).decode
_decode_lists = msgspec.json.Decoder(list[list[int]]).decode


def read_prompts(raw: Raw, max_model_len: int) -> list[str | list[int]]:
    """Returns all prompts, in order, each a text or token ids.

    Raises `InvalidRequest` for anything else, for more than `MAX_PROMPTS`, and for token ids that leave no room for an
    answer.
    """
    text = given(raw)
    try:
        prompts = _read(text, max_model_len)
    except UNREADABLE as error:
        raise _wrong_form() from error
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise bad_parameter("prompt", f"a list of {len(prompts)}", f"it may hold 1 to {MAX_PROMPTS} prompts")
    return prompts


def _read(text: bytes, max_model_len: int) -> list[str | list[int]]:
    match text[:1], text[1:].lstrip()[:1]:
        case b'"', _:
            return [_decode_text(text)]
        case b"[", b'"':
            return list(_decode_texts(text))
        case b"[", b"[":
            # Counted before lists are made.
            if (lists := text.count(b"[") - 1) > MAX_PROMPTS:
                raise bad_parameter("prompt", f"a list of {lists}", f"it may hold 1 to {MAX_PROMPTS} prompts")
            return list(_decode_lists(text))
        case b"[", b"]":
            return []
        case b"[", _:
            # Counted before the list is made.
            check_room(text.count(b",") + 1, max_model_len)
            return [_decode_ids(text)]
    raise _wrong_form()


def _wrong_form() -> InvalidRequest:
    return bad_parameter(
        "prompt", "of another form", "it must be a text, token ids, or a list of texts or of token ids"
    )


# OpenAI's default of `max_tokens`.
_MAX_TOKENS = 16


async def completions(api: Api, request: Request) -> Response:
    """Answers one call."""
    body, unknown = await read_call(request, CompletionBody, COMPLETION_UNSUPPORTED, api.generation.beginnings)
    _check(body)
    call = body.request_id or fresh_id()
    prompts = read_prompts(body.prompt, api.generation.max_model_len)
    gaps, ends = _gaps(api, prompts, body.suffix) if body.suffix else (prompts, ())
    texts = await while_connected(request, _texts(api, prompts, caller_of(request))) if body.echo else []
    events = generations(
        api,
        request,
        _asked(body, gaps, call, request, api.reading(unknown), ends),
        seconds("timeout", body.timeout),
    )
    form = _CompletionFormat(
        kind="text_completion",
        id=f"cmpl-{call}",
        model=body.model or api.generation.model_name,
        n=number_of_choices(body),
        body=body,
        texts=texts,
        tokenizer=api.generation.tokenizer,
        **usage_options(body),
    )
    if body.max_tokens == 0:
        events = without_answers(events)
    return await respond(api, request, form, events, unknown, streams=bool(body.stream))


def _check(body: CompletionBody) -> None:
    if body.logprobs is not None and not 0 <= body.logprobs <= MAX_TOP_LOGPROBS:
        raise bad_parameter("logprobs", body.logprobs, f"it must be between 0 and {MAX_TOP_LOGPROBS}")
    if body.prompt_logprobs is not None and body.stream:
        raise bad_parameter("prompt_logprobs", body.prompt_logprobs, "a stream has none; use echo and logprobs")
    if body.suffix and body.echo:
        raise bad_parameter(
            "echo", True, "a filling of the gap before suffix has no prompt to begin with; leave it out"
        )
    if body.max_tokens == 0 and not body.echo:
        raise bad_parameter("max_tokens", 0, "without echo there would be no answer; it must be at least 1")


async def _texts(api: Api, prompts: Sequence[str | list[int]], caller: Caller) -> list[str]:
    return [await _text(api, prompt, caller) for prompt in prompts]


async def _text(api: Api, prompt: str | list[int], caller: Caller) -> str:
    if isinstance(prompt, str):
        return prompt
    check_prompt_size(prompt, api.generation.max_model_len)
    return await api.generation.decode(prompt, caller, skip_special_tokens=False)


def gap_format(api: Api, field: str) -> InfillFormat:
    """Returns how the model is asked to fill a gap. Raises `Unsupported`, naming `field`, if it was not trained to."""
    if (found := api.generation.tokenizer.infill_format) is None:
        raise unsupported_field(
            field,
            "the model's tokenizer has no tokens for a text with a gap; serve a model that was trained to fill gaps, or"
            " leave it out",
        )
    return found


def _gaps(api: Api, prompts: Sequence[str | list[int]], suffix: str) -> tuple[list[Infill], tuple[int, ...]]:
    """Returns the gaps between each prompt and `suffix`, and the tokens that end a filling."""
    ends = gap_format(api, "suffix").ends
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts):
        raise bad_parameter("prompt", "of token ids", "with a suffix it must be a text, or a list of texts")
    return [Infill(text, suffix) for text in texts], ends


def _asked(
    body: CompletionBody,
    prompts: Sequence[Prompt],
    call: str,
    request: Request,
    reading: Reading,
    ends: tuple[int, ...],
) -> list[GenerationRequest]:
    """Returns one request for each prompt, which any of the tokens `ends` may end too.

    With `max_tokens` 0 one token is generated, and not shown.
    """
    sampling = sampling_of(body, reading)
    fields = {
        **sampling,
        "stop_token_ids": (*sampling.get("stop_token_ids", ()), *ends),
        **origin_of(request),
        "max_new_tokens": _MAX_TOKENS if body.max_tokens is None else body.max_tokens or 1,
        "top_logprobs": body.logprobs,
        "add_special_tokens": body.add_special_tokens is not False,
    }
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        fields["prompt_logprobs"] = body.logprobs
    ids = [call] if len(prompts) == 1 else [f"{call}-{place}" for place in range(len(prompts))]
    return [GenerationRequest(prompt=prompt, request_id=i, **fields) for prompt, i in zip(prompts, ids, strict=True)]


@dataclass(frozen=True, kw_only=True)
class _CompletionFormat(AnswerFormat):
    """Describes the answer of a call for completions. `texts` are those of the prompts, where the call asks for an
    echo."""

    body: CompletionBody
    texts: Sequence[str]
    tokenizer: ModelTokenizer

    def choice(self, index: int) -> "_Choice":
        return _Choice(index, self.tokenizer, self.body, self.texts[index // self.n] if self.texts else None)


async def without_answers(events: AsyncGenerator[IndexedEvent]) -> AsyncGenerator[IndexedEvent]:
    """Yields the events as if nothing had been generated."""
    async with aclosing(events):
        async for place, event in events:
            match event:
                case TextDelta():
                    continue
                case SequenceFinished():
                    yield place, replace(event, reason=FinishReason.LENGTH, match=None)
                case RequestUsage():
                    yield place, replace(event, completion_tokens=0)
                case _:
                    yield place, event


class _Choice:
    """Writes one choice of a completion, which begins with the prompt where the call asks for an echo."""

    def __init__(self, index: int, tokenizer: ModelTokenizer, body: CompletionBody, echo: str | None) -> None:
        self._index = index
        self._tokenizer = tokenizer
        self._echo = echo
        self._logprobs = None if body.logprobs is None else CompletionLogprobs(tokenizer, body.logprobs)
        self._shows_ids = bool(body.return_token_ids)
        self._shows_prompt_logprobs = body.prompt_logprobs is not None
        self._before = b'{"index":%d,"text":' % index

    def begin(self, started: RequestStarted) -> bytes:
        if self._echo is None and not self._shows_ids:
            return b""
        ids = {"prompt_token_ids": list(started.prompt_token_ids)} if self._shows_ids else {}
        return encode({**self._object(self._prompt(started)), "finish_reason": None, **ids})

    def piece(self, piece: TextDelta) -> bytes:
        if self._logprobs is None and not self._shows_ids:
            if not piece.text:
                return b""
            return self._before + encode(piece.text) + b',"logprobs":null,"finish_reason":null}'
        found = self._object(_Shown(piece.text, piece.token_ids, piece.logprobs))
        ids = {"token_ids": piece.token_ids} if self._shows_ids else {}
        return encode({**found, "finish_reason": None, **ids})

    def end(self, finished: SequenceFinished) -> Sequence[bytes]:
        return [encode({**self._object(_Shown("", [], [])), **_ending(finished)})]

    def whole(
        self, started: RequestStarted, pieces: Sequence[TextDelta], finished: SequenceFinished
    ) -> Iterator[bytes]:
        prompt = self._prompt(started)
        text = prompt.text + "".join(piece.text for piece in pieces)
        token_ids = [token_id for piece in pieces for token_id in piece.token_ids]
        shown_ids = [*prompt.token_ids, *token_ids]
        found: dict[str, Any] = {"index": self._index, "text": text, **_ending(finished)}
        if self._shows_ids:
            found |= {"token_ids": token_ids, "prompt_token_ids": list(started.prompt_token_ids)}
        if self._shows_prompt_logprobs:
            ids = started.prompt_token_ids
            found["prompt_logprobs"] = prompt_logprobs_of(self._tokenizer, ids, started.prompt_logprobs)
        yield encode(found)[:-1] + b',"logprobs":'
        if self._logprobs and shown_ids:
            yield from self._logprobs.whole(shown_ids, [prompt.logprobs, *(piece.logprobs for piece in pieces)])
        else:
            yield b"null"
        yield b"}"

    def _prompt(self, started: RequestStarted) -> "_Shown":
        if self._echo is None:
            return _Shown("", [], [])
        logprobs = [None, *started.prompt_logprobs] if self._logprobs else []
        return _Shown(self._echo, started.prompt_token_ids, logprobs)

    def _object(self, shown: "_Shown") -> dict[str, Any]:
        found: dict[str, Any] = {"index": self._index, "text": shown.text, "logprobs": None}
        if self._logprobs and shown.token_ids:
            found["logprobs"] = self._logprobs.of(shown.token_ids, shown.logprobs)
        return found


@dataclass(frozen=True)
class _Shown:
    """Holds a text and its tokens; the first token of a prompt has no logprob."""

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[Logprobs | None]


def _ending(finished: SequenceFinished) -> dict[str, Any]:
    return {"finish_reason": finish_reason(finished), "stop_reason": stop_reason(finished)}
