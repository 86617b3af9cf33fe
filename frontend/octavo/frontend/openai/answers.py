"""Turns the events of a call's generations into its answer: one JSON object, or a stream of chunks."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Final, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.frontend.api.body import unknown_fields_header
from octavo.frontend.api.endpoint import SYSTEM_FINGERPRINT, Api, IndexedEvent
from octavo.frontend.api.schemas import Sampling
from octavo.frontend.api.usage import UsageSum
from octavo.frontend.http.connection import while_connected
from octavo.frontend.http.envelope import unix_time
from octavo.frontend.http.streaming import DONE, EventStream, Sliced, comment
from octavo.frontend.openai.logprobs import usage_object
from octavo.frontend.request.events import (
    MatchKind,
    RequestNotice,
    RequestStarted,
    SequenceFinished,
    TextDelta,
    is_long,
    num_numbers,
)
from octavo.frontend.stream.pacing import apart
from octavo.wire.requests import FinishReason

# Bytes of a long answer that are written at once.
_SLICE_BYTES: Final = 64 << 10
# Logprobs of a whole answer that are written in a few milliseconds.
_FEW_NUMBERS: Final = 4096

encode = msgspec.json.Encoder().encode
_REASONS: Final = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class ChoiceWriter(Protocol):
    """Writes one choice of an answer as JSON objects.

    A stream calls `begin`, `piece` and `end`, in order; an answer in one object calls `whole` alone.
    """

    def begin(self, started: RequestStarted) -> bytes:
        """Returns the first object of a stream; may be empty."""
        ...

    def piece(self, piece: TextDelta) -> bytes:
        """Returns the object of new tokens; empty where there is nothing to show yet."""
        ...

    def end(self, finished: SequenceFinished) -> Sequence[bytes]:
        """Returns the last objects; the very last has the finish reason."""
        ...

    def whole(
        self, started: RequestStarted, pieces: Sequence[TextDelta], finished: SequenceFinished
    ) -> Iterator[bytes]:
        """Yields the parts of the choice's object in an answer that is no stream."""
        ...


@dataclass(frozen=True, kw_only=True)
class AnswerFormat(ABC):
    """Describes a call's answer. Generation `place` of the call has the `n` choices from `place * n` on."""

    kind: str
    id: str
    model: str
    n: int
    include_usage: bool = False
    continuous_usage: bool = False
    created: int = field(default_factory=unix_time)

    @abstractmethod
    def choice(self, index: int) -> ChoiceWriter:
        """Makes the writer of a choice."""

    def extra(self, started: RequestStarted) -> dict[str, Any]:
        """Returns further fields of an answer that is no stream, and of a stream's first chunk."""
        return {}

    def head(self, kind: str) -> dict[str, Any]:
        """Returns the fields that every object of the answer begins with."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
        }


def usage_options(body: Sampling) -> dict[str, Any]:
    """Returns which usage a stream shows, as arguments of `AnswerFormat`."""
    options = body.stream_options
    if options is None:
        return {}
    return {
        "include_usage": bool(options.include_usage),
        "continuous_usage": bool(options.include_usage and options.continuous_usage_stats),
    }


def finish_reason(finished: SequenceFinished) -> str:
    """Returns OpenAI's word for the reason."""
    return _REASONS[finished.reason]


def stop_reason(finished: SequenceFinished) -> str | int | None:
    """Returns vLLM's `stop_reason`: the stop string or token id that ended the choice, None if EOS or none did."""
    match = finished.match
    return None if match is None or match.kind is MatchKind.EOS_TOKEN else match.value


async def stream(form: AnswerFormat, events: AsyncGenerator[IndexedEvent]) -> AsyncGenerator[bytes]:
    """Yields the server-sent events of the answer."""
    chunks = _Chunks(form)
    choices: dict[int, ChoiceWriter] = {}
    async with aclosing(events):
        async for place, event in events:
            chunks.usage.note(place, event)
            match event:
                case TextDelta():
                    choice = choices[place * form.n + event.index]
                    # Most deltas are short and written here: there are too many to move each to a thread.
                    found = await apart(partial(choice.piece, event)) if is_long(event) else choice.piece(event)
                    yield chunks.of(found)
                case RequestStarted():
                    for index in range(place * form.n, (place + 1) * form.n):
                        choices[index] = form.choice(index)
                        begin = partial(choices[index].begin, event)
                        begun = await apart(begin) if is_long(event) else begin()
                        yield chunks.of(begun, form.extra(event) if index == 0 else None)
                case SequenceFinished():
                    objects = choices[place * form.n + event.index].end(event)
                    yield b"".join(map(chunks.of, objects))
                case RequestNotice():
                    yield _notice(event)
    yield chunks.last() + DONE


async def respond(
    api: Api,
    request: Request,
    form: AnswerFormat,
    events: AsyncGenerator[IndexedEvent],
    unknown: Sequence[str],
    *,
    streams: bool,
) -> Response:
    """Returns the answer, streamed or whole; `unknown` are the names of fields that are not honoured."""
    headers = unknown_fields_header(unknown)
    if streams:
        return EventStream(stream(form, events), ping_s=api.ping_s, headers=headers)
    whole = await while_connected(request, gathered(form, events))
    if whole.is_long:
        return Sliced(whole.written(), headers=headers, media_type="application/json")
    return Response(b"".join(whole.parts), headers=headers, media_type="application/json")


@dataclass(frozen=True)
class WholeAnswer:
    """Holds an answer as one object: JSON text in `parts`, each written when it is asked for."""

    parts: Iterator[bytes]
    is_long: bool

    async def written(self) -> AsyncGenerator[bytes]:
        """Yields a long answer in slices that are written off the event loop."""
        while part := await apart(self._slice):
            yield part

    def _slice(self) -> bytes:
        """Returns the next slice: `_SLICE_BYTES` bytes or more, fewer at the end, none after it."""
        held, size = [], 0
        while size < _SLICE_BYTES and (part := next(self.parts, None)) is not None:
            held.append(part)
            size += len(part)
        return b"".join(held)


async def gathered(form: AnswerFormat, events: AsyncGenerator[IndexedEvent]) -> WholeAnswer:
    """Returns the whole answer, once all events are there."""
    usage, started = UsageSum(), dict[int, RequestStarted]()
    pieces: dict[int, list[TextDelta]] = {}
    finished: dict[int, SequenceFinished] = {}
    async with aclosing(events):
        async for place, event in events:
            usage.note(place, event)
            match event:
                case TextDelta():
                    pieces.setdefault(place * form.n + event.index, []).append(event)
                case RequestStarted():
                    started[place] = event
                case SequenceFinished():
                    finished[place * form.n + event.index] = event

    def parts() -> Iterator[bytes]:
        yield encode(form.head(form.kind))[:-1] + b',"choices":['
        for place, index in enumerate(sorted(finished)):
            yield b"," if place else b""
            choice = form.choice(index)
            yield from choice.whole(started[index // form.n], pieces.pop(index, ()), finished[index])
        yield b"]," + encode({"usage": usage_object(usage), **form.extra(started[0])})[1:]

    seen: list[RequestStarted | TextDelta] = [*started.values(), *chain.from_iterable(pieces.values())]
    num_long = sum(num_numbers(event.logprobs) for event in seen if isinstance(event, TextDelta) and event.logprobs)
    return WholeAnswer(parts(), num_long > _FEW_NUMBERS or any(map(is_long, seen)))


class _Chunks:
    """Writes the chunks of one stream; encodes once what all chunks have in common."""

    def __init__(self, form: AnswerFormat) -> None:
        self.usage = UsageSum()
        self._form = form
        kind = form.kind if form.kind == "text_completion" else f"{form.kind}.chunk"
        self._head = b"data: " + encode(form.head(kind))[:-1]
        self._before = self._head + b',"choices":['
        self._behind = b'],"usage":null}\n\n' if form.include_usage else b"]}\n\n"

    def of(self, choice: bytes, extra: dict[str, Any] | None = None) -> bytes:
        """Returns the event of a choice's object; empty for an empty object."""
        if not choice:
            return b""
        if extra or self._form.continuous_usage:
            return self._before + choice + b"]" + self._more(extra or {}) + b"}\n\n"
        return self._before + choice + self._behind

    def last(self) -> bytes:
        """Returns the event of the usage; empty unless the usage is asked for."""
        if not self._form.include_usage:
            return b""
        return self._before + b'],"usage":' + encode(usage_object(self.usage)) + b"}\n\n"

    def _more(self, extra: dict[str, Any]) -> bytes:
        fields = dict(extra)
        if self._form.include_usage:
            fields["usage"] = usage_object(self.usage) if self._form.continuous_usage else None
        return b"," + encode(fields)[1:-1] if fields else b""


def _notice(notice: RequestNotice) -> bytes:
    place = f" {notice.queue_position}" if notice.queue_position else ""
    return comment(f"{notice.kind.value}{place}")
