"""Serves POST /v1/responses, OpenAI's newer API, for text, reasoning and functions. Responses are not kept."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.frontend.answer_parsers.call_formats import NONE
from octavo.frontend.api.body import Reading, decoded, read_call, unknown_fields_header
from octavo.frontend.api.endpoint import Api, IndexedEvent, fresh_id, generations, origin_of
from octavo.frontend.api.sampling import sampling_of, seconds
from octavo.frontend.api.tool_calls import (
    ToolChoice,
    ToolChoiceMode,
    constraint_for,
    make_reader,
    markers_of,
    read_tool_choice,
    read_tools,
)
from octavo.frontend.http.connection import while_connected
from octavo.frontend.http.envelope import unix_time
from octavo.frontend.http.streaming import EventStream
from octavo.frontend.openai.answers import encode
from octavo.frontend.openai.response_answer import ResponseAnswer
from octavo.frontend.openai.responses_input import RESPONSES_UNSUPPORTED, ResponsesBody, chat_of, format_of
from octavo.frontend.request.chat import Tool
from octavo.frontend.request.request import GenerationRequest


async def responses(api: Api, request: Request) -> Response:
    """Answers one call."""
    body, unknown = await read_call(request, ResponsesBody, RESPONSES_UNSUPPORTED, api.generation.beginnings)
    found = read_tools(decoded("tools", body.tools, object), unknown)
    choice = read_tool_choice(decoded("tool_choice", body.tool_choice, object), found.functions)
    tools = () if choice.mode is ToolChoiceMode.NONE else found.functions
    call = body.request_id or fresh_id()
    asked = _asked(api, body, tools, choice, call, request, api.reading(unknown))
    is_forced = bool(tools) and choice.mode is not ToolChoiceMode.AUTO
    one_call = body.parallel_tool_calls is False
    reader = make_reader(api.tool_format if tools else NONE, tools, is_forced=is_forced, one_call=one_call)
    answer = ResponseAnswer(_response(api, body, call), reader, namespaces=found.namespaces)
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
        tools,
        choice,
        parallel=parallel,
        kind=api.tool_format,
        reading=reading,
        token_id=api.generation.tokenizer.added_token_id,
        asked=asked,
    )
    return GenerationRequest(
        prompt=chat_of(body, tools, api.generation.tokenizer, reading.ignored),
        request_id=call,
        max_new_tokens=body.max_output_tokens,
        kept_special_tokens=markers_of(api.tool_format) if tools else (),
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
