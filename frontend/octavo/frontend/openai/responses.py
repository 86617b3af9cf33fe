"""Serves POST /v1/responses, OpenAI's newer API, for text and functions. Responses are not kept."""

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.frontend.api.body import Reading, decoded, read_call, unknown_fields_header
from octavo.frontend.api.endpoint import Api, IndexedEvent, fresh_id, generations, origin_of, route
from octavo.frontend.api.sampling import sampling_of, seconds
from octavo.frontend.api.usage import UsageSum
from octavo.frontend.errors import Overloaded, ServiceError
from octavo.frontend.http.connection import while_connected
from octavo.frontend.http.envelope import unix_time
from octavo.frontend.http.errors import error_object
from octavo.frontend.http.streaming import EventStream, comment
from octavo.frontend.openai.answers import encode
from octavo.frontend.openai.responses_input import RESPONSES_UNSUPPORTED, ResponsesBody, chat_of, format_of
from octavo.frontend.openai.tool_calls import (
    NONE,
    ToolCallParser,
    ToolChoice,
    ToolChoiceMode,
    constraint_for,
    make_parser,
    needs_special_tokens,
    read_tool_choice,
    read_tools,
)
from octavo.frontend.openai.tool_parsers import ParsedDelta, ToolCallDelta
from octavo.frontend.request.chat import Tool
from octavo.frontend.request.events import (
    Event,
    RequestNotice,
    RequestStarted,
    SequenceFinished,
    TextDelta,
)
from octavo.frontend.request.request import GenerationRequest
from octavo.wire.requests import FinishReason

_encode = msgspec.json.Encoder().encode


@dataclass
class _OpenMessage:
    """Holds the message that text is being added to."""

    id: str
    texts: list[str] = field(default_factory=list)

    def part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": "".join(self.texts), "annotations": [], "logprobs": []}


@dataclass
class _OpenCall:
    """Holds the call that arguments are being added to; `item` has the fields that do not change."""

    item: dict[str, Any]
    arguments: list[str] = field(default_factory=list)


class ResponseAnswer:
    """Builds the response object of one generation, and the events of every change to that object.

    `response` is the object as it is now, and complete after `finish`. Every method returns server-sent events as
    bytes; an answer that is no stream drops them.
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
        # Namespaces of functions, by the names of the functions.
        self._namespaces = namespaces or {}
        self._message: _OpenMessage | None = None
        self._call: _OpenCall | None = None
        self._usage = UsageSum()
        self._number = 0

    def take(self, event: Event) -> bytes:
        """Takes in the next event of the generation; `finish` is called after the last one."""
        self._usage.note(0, event)
        match event:
            case RequestStarted():
                return self._lifecycle("created") + self._lifecycle("in_progress")
            case TextDelta():
                return b"".join(self._grown(self._parser.feed(event.text)))
            case SequenceFinished():
                return b"".join(self._ended(event))
            case RequestNotice():
                return comment(event.kind.name.lower())
        return b""

    def finish(self) -> bytes:
        """Returns the last event of the response, which has the usage."""
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
        """Returns the last event of a stream that `error` ends."""
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

    def _ended(self, finished: SequenceFinished) -> Iterator[bytes]:
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


def routes(api: Api) -> list[Route]:
    """Returns the routes of this module."""
    return [route(api, "/v1/responses", responses, "POST")]


async def responses(api: Api, request: Request) -> Response:
    """Answers one call."""
    body, unknown = await read_call(request, ResponsesBody, RESPONSES_UNSUPPORTED, api.generation.beginnings)
    found = read_tools(decoded("tools", body.tools, object), unknown)
    choice = read_tool_choice(decoded("tool_choice", body.tool_choice, object), found.functions)
    tools = () if choice.mode is ToolChoiceMode.NONE else found.functions
    call = body.request_id or fresh_id()
    asked = _asked(api, body, tools, choice, call, request, api.reading(unknown))
    is_forced = bool(tools) and choice.mode is not ToolChoiceMode.AUTO
    parser = make_parser(api.tool_format if tools else NONE, is_forced=is_forced)
    one_call = body.parallel_tool_calls is False
    answer = ResponseAnswer(_response(api, body, call), parser, one_call=one_call, namespaces=found.namespaces)
    events = generations(api, request, [asked], seconds("timeout", body.timeout))
    headers = unknown_fields_header(unknown)
    if body.stream:
        return EventStream(_stream(answer, events), ping_s=api.ping_s, headers=headers, on_error=answer.fail)
    whole = await while_connected(request, _whole(answer, events))
    return Response(encode(whole), headers=headers, media_type="application/json")


def _asked(
    api: Api,
    body: ResponsesBody,
    tools: tuple[Tool, ...],
    choice: ToolChoice,
    call: str,
    request: Request,
    reading: Reading,
) -> GenerationRequest:
    parallel, asked = body.parallel_tool_calls is not False, format_of(body, reading)
    sampling = sampling_of(body, reading)
    sampling["constraint"] = constraint_for(
        tools, choice, parallel=parallel, kind=api.tool_format, reading=reading, asked=asked
    )
    if tools and needs_special_tokens(api.tool_format, api.generation.tokenizer):
        sampling["skip_special_tokens"] = False
    return GenerationRequest(
        prompt=chat_of(body, tools, api.generation.tokenizer, reading.ignored),
        request_id=call,
        max_new_tokens=body.max_output_tokens,
        **sampling,
        **origin_of(request),
    )


async def _stream(answer: ResponseAnswer, events: AsyncGenerator[IndexedEvent]) -> AsyncGenerator[bytes]:
    async with aclosing(events):
        async for _, event in events:
            yield answer.take(event)
    yield answer.finish()


async def _whole(answer: ResponseAnswer, events: AsyncGenerator[IndexedEvent]) -> dict[str, Any]:
    async with aclosing(events):
        async for _, event in events:
            answer.take(event)
    answer.finish()
    return answer.response


def _response(api: Api, body: ResponsesBody, call: str) -> dict[str, Any]:
    """Returns the fields of the response that do not change: what was asked for."""
    reasoning = body.reasoning
    return {
        "id": f"resp_{call}",
        "object": "response",
        "created_at": unix_time(),
        "completed_at": None,
        "model": body.model or api.generation.model_name,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": decoded("metadata", body.metadata, dict[str, str]) or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
        "background": False,
        "service_tier": "default",
        "store": False,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "text": {"format": _format(body)},
        "tool_choice": decoded("tool_choice", body.tool_choice, object) or "auto",
        "tools": decoded("tools", body.tools, object) or [],
        "truncation": "disabled",
        "user": decoded("user", body.user, str),
    }


def _format(body: ResponsesBody) -> dict[str, Any]:
    form = body.text.format if body.text else None
    if form is None or form.type != "json_schema":
        return {"type": form.type if form else "text"}
    schema = decoded("text.format.schema", form.schema, object)
    return {"type": form.type, "name": form.name, "schema": schema, "strict": form.strict}
