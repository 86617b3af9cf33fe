"""Builds the object of a response, and the events of every change to it."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Final

import msgspec

from octavo.frontend.answer_parsers.parts import AnswerPart, AnswerReader, ContentText, ReasoningText, ToolCallDelta
from octavo.frontend.api.usage import UsageSum
from octavo.frontend.errors import Overloaded, ServiceError
from octavo.frontend.http.envelope import unix_time
from octavo.frontend.http.errors import error_object
from octavo.frontend.http.streaming import comment
from octavo.frontend.request.events import Event, RequestNotice, RequestStarted, SequenceFinished, TextDelta
from octavo.wire.requests import FinishReason

_encode = msgspec.json.Encoder().encode
_PREFIX: Final = "resp_"
# The name of an event, without what all have in common, and its fields.
_Event = tuple[str, dict[str, Any]]
_END: Final = b"\n\n"


def _head(name: str) -> bytes:
    """Returns what every event `name` begins with, up to its number."""
    kind = f"response.{name}".encode()
    return b'event: %b\ndata: {"type":"%b","sequence_number":' % (kind, kind)


class _OpenItem(ABC):
    """Holds the item of the output that text is being added to, at the index `place`. `NAME` is what the events of the
    text are called."""

    NAME: ClassVar[str]
    # What says, in the events of further text, where that belongs, besides the item; and what they have behind it.
    TEXT_PLACE: ClassVar[Mapping[str, Any]] = {}
    BEHIND_TEXT: ClassVar[bytes] = b"}"

    def __init__(self, item: dict[str, Any], place: int) -> None:
        """`item` has the fields that do not change."""
        self.item = item
        self._texts: list[str] = []
        self._at = {"item_id": item["id"], "output_index": place, **self.TEXT_PLACE}
        # Nearly all events are of further text: what they have in common is encoded once.
        self._head = _head(f"{self.NAME}.delta")
        self._before = b',%b,"delta":' % _encode(self._at)[1:-1]

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def opened(self) -> Iterator[_Event]:
        """Yields the events of the item's beginning."""
        yield "output_item.added", {"output_index": self._at["output_index"], "item": self.begun()}

    def grown(self, text: str, number: int) -> bytes:
        """Adds `text`, and returns the event of it, which has that `number`."""
        self._texts.append(text)
        return self._head + b"%d" % number + self._before + _encode(text) + self.BEHIND_TEXT + _END

    def closed(self, status: str) -> Iterator[_Event]:
        """Yields the events of the item's end."""
        yield from self.done()
        yield "output_item.done", {"output_index": self._at["output_index"], "item": self.whole(status)}

    @abstractmethod
    def begun(self) -> dict[str, Any]:
        """Returns the item without text."""

    @abstractmethod
    def done(self) -> Iterator[_Event]:
        """Yields the events of the whole text."""

    @abstractmethod
    def whole(self, status: str) -> dict[str, Any]:
        """Returns the item with its text."""


class _OpenParts(_OpenItem):
    """Holds an item whose text is a part of its content."""

    TEXT_PLACE: ClassVar[Mapping[str, Any]] = {"content_index": 0}

    @abstractmethod
    def part(self) -> dict[str, Any]:
        """Returns the part with the text that there is."""

    def opened(self) -> Iterator[_Event]:
        yield from super().opened()
        yield "content_part.added", {**self._at, "part": self.part()}

    def begun(self) -> dict[str, Any]:
        return {**self.item, "status": "in_progress", "content": []}

    def done(self) -> Iterator[_Event]:
        yield f"{self.NAME}.done", {**self._at, "text": self.text}
        yield "content_part.done", {**self._at, "part": self.part()}

    def whole(self, status: str) -> dict[str, Any]:
        return {**self.item, "status": status, "content": [self.part()]}


class _OpenMessage(_OpenParts):
    NAME = "output_text"
    BEHIND_TEXT = b',"logprobs":[]}'

    def part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    def done(self) -> Iterator[_Event]:
        for name, fields in super().done():
            yield name, fields if "part" in fields else {**fields, "logprobs": []}


class _OpenReasoning(_OpenParts):
    NAME = "reasoning_text"

    def part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self.text}


class _OpenCall(_OpenItem):
    NAME = "function_call_arguments"

    def begun(self) -> dict[str, Any]:
        return {**self.item, "arguments": "", "status": "in_progress"}

    def done(self) -> Iterator[_Event]:
        yield f"{self.NAME}.done", {**self._at, "name": self.item["name"], "arguments": self.text}

    def whole(self, status: str) -> dict[str, Any]:
        return {**self.item, "arguments": self.text, "status": status}


class ResponseAnswer:
    """Builds the response object of one generation, and the events of every change to that object.

    `response` is the object as it is now, and complete after `finish`. Every method returns server-sent events as
    bytes; an answer that is no stream drops them.
    """

    def __init__(
        self, response: dict[str, Any], reader: AnswerReader, *, namespaces: Mapping[str, str] | None = None
    ) -> None:
        self.response: dict[str, Any] = {**response, "status": "in_progress", "output": [], "usage": None}
        self._output: list[dict[str, Any]] = self.response["output"]
        self._reader = reader
        self._is_plain = reader.is_plain
        # Namespaces of functions, by the names of the functions.
        self._namespaces = namespaces or {}
        self._open: _OpenItem | None = None
        self._usage = UsageSum()
        self._number = 0

    def take(self, event: Event) -> bytes:
        """Takes in the next event of the generation; `finish` is called after the last one."""
        self._usage.note(0, event)
        match event:
            case TextDelta():
                if event.reasoning or not self._is_plain or not isinstance(self._open, _OpenMessage):
                    return b"".join(self._grown(self._reader.take(event.reasoning, event.text)))
                # The most of most answers, in which nothing is to be looked for.
                return self._further(event.text) if event.text else b""
            case RequestStarted():
                created = b"" if self._number else self._lifecycle("created")
                self.response["status"] = "in_progress"
                return created + self._lifecycle("in_progress")
            case SequenceFinished():
                return b"".join(self._ended(event))
            case RequestNotice():
                return comment(event.kind.name.lower())
        return b""

    @property
    def has_begun(self) -> bool:
        """Tells whether there were events."""
        return bool(self._number)

    def finish(self) -> bytes:
        """Returns the last event of the response, which has the usage."""
        self.sum_up()
        return self._lifecycle(self.response["status"])

    def sum_up(self) -> None:
        """Makes `response` complete, after the last event was taken in."""
        counts = self._usage
        self.response["usage"] = {
            "input_tokens": counts.prompt_tokens,
            "input_tokens_details": {"cached_tokens": counts.cached_tokens},
            "output_tokens": counts.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
            "total_tokens": counts.prompt_tokens + counts.completion_tokens,
        }

    def queue(self) -> bytes:
        """Returns the first events of a response that nobody waits for; called before anything is taken in."""
        self.response["status"] = "queued"
        return self._lifecycle("created") + self._lifecycle("queued")

    def cancel(self) -> bytes:
        """Returns the last events of a response that was cancelled, which keeps what there is of its answer."""
        ended = b"".join(self._close("incomplete"))
        self.response["status"] = "cancelled"
        return ended + self._lifecycle("cancelled")

    def forget(self) -> None:
        """Drops what there is of the answer."""
        self._output.clear()
        self._open = None

    def fail(self, error: ServiceError) -> bytes:
        """Returns the last event of a stream that `error` ends."""
        self.note_failure(error)
        return self._lifecycle("failed")

    def note_failure(self, error: ServiceError) -> None:
        """Makes `response` one that `error` has ended."""
        code = "rate_limit_exceeded" if isinstance(error, Overloaded) else "server_error"
        self.response |= {"status": "failed", "error": {"code": code, "message": error_object(error)["message"]}}

    def _grown(self, parts: Iterable[AnswerPart]) -> Iterator[bytes]:
        for part in parts:
            match part:
                case ContentText():
                    yield from self._add(_OpenMessage, part.text)
                case ReasoningText():
                    yield from self._add(_OpenReasoning, part.text)
                case ToolCallDelta():
                    if part.id:
                        yield from self._close("completed")
                        yield from self._begin(_OpenCall(self._call(part), len(self._output)))
                    if part.arguments and self._open:
                        yield self._further(part.arguments)

    def _ended(self, finished: SequenceFinished) -> Iterator[bytes]:
        yield from self._grown(self._reader.finish())
        status = "completed" if finished.reason is FinishReason.STOP else "incomplete"
        if not self._output and self._open is None:
            yield from self._begin(self._message())
        yield from self._close(status)
        self.response["status"] = status
        if status == "incomplete":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.response["completed_at"] = unix_time()

    def _add(self, kind: type[_OpenParts], text: str) -> Iterator[bytes]:
        if not isinstance(self._open, kind):
            yield from self._close("completed")
            yield from self._begin(self._message() if kind is _OpenMessage else self._reasoning())
        yield self._further(text)

    def _further(self, text: str) -> bytes:
        """Adds `text` to the open item, and returns the event of it."""
        assert self._open
        self._number += 1
        return self._open.grown(text, self._number - 1)

    def _begin(self, item: _OpenItem) -> Iterator[bytes]:
        self._open = item
        return self._written(item.opened())

    def _close(self, status: str) -> Iterator[bytes]:
        if self._open is not None:
            yield from self._written(self._open.closed(status))
            self._output.append(self._open.whole(status))
            self._open = None

    def _message(self) -> _OpenItem:
        item = {"id": self._id("msg"), "type": "message", "role": "assistant"}
        return _OpenMessage(item, len(self._output))

    def _reasoning(self) -> _OpenItem:
        return _OpenReasoning({"id": self._id("rs"), "type": "reasoning", "summary": []}, len(self._output))

    def _call(self, call: ToolCallDelta) -> dict[str, Any]:
        item = {"id": self._id("fc"), "type": "function_call", "call_id": call.id, "name": call.name}
        namespace = self._namespaces.get(call.name)
        return {**item, "namespace": namespace} if namespace else item

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{len(self._output)}_{self.response['id'].removeprefix(_PREFIX)}"

    def _lifecycle(self, name: str) -> bytes:
        return self._event(name, {"response": self.response})

    def _written(self, events: Iterable[_Event]) -> Iterator[bytes]:
        return (self._event(name, fields) for name, fields in events)

    def _event(self, name: str, fields: dict[str, Any]) -> bytes:
        self._number += 1
        return event_of(name, self._number - 1, fields)


def response_of(item_id: str) -> str:
    """Returns the id of the response whose answer has the item of that id, if an answer has it."""
    return _PREFIX + "_".join(item_id.split("_")[2:])


def event_of(name: str, number: int, fields: dict[str, Any]) -> bytes:
    """Returns the event `name` with `fields`, one at least; it has that `number` in the stream of its response."""
    return _head(name) + b"%d,%b" % (number, _encode(fields)[1:]) + _END
