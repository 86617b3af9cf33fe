"""The answer of /v1/responses while it grows: its object, and the events that tell a client of every change to it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from octavo.frontend.errors import Overloaded, ServiceError
from octavo.frontend.http.envelope import unix_time
from octavo.frontend.http.errors import error_object
from octavo.frontend.http.sse import comment
from octavo.frontend.openai.logprobs import UsageSum
from octavo.frontend.openai.tool_calls import ToolCallParser
from octavo.frontend.openai.tool_parsers import ParsedDelta, ToolCallDelta
from octavo.frontend.request.events import Event, Finished, FinishReason, Notice, Started, TextDelta

_encode = msgspec.json.Encoder().encode


@dataclass
class _OpenMessage:
    """The message that text is being added to."""

    id: str
    texts: list[str] = field(default_factory=list)

    def part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": "".join(self.texts), "annotations": [], "logprobs": []}


@dataclass
class _OpenCall:
    """The call that arguments are being added to; `item` is what of it does not change."""

    item: dict[str, Any]
    arguments: list[str] = field(default_factory=list)


class ResponseAnswer:
    """Takes the events of one generation. `response` is the object as it is now, and whole at the end.

    Every method gives server-sent events as bytes; an answer that is no stream drops them.
    """

    def __init__(
        self,
        response: dict[str, Any],
        parser: ToolCallParser,
        *,
        one_call: bool,
        namespaces: Mapping[str, str] | None = None,
    ) -> None:
        self.response: dict[str, Any] = {**response, "status": "in_progress", "output": [], "usage": None}
        self._output: list[dict[str, Any]] = self.response["output"]
        self._parser = parser
        self._one_call = one_call
        # Of functions, by their names.
        self._namespaces = namespaces or {}
        self._message: _OpenMessage | None = None
        self._call: _OpenCall | None = None
        self._usage = UsageSum()
        self._number = 0

    def take(self, event: Event) -> bytes:
        """The next event of the generation; after the last one comes `finish`."""
        self._usage.note(0, event)
        match event:
            case Started():
                return self._lifecycle("created") + self._lifecycle("in_progress")
            case TextDelta():
                return b"".join(self._grown(self._parser.feed(event.text)))
            case Finished():
                return b"".join(self._ended(event))
            case Notice():
                return comment(event.kind.name.lower())
        return b""

    def finish(self) -> bytes:
        """The last event."""
        counts = self._usage
        self.response["usage"] = {
            "input_tokens": counts.prompt_tokens,
            "input_tokens_details": {"cached_tokens": counts.cached_tokens},
            "output_tokens": counts.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts.prompt_tokens + counts.completion_tokens,
        }
        return self._lifecycle(self.response["status"])

    def fail(self, error: ServiceError) -> bytes:
        """The last event of a stream that an error ends."""
        code = "rate_limit_exceeded" if isinstance(error, Overloaded) else "server_error"
        self.response |= {"status": "failed", "error": {"code": code, "message": error_object(error)["message"]}}
        return self._lifecycle("failed")

    def _grown(self, delta: ParsedDelta) -> Iterator[bytes]:
        if delta.content:
            yield from self._add_text(delta.content)
        for call in delta.calls:
            if call.index == 0 or not self._one_call:
                if call.id:
                    yield from self._close_message("completed")
                    yield from self._close_call("completed")
                    yield from self._open_call(call)
                yield from self._add_arguments(call.arguments)

    def _ended(self, finished: Finished) -> Iterator[bytes]:
        yield from self._grown(self._parser.finish())
        status = "completed" if finished.reason is FinishReason.STOP else "incomplete"
        if not self._output and self._message is None and self._call is None:
            yield from self._open_message()
        yield from self._close_message(status)
        yield from self._close_call(status)
        self.response["status"] = status
        if status == "incomplete":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.response["completed_at"] = unix_time()

    def _add_text(self, text: str) -> Iterator[bytes]:
        yield from self._close_call("completed")
        if self._message is None:
            yield from self._open_message()
        assert self._message
        self._message.texts.append(text)
        yield self._event("output_text.delta", **self._place(), delta=text, logprobs=[])

    def _open_message(self) -> Iterator[bytes]:
        self._message = _OpenMessage(f"msg_{len(self._output)}_{self.response['id'][5:]}")
        yield self._event("output_item.added", output_index=len(self._output), item=self._item("in_progress", []))
        yield self._event("content_part.added", **self._place(), part=self._message.part())

    def _close_message(self, status: str) -> Iterator[bytes]:
        if self._message is None:
            return
        part = self._message.part()
        yield self._event("output_text.done", **self._place(), text=part["text"], logprobs=[])
        yield self._event("content_part.done", **self._place(), part=part)
        item = self._item(status, [part])
        yield self._event("output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._message = None

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        assert self._message
        return {
            "id": self._message.id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _place(self) -> dict[str, Any]:
        assert self._message
        return {"item_id": self._message.id, "output_index": len(self._output), "content_index": 0}

    def _open_call(self, call: ToolCallDelta) -> Iterator[bytes]:
        item_id = f"fc_{call.id.removeprefix('call_')}"
        item = {"id": item_id, "type": "function_call", "call_id": call.id, "name": call.name}
        if namespace := self._namespaces.get(call.name):
            item["namespace"] = namespace
        self._call = _OpenCall(item)
        begun = {**item, "arguments": "", "status": "in_progress"}
        yield self._event("output_item.added", output_index=len(self._output), item=begun)

    def _add_arguments(self, arguments: str) -> Iterator[bytes]:
        if arguments and self._call:
            self._call.arguments.append(arguments)
            place = {"item_id": self._call.item["id"], "output_index": len(self._output)}
            yield self._event("function_call_arguments.delta", **place, delta=arguments)

    def _close_call(self, status: str) -> Iterator[bytes]:
        if self._call is None:
            return
        item, arguments = self._call.item, "".join(self._call.arguments)
        place = {"item_id": item["id"], "output_index": len(self._output)}
        yield self._event("function_call_arguments.done", **place, name=item["name"], arguments=arguments)
        whole = {**item, "arguments": arguments, "status": status}
        yield self._event("output_item.done", output_index=len(self._output), item=whole)
        self._output.append(whole)
        self._call = None

    def _lifecycle(self, name: str) -> bytes:
        return self._event(name, response=self.response)

    def _event(self, name: str, /, **fields: object) -> bytes:
        kind = f"response.{name}"
        payload = _encode({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), payload)
