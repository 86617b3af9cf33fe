"""Serves POST /v1/chat/completions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.frontend.answer_parsers.call_formats import NONE
from octavo.frontend.answer_parsers.parts import AnswerPart, ContentText, ReasoningText, ToolCallDelta, joined, text_of
from octavo.frontend.api.body import Reading, decoded, read_call
from octavo.frontend.api.endpoint import Api, fresh_id, generations, origin_of
from octavo.frontend.api.sampling import number_of_choices, sampling_of, seconds
from octavo.frontend.api.tool_calls import (
    ToolChoiceMode,
    constraint_for,
    make_reader,
    markers_of,
    read_tool_choice,
)
from octavo.frontend.errors import bad_parameter
from octavo.frontend.openai.answers import AnswerFormat, encode, finish_reason, respond, stop_reason, usage_options
from octavo.frontend.openai.logprobs import ChatLogprobs, prompt_logprobs_of
from octavo.frontend.openai.messages import chat_of, prediction_of, tools_of
from octavo.frontend.openai.schemas import CHAT_UNSUPPORTED, ChatBody
from octavo.frontend.request.chat import Tool
from octavo.frontend.request.events import RequestStarted, SequenceFinished, TextDelta
from octavo.frontend.request.request import Constraint, GenerationRequest
from octavo.frontend.text.tokenizer import ModelTokenizer
from octavo.wire.requests import FinishReason


@dataclass(frozen=True)
class _Tools:
    """Holds the functions in the prompt, the parser that finds calls in the answer, and what the answer must match.

    `markers` are the texts of special tokens that the parser needs.
    """

    functions: tuple[Tool, ...] = ()
    parser: str | None = None
    constraint: Constraint | None = None
    markers: tuple[str, ...] = ()
    one_call: bool = False
    is_forced: bool = False


async def chat_completions(api: Api, request: Request) -> Response:
    """Answers one call."""
    body, unknown = await read_call(request, ChatBody, CHAT_UNSUPPORTED, api.generation.beginnings)
    _check(body)
    call = body.request_id or fresh_id()
    reading = api.reading(unknown)
    sampling = sampling_of(body, reading)
    tools = _tools(api, body, sampling["constraint"], reading)
    asked = _asked(api, body, tools, {**sampling, "constraint": tools.constraint}, call, request, unknown)
    events = generations(api, request, [asked], seconds("timeout", body.timeout))
    form = _ChatFormat(
        kind="chat.completion",
        id=f"chatcmpl-{call}",
        model=body.model or api.generation.model_name,
        n=number_of_choices(body),
        body=body,
        tools=tools,
        tokenizer=api.generation.tokenizer,
        **usage_options(body),
    )
    return await respond(api, request, form, events, unknown, streams=bool(body.stream))


def _check(body: ChatBody) -> None:
    if body.top_logprobs and not body.logprobs:
        raise bad_parameter("top_logprobs", body.top_logprobs, "logprobs must be true then")
    if body.prompt_logprobs is not None and body.stream:
        raise bad_parameter("prompt_logprobs", body.prompt_logprobs, "a stream has none; leave out stream")


def _tools(api: Api, body: ChatBody, asked: Constraint | None, reading: Reading) -> _Tools:
    tools = tools_of(body, reading.ignored)
    choice = read_tool_choice(decoded("tool_choice", body.tool_choice, object), tools)
    if not tools or choice.mode is ToolChoiceMode.NONE:
        return _Tools(constraint=asked)
    parallel = body.parallel_tool_calls is not False
    constraint = constraint_for(
        tools,
        choice,
        parallel=parallel,
        kind=api.tool_format,
        reading=reading,
        token_id=api.generation.tokenizer.added_token_id,
        asked=asked,
    )
    is_forced = choice.mode is not ToolChoiceMode.AUTO
    return _Tools(
        tools, api.tool_format, constraint, markers_of(api.tool_format), one_call=not parallel, is_forced=is_forced
    )


def _asked(
    api: Api,
    body: ChatBody,
    tools: _Tools,
    sampling: dict[str, Any],
    call: str,
    request: Request,
    ignored: list[str],
) -> GenerationRequest:
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return GenerationRequest(
        prompt=chat_of(body, tools.functions, api.generation.tokenizer, ignored),
        request_id=call,
        max_new_tokens=most,
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prediction=prediction_of(body.prediction),
        kept_special_tokens=tools.markers,
        **sampling,
        **origin_of(request),
    )


@dataclass(frozen=True, kw_only=True)
class _ChatFormat(AnswerFormat):
    """Describes the answer of a call for chat completions."""

    body: ChatBody
    tools: _Tools
    tokenizer: ModelTokenizer

    def choice(self, index: int) -> "_Choice":
        return _Choice(index, self.tokenizer, self.body, self.tools)

    def extra(self, started: RequestStarted) -> dict[str, Any]:
        ids = started.prompt_token_ids
        found: dict[str, Any] = {"prompt_token_ids": list(ids)} if self.body.return_token_ids else {}
        if self.body.prompt_logprobs is not None:
            found["prompt_logprobs"] = prompt_logprobs_of(self.tokenizer, ids, started.prompt_logprobs)
        return found


class _Choice:
    """Writes one answer of the assistant."""

    def __init__(self, index: int, tokenizer: ModelTokenizer, body: ChatBody, tools: _Tools) -> None:
        self._index = index
        self._reader = make_reader(
            tools.parser or NONE, tools.functions, is_forced=tools.is_forced, one_call=tools.one_call
        )
        self._shows_reasoning = body.include_reasoning is not False
        self._logprobs = ChatLogprobs(tokenizer, body.top_logprobs or 0) if body.logprobs else None
        self._shows_ids = bool(body.return_token_ids)
        self._is_plain = self._reader.is_plain and self._logprobs is None and not self._shows_ids
        self._before = b'{"index":%d,"delta":{"content":' % index

    def begin(self, started: RequestStarted) -> bytes:
        return self._object({"role": "assistant", "content": ""})

    def piece(self, piece: TextDelta) -> bytes:
        if self._is_plain and not piece.reasoning:
            if not piece.text:
                return b""
            return self._before + encode(piece.text) + b'},"logprobs":null,"finish_reason":null}'
        delta = self._delta(self._reader.take(piece.reasoning, piece.text))
        if not delta and self._logprobs is None and not self._shows_ids:
            return b""
        return self._object(delta, **self._tokens(piece))

    def end(self, finished: SequenceFinished) -> Sequence[bytes]:
        rest = self._delta(self._reader.finish())
        last = {"finish_reason": self._reason(finished), "stop_reason": stop_reason(finished)}
        return [*([self._object(rest)] if rest else []), self._object({}, **last)]

    def whole(
        self, started: RequestStarted, pieces: Sequence[TextDelta], finished: SequenceFinished
    ) -> Iterator[bytes]:
        message = self._message(pieces)
        token_ids = [token_id for piece in pieces for token_id in piece.token_ids]
        found = {"index": self._index, "message": message, "finish_reason": self._reason(finished)}
        ids = {"token_ids": token_ids} if self._shows_ids else {}
        yield encode({**found, **ids, "stop_reason": stop_reason(finished)})[:-1] + b',"logprobs":'
        if self._logprobs:
            yield from self._logprobs.whole(token_ids, [piece.logprobs for piece in pieces])
        else:
            yield b"null"
        yield b"}"

    def _message(self, pieces: Sequence[TextDelta]) -> dict[str, Any]:
        read = [part for piece in pieces for part in self._reader.take(piece.reasoning, piece.text)]
        parts = joined(read + self._reader.finish())
        calls = [part for part in parts if isinstance(part, ToolCallDelta)]
        text, reasoning = text_of(parts, ContentText), text_of(parts, ReasoningText)
        message = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        return {
            **message,
            **(self._reasoning(reasoning) if reasoning else {}),
            **({"tool_calls": list(map(_whole_call, calls))} if calls else {}),
        }

    def _delta(self, parts: Sequence[AnswerPart]) -> dict[str, Any]:
        content, reasoning = text_of(parts, ContentText), text_of(parts, ReasoningText)
        calls = [_call_delta(part) for part in parts if isinstance(part, ToolCallDelta)]
        found: dict[str, Any] = {"content": content} if content else {}
        return {
            **(self._reasoning(reasoning) if reasoning else {}),
            **found,
            **({"tool_calls": calls} if calls else {}),
        }

    def _reasoning(self, text: str) -> dict[str, str]:
        # Clients look for one name or the other.
        return {"reasoning": text, "reasoning_content": text} if self._shows_reasoning else {}

    def _tokens(self, piece: TextDelta) -> dict[str, Any]:
        found: dict[str, Any] = {"token_ids": piece.token_ids} if self._shows_ids else {}
        if self._logprobs:
            found["logprobs"] = self._logprobs.of(piece.token_ids, piece.logprobs)
        return found

    def _reason(self, finished: SequenceFinished) -> str:
        called = self._reader.any_calls and finished.reason is FinishReason.STOP
        return "tool_calls" if called else finish_reason(finished)

    def _object(self, delta: dict[str, Any], **fields: object) -> bytes:
        return encode({"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None, **fields})


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if not call.id:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _whole_call(call: ToolCallDelta) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
