"""Serves POST /v1/messages, and /v1/messages/count_tokens."""

import re
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from octavo.frontend.answer_parsers.call_formats import NONE
from octavo.frontend.anthropic.answer import PING, MessageFormat, MessageStream, encode, stream, whole
from octavo.frontend.anthropic.conversation import chat_of, tool_choice_of, tools_of
from octavo.frontend.anthropic.schemas import (
    COUNT_UNSUPPORTED,
    MESSAGES_UNSUPPORTED,
    CountTokensBody,
    MessagesBody,
    OutputConfig,
    ThinkingParam,
)
from octavo.frontend.api.body import Reading, given, read_call, unknown_fields_header, unsupported_field
from octavo.frontend.api.endpoint import Api, caller_of, fresh_id, generations, origin_of
from octavo.frontend.api.sampling import constraint_of, sampling_of, schema_constraint, seconds
from octavo.frontend.api.tool_calls import (
    ToolChoiceMode,
    constraint_for,
    make_reader,
    markers_of,
)
from octavo.frontend.errors import bad_parameter
from octavo.frontend.http.connection import while_connected
from octavo.frontend.http.streaming import EventStream
from octavo.frontend.request.chat import Tool
from octavo.frontend.request.request import Constraint, GenerationRequest

# Versions of the API whose forms are those of this folder, the oldest first: they differ in what models take.
_VERSIONS: Final = ("2023-06-01", "2026-10-21")
_DATE: Final = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)
# Betas that ask for what happens here anyway, or for what a field of the body asks for as well.
_BETAS: Final = frozenset(
    {
        "claude-code-20250219",
        "effort-2025-11-24",
        "fine-grained-tool-streaming-2025-05-14",
        "interleaved-thinking-2025-05-14",
        "mid-conversation-system-2026-04-07",
        "prompt-caching-2024-07-31",
        "prompt-caching-scope-2026-01-05",
        "structured-outputs-2025-11-13",
        "thinking-token-count-2026-05-13",
        "token-counting-2024-11-01",
        "tools-2024-04-04",
    }
)
_THINKING: Final = ("enabled", "adaptive", "between_tools", "disabled")


async def messages(api: Api, request: Request) -> Response:
    """Answers one call."""
    unknown = _not_honoured(request)
    body, found = await read_call(request, MessagesBody, MESSAGES_UNSUPPORTED, api.generation.beginnings)
    unknown += found
    tools = _tools(api, body, api.reading(unknown))
    call = body.request_id or fresh_id()
    asked = _asked(api, body, tools, call, request, api.reading(unknown))
    form = MessageFormat(f"msg_{call}", body.model or api.generation.model_name, _shows_thinking(body.thinking))
    functions, is_forced = tools.functions, tools.is_forced
    kind = api.tool_format if functions else NONE
    reader = make_reader(kind, functions, is_forced=is_forced, one_call=tools.one_call)
    events = generations(api, request, [asked], seconds("timeout", body.timeout))
    headers = unknown_fields_header(unknown)
    if body.stream:
        answer = MessageStream(form, reader, request.scope)
        written = stream(answer, events)
        return EventStream(written, ping_s=api.ping_s, headers=headers, on_error=answer.fail, ping=PING)
    message = await while_connected(request, whole(form, reader, events))
    return Response(encode(message), headers=headers, media_type="application/json")


async def count_tokens(api: Api, request: Request) -> Response:
    """Answers with the number of tokens of a prompt."""
    unknown = _not_honoured(request)
    body, found = await read_call(request, CountTokensBody, COUNT_UNSUPPORTED, api.generation.beginnings)
    unknown += found
    api.generation.check_model(body.model or "")
    _check_thinking(body.thinking)
    tools = tools_of(body, unknown)
    choice = tool_choice_of(body.tool_choice, tools)
    shown = () if choice.mode is ToolChoiceMode.NONE else tools
    chat = chat_of(body, shown, api.generation.tokenizer, unknown)
    ids = await while_connected(request, api.generation.encode(chat, caller_of(request)))
    headers = unknown_fields_header(unknown)
    return Response(encode({"input_tokens": len(ids)}), headers=headers, media_type="application/json")


@dataclass(frozen=True)
class _Tools:
    """Holds the functions in the prompt, and what the answer must match."""

    functions: tuple[Tool, ...] = ()
    constraint: Constraint | None = None
    one_call: bool = False
    is_forced: bool = False


def _tools(api: Api, body: MessagesBody, reading: Reading) -> _Tools:
    asked = _format_of(body, reading)
    tools = tools_of(body, reading.ignored)
    choice = tool_choice_of(body.tool_choice, tools)
    if choice.mode is ToolChoiceMode.NONE:
        return _Tools(constraint=asked)
    one_call = bool(body.tool_choice and body.tool_choice.disable_parallel_tool_use)
    constraint = constraint_for(
        tools,
        choice,
        parallel=not one_call,
        kind=api.tool_format,
        reading=reading,
        token_id=api.generation.tokenizer.added_token_id,
        asked=asked,
    )
    return _Tools(tools, constraint, one_call, is_forced=choice.mode is not ToolChoiceMode.AUTO)


def _format_of(body: MessagesBody, reading: Reading) -> Constraint | None:
    """Returns what the answer's text must match, None for any text. Raises `InvalidRequest`, `Unsupported`."""
    asked, form = constraint_of(body, reading), _of_config(body.output_config, reading)
    if asked and form:
        rule = "structured_outputs and guided_* exclude it; leave one out"
        raise bad_parameter("output_config.format", "one constraint too many", rule)
    return asked or form


def _of_config(config: OutputConfig | None, reading: Reading) -> Constraint | None:
    if config is None or config.format is None:
        return None
    if config.format.type != "json_schema":
        raise unsupported_field(f"output_config.format of type {config.format.type[:64]!r}", "use json_schema")
    if not given(config.format.schema):
        raise bad_parameter("output_config.format.schema", "missing", "json_schema needs one")
    return schema_constraint("output_config.format.schema", config.format.schema, reading)


def _asked(
    api: Api, body: MessagesBody, tools: _Tools, call: str, request: Request, reading: Reading
) -> GenerationRequest:
    sampling: dict[str, Any] = sampling_of(body, reading) | {
        "constraint": tools.constraint,
        "stop_strings": tuple(body.stop_sequences or ()),
        **_thinking(api, body.thinking, reading.ignored),
    }
    return GenerationRequest(
        prompt=chat_of(body, tools.functions, api.generation.tokenizer, reading.ignored),
        request_id=call,
        max_new_tokens=body.max_tokens,
        kept_special_tokens=markers_of(api.tool_format) if tools.functions else (),
        **sampling,
        **origin_of(request),
    )


def _thinking(api: Api, thinking: ThinkingParam | None, ignored: list[str]) -> dict[str, Any]:
    """Returns how much the model may think, as arguments of `GenerationRequest`. A model that thinks nothing answers
    without: clients ask for it whatever the model. Raises `InvalidRequest`."""
    _check_thinking(thinking)
    if thinking is None:
        return {}
    if not api.generation.reasons:
        ignored += ["thinking"] * (thinking.type != "disabled")
        return {}
    budget = 0 if thinking.type == "disabled" else thinking.budget_tokens
    return {} if budget is None else {"max_reasoning_tokens": budget}


def _check_thinking(thinking: ThinkingParam | None) -> None:
    if thinking is None:
        return
    if thinking.type not in _THINKING:
        raise bad_parameter("thinking.type", repr(thinking.type[:64]), f"it must be one of {', '.join(_THINKING)}")
    if thinking.type == "enabled" and (thinking.budget_tokens is None or thinking.budget_tokens < 1):
        rule = "it must be the number of tokens, at least 1, that the model may think with"
        raise bad_parameter("thinking.budget_tokens", thinking.budget_tokens, rule)


def _shows_thinking(thinking: ThinkingParam | None) -> bool:
    return thinking is None or thinking.display != "omitted"


def _not_honoured(request: Request) -> list[str]:
    """Returns the names of betas that are not honoured, and of a version of the API that is newer than what is known
    here. Raises `InvalidRequest` for an older one."""
    version = request.headers.get("anthropic-version", _VERSIONS[0])
    if not _DATE.fullmatch(version) or version < _VERSIONS[0]:
        raise bad_parameter("anthropic-version", repr(version[:64]), f"it must be one of {', '.join(_VERSIONS)}")
    named = ",".join(request.headers.getlist("anthropic-beta")).split(",")
    betas = [f"anthropic-beta.{beta}" for name in named if (beta := name.strip()) and beta not in _BETAS]
    return betas if version in _VERSIONS else ["anthropic-version", *betas]
