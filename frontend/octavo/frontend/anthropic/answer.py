"""Writes a call's events as Anthropic's API has them: one message, or the events of its stream."""

import base64
import hashlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from starlette.types import Scope

from octavo.frontend.answer_parsers.parts import (
    AnswerPart,
    AnswerReader,
    ContentText,
    ReasoningText,
    ToolCallDelta,
    joined,
)
from octavo.frontend.api.endpoint import IndexedEvent
from octavo.frontend.api.usage import UsageSum
from octavo.frontend.errors import ServiceError
from octavo.frontend.http.errors import anthropic_error
from octavo.frontend.http.streaming import comment
from octavo.frontend.request.events import (
    Event,
    MatchKind,
    RequestNotice,
    RequestStarted,
    SequenceFinished,
    TextDelta,
)
from octavo.wire.requests import FinishReason

encode: Final = msgspec.json.Encoder().encode
PING: Final = b'event: ping\ndata: {"type":"ping"}\n\n'
_CALL_ID: Final = "call_"


@dataclass(frozen=True)
class MessageFormat:
    """Says how a call's answer is written. Without `shows_thinking` blocks of thinking have a signature alone."""

    id: str
    model: str
    shows_thinking: bool = True

    def message(self, content: Sequence[object], usage: dict[str, Any], **ended: Any) -> dict[str, Any]:
        """Returns the message; `ended` are the fields that say how it has ended."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
            **ended,
        }


@dataclass
class _OpenBlock:
    """Holds the block that a stream is adding to; `before` is what each of its deltas begins with."""

    kind: str
    before: bytes
    digest: Any = field(default_factory=hashlib.sha256)


_END_OF_DELTA: Final = b"}}\n\n"


class MessageStream:
    """Turns the events of one generation into those of a stream, as bytes. `finish` is called after the last one."""

    def __init__(self, form: MessageFormat, reader: AnswerReader, scope: Scope) -> None:
        self._form = form
        self._reader = reader
        self._is_plain = reader.is_plain
        self._scope = scope
        self._usage = UsageSum()
        self._cached = 0
        self._block: _OpenBlock | None = None
        self._num_blocks = 0
        self._ended: dict[str, Any] = {}

    def take(self, event: Event) -> bytes:
        """Takes in the next event of the generation."""
        self._usage.note(0, event)
        match event:
            case TextDelta():
                if event.reasoning or not self._is_plain or self._block is None or self._block.kind != "text":
                    return b"".join(self._grown(self._reader.take(event.reasoning, event.text)))
                # The most of most answers, in which nothing is to be looked for.
                return self._delta(event.text) if event.text else b""
            case RequestStarted():
                counts = _usage_object(len(event.prompt_token_ids), event.cached_prompt_tokens, 0)
                return _event("message_start", message=self._form.message([], counts))
            case SequenceFinished():
                rest = b"".join([*self._grown(self._reader.finish()), *self._close()])
                self._ended = ended(event, self._reader)
                return rest
            case RequestNotice():
                return comment(event.kind.value)
        return b""

    def finish(self) -> bytes:
        """Returns the last events, which have the usage."""
        return _event("message_delta", delta=self._ended, usage=usage_of(self._usage)) + _event("message_stop")

    def fail(self, error: ServiceError) -> bytes:
        """Returns the last event of a stream that `error` ends."""
        return b"event: error\ndata: %b\n\n" % anthropic_error(error, self._scope)

    def _grown(self, parts: Sequence[AnswerPart]) -> Iterator[bytes]:
        for part in parts:
            match part:
                case ContentText():
                    yield from self._opened("text", {"text": ""}, b'"text_delta","text":')
                    yield self._delta(part.text)
                case ReasoningText():
                    empty = {"thinking": "", "signature": ""}
                    yield from self._opened("thinking", empty, b'"thinking_delta","thinking":')
                    assert self._block
                    self._block.digest.update(part.text.encode(errors="surrogatepass"))
                    if self._form.shows_thinking:
                        yield self._delta(part.text)
                case ToolCallDelta():
                    if part.id:
                        yield from self._close()
                        begun = {"id": tool_use_id(part), "name": part.name, "input": {}}
                        yield from self._opened("tool_use", begun, b'"input_json_delta","partial_json":')
                    if part.arguments and self._block:
                        yield self._delta(part.arguments)

    def _opened(self, kind: str, empty: dict[str, Any], delta: bytes) -> Iterator[bytes]:
        """Opens a block unless one of that kind is open; `delta` is how the object of its deltas goes on."""
        if self._block and self._block.kind == kind:
            return
        yield from self._close()
        head = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":'
        self._block = _OpenBlock(kind, head % self._num_blocks + delta)
        yield _event("content_block_start", index=self._num_blocks, content_block={"type": kind, **empty})

    def _delta(self, text: str) -> bytes:
        assert self._block
        return self._block.before + encode(text) + _END_OF_DELTA

    def _close(self) -> Iterator[bytes]:
        if self._block is None:
            return
        if self._block.kind == "thinking":
            delta = {"type": "signature_delta", "signature": _signature(self._block.digest)}
            yield _event("content_block_delta", index=self._num_blocks, delta=delta)
        yield _event("content_block_stop", index=self._num_blocks)
        self._block = None
        self._num_blocks += 1


async def stream(answer: MessageStream, events: AsyncGenerator[IndexedEvent]) -> AsyncGenerator[bytes]:
    """Yields the server-sent events of the answer."""
    async with aclosing(events):
        async for _, event in events:
            yield answer.take(event)
    yield answer.finish()


async def whole(form: MessageFormat, reader: AnswerReader, events: AsyncGenerator[IndexedEvent]) -> dict[str, Any]:
    """Returns the whole message, once all events are there."""
    usage, parts, end = UsageSum(), list[AnswerPart](), dict[str, Any]()
    async with aclosing(events):
        async for _, event in events:
            usage.note(0, event)
            match event:
                case TextDelta():
                    parts += reader.take(event.reasoning, event.text)
                case SequenceFinished():
                    parts += reader.finish()
                    end = ended(event, reader)
    return form.message([_block(form, part) for part in joined(parts)], usage_of(usage), **end)


def _block(form: MessageFormat, part: AnswerPart) -> dict[str, Any]:
    match part:
        case ContentText():
            return {"type": "text", "text": part.text}
        case ReasoningText():
            signature = _signature(hashlib.sha256(part.text.encode(errors="surrogatepass")))
            return {"type": "thinking", "thinking": part.text if form.shows_thinking else "", "signature": signature}
        case ToolCallDelta():
            return {"type": "tool_use", "id": tool_use_id(part), "name": part.name, "input": _input(part.arguments)}


def _input(arguments: str) -> object:
    """Returns what a tool is called with; of a call that was cut off, what there is of it, under the name by which
    Anthropic's clients are told to send such text."""
    try:
        return msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return {"INVALID_JSON": arguments}


def tool_use_id(call: ToolCallDelta) -> str:
    """Returns the id of a call as Anthropic's clients know such ids."""
    return f"toolu_{call.id.removeprefix(_CALL_ID)}"


def ended(finished: SequenceFinished, reader: AnswerReader) -> dict[str, Any]:
    """Returns why the answer has ended, in the words of Anthropic's API."""
    match = finished.match
    if finished.reason is not FinishReason.STOP:
        reason = "max_tokens"
    elif match and match.kind is MatchKind.STOP_STRING:
        return {"stop_reason": "stop_sequence", "stop_sequence": match.value}
    else:
        reason = "tool_use" if reader.any_calls else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}


def usage_of(counts: UsageSum) -> dict[str, Any]:
    """Returns the usage object of an answer that has ended."""
    found = _usage_object(counts.prompt_tokens, counts.cached_tokens, counts.completion_tokens)
    return {**found, "output_tokens_details": {"thinking_tokens": counts.reasoning_tokens}}


def _usage_object(prompt_tokens: int, cached: int, output: int) -> dict[str, Any]:
    # Whatever is computed is kept while there is room, asked for or not: nothing is created for a client in particular.
    return {
        "input_tokens": prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    }


def _signature(digest: Any) -> str:
    """Returns a digest of what was thought. Nobody checks it; clients leave out thoughts without one."""
    return base64.b64encode(digest.digest()).decode()


def _event(kind: str, /, **fields: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **fields}))
