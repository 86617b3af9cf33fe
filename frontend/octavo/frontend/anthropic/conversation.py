"""Reads the messages, the system prompt and the tools of a body of Anthropic's API as a chat."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, Final, Protocol

import msgspec
from msgspec import Raw

from octavo.frontend.anthropic.schemas import (
    CacheControl,
    Content,
    ContentBlock,
    MessageParam,
    OutputConfig,
    ThinkingParam,
    ToolChoiceParam,
)
from octavo.frontend.api.body import decoded, given, unsupported_field
from octavo.frontend.api.template_variables import SWITCHES, readable_variables
from octavo.frontend.api.tool_calls import MAX_TOOLS, ToolChoice, ToolChoiceMode
from octavo.frontend.errors import bad_parameter
from octavo.frontend.request.chat import Chat, ChatMessage, Tool, ToolCall
from octavo.frontend.text.tokenizer import ModelTokenizer

# Claude Code begins its system prompt with a block that is for Anthropic's accounts; it is another in every call, so
# that no prompt would begin as the one before.
_BILLING: Final = "x-anthropic-billing-header:"
_MODES: Final = {
    "auto": ToolChoiceMode.AUTO,
    "any": ToolChoiceMode.REQUIRED,
    "tool": ToolChoiceMode.FUNCTION,
    "none": ToolChoiceMode.NONE,
}
_KNOWN_OF_TOOLS: Final = frozenset({"type", "name", "description", "input_schema", "strict", "cache_control"})
# What fields of tools ask for where they ask for what happens anyway.
_IDLE_OF_TOOLS: Final[dict[str, tuple[object, ...]]] = {
    "eager_input_streaming": (True, None),
    "defer_loading": (False, None),
    "allowed_callers": (["direct"], None),
    "input_examples": ([], None),
}


class ConversationFields(Protocol):
    """Names the fields of a body that make a chat's prompt."""

    @property
    def messages(self) -> list[MessageParam]: ...
    @property
    def system(self) -> Content | None: ...
    @property
    def tools(self) -> Raw: ...
    @property
    def tool_choice(self) -> ToolChoiceParam | None: ...
    @property
    def thinking(self) -> ThinkingParam | None: ...
    @property
    def output_config(self) -> OutputConfig | None: ...
    @property
    def cache_control(self) -> CacheControl | None: ...


def chat_of(body: ConversationFields, tools: tuple[Tool, ...], tokenizer: ModelTokenizer, ignored: list[str]) -> Chat:
    """Returns the chat, with the `tools` that its prompt shows to the model; what is not honoured is named in
    `ignored`.

    An assistant's message at the end is one to go on with. Raises `InvalidRequest`, and `Unsupported` for content that
    is no text.
    """
    _check_lifetimes(body, ignored)
    said = [*_read(body.messages)]
    if not said:
        raise bad_parameter("messages", "empty", "there must be something in them")
    messages = tuple(_combined([*_system(body.system, ignored), *said]))
    last = messages[-1]
    continues = last.role == "assistant"
    if last.tool_calls:
        rule = "the next message must have a tool_result for each tool_use"
        raise bad_parameter("messages", "ended by a tool_use", rule)
    return Chat(
        messages=messages,
        tools=tools,
        template_variables=_variables(body, tokenizer, bool(tools), ignored),
        add_generation_prompt=not continues,
        continue_final_message=continues,
    )


def tools_of(body: ConversationFields, ignored: list[str]) -> tuple[Tool, ...]:
    """Returns the functions that the model may call.

    Tools that are Anthropic's own (searching the web, say) are left out, and named in `ignored`, as are fields of tools
    that are not honoured. Raises `InvalidRequest`.
    """
    items = decoded("tools", body.tools, list[dict[str, Any]]) or []
    if len(items) > MAX_TOOLS:
        raise bad_parameter("tools", f"a list of {len(items)}", f"at most {MAX_TOOLS} may be")
    found = [tool for place, item in enumerate(items) if (tool := _tool(f"tools[{place}]", item, ignored))]
    if len({tool.name for tool in found}) < len(found):
        raise bad_parameter("tools", "naming a tool twice", "each must have its own name")
    return tuple(found)


def tool_choice_of(choice: ToolChoiceParam | None, tools: Sequence[Tool]) -> ToolChoice:
    """Reads the field `tool_choice`; left out, the field means `AUTO` with tools, `NONE` without.

    Raises `InvalidRequest` for a choice that the tools do not allow.
    """
    if choice is None:
        return ToolChoice(ToolChoiceMode.AUTO if tools else ToolChoiceMode.NONE)
    mode = _MODES.get(choice.type)
    if mode is None:
        raise bad_parameter("tool_choice.type", repr(choice.type[:64]), f"it must be one of {', '.join(_MODES)}")
    if mode in (ToolChoiceMode.REQUIRED, ToolChoiceMode.FUNCTION) and not tools:
        raise bad_parameter("tool_choice", repr(choice.type), "there are no tools to choose from; send some")
    if mode is not ToolChoiceMode.FUNCTION:
        return ToolChoice(mode)
    if choice.name not in {tool.name for tool in tools}:
        raise bad_parameter("tool_choice.name", repr((choice.name or "")[:64]), "it must name one of the tools")
    return ToolChoice(mode, choice.name)


def _tool(place: str, item: dict[str, Any], ignored: list[str]) -> Tool | None:
    kind = item.get("type")
    if kind not in (None, "custom"):
        ignored.append(f"{place}.{str(kind)[:64]}")
        return None
    for key in sorted(item.keys() - _KNOWN_OF_TOOLS):
        if item[key] not in _IDLE_OF_TOOLS.get(key, (None,)):
            ignored.append(f"{place}.{key}")
    name, description, schema = (item.get(key) for key in ("name", "description", "input_schema"))
    if not isinstance(name, str):
        raise bad_parameter(f"{place}.name", "missing or no text", "it must be the tool's name")
    if not isinstance(description, str | None):
        raise bad_parameter(f"{place}.description", "not a text", "it must be one")
    if not isinstance(schema, dict):
        raise bad_parameter(f"{place}.input_schema", "missing or no object", "it must be a JSON schema")
    parameters = msgspec.json.encode(schema).decode()
    return Tool(name, description or "", parameters, strict=item.get("strict") is True)


def _system(system: Content | None, ignored: list[str]) -> Iterator[ChatMessage]:
    if isinstance(system, str):
        yield ChatMessage("system", system)
        return
    texts = []
    for place, block in enumerate(system or ()):
        text = _text_of(f"system[{place}]", block)
        if text.startswith(_BILLING):
            ignored.append(f"system[{place}]")
        else:
            texts.append(text)
    if texts:
        yield ChatMessage("system", "\n".join(texts))


def _read(messages: Iterable[MessageParam]) -> Iterator[ChatMessage]:
    for place, message in enumerate(messages):
        field = f"messages[{place}]"
        blocks = message.content
        if isinstance(blocks, str):
            blocks = [ContentBlock(type="text", text=blocks)]
        match message.role:
            case "user":
                yield from _of_user(f"{field}.content", blocks)
            case "assistant":
                yield _of_assistant(f"{field}.content", blocks)
            case "system":
                texts = (_text_of(f"{field}.content[{n}]", block) for n, block in enumerate(blocks))
                yield ChatMessage("system", "\n".join(texts))
            case _:
                rule = "it must be user, assistant or system"
                raise bad_parameter(f"{field}.role", repr(message.role[:64]), rule)


def _of_user(field: str, blocks: Sequence[ContentBlock]) -> Iterator[ChatMessage]:
    """Yields the results of calls and the texts of a user's message, in their order."""
    for place, block in enumerate(blocks):
        if block.type == "tool_result":
            yield _result(f"{field}[{place}]", block)
        else:
            yield ChatMessage("user", _text_of(f"{field}[{place}]", block))


def _of_assistant(field: str, blocks: Sequence[ContentBlock]) -> ChatMessage:
    texts, thoughts, calls = [], [], []
    for place, block in enumerate(blocks):
        name = f"{field}[{place}]"
        match block.type:
            case "tool_use":
                calls.append(_call(name, block))
            case "thinking":
                thoughts.append(_set(f"{name}.thinking", block.thinking))
            case "redacted_thinking":
                # Nobody here can read it.
                pass
            case _:
                texts.append(_text_of(name, block))
    return ChatMessage("assistant", "\n".join(texts), tool_calls=tuple(calls), reasoning="\n".join(thoughts))


def _call(field: str, block: ContentBlock) -> ToolCall:
    arguments = given(block.input) or b"{}"
    if not arguments.startswith(b"{"):
        raise bad_parameter(f"{field}.input", "no object", "it must be what the tool was called with")
    return ToolCall(block.id or "", _set(f"{field}.name", block.name), arguments.decode())


def _result(field: str, block: ContentBlock) -> ChatMessage:
    content, name = block.content or "", f"{field}.content"
    if not isinstance(content, str):
        content = "\n".join(_text_of(f"{name}[{place}]", each) for place, each in enumerate(content))
    # Templates have no other word for it.
    text = f"Error: {content}" if block.is_error else content
    return ChatMessage("tool", text, tool_call_id=_set(f"{field}.tool_use_id", block.tool_use_id))


def _text_of(field: str, block: ContentBlock) -> str:
    """Returns the text of a block of text, or of a document that is one."""
    if block.type == "text":
        return _set(f"{field}.text", block.text)
    if block.type == "document":
        source = decoded(f"{field}.source", block.source, dict[str, Any]) or {}
        if source.get("type") == "text" and isinstance(text := source.get("data"), str):
            return text
        raise unsupported_field(f"{field}, a document that is no plain text,", "send its text")
    advice = "images cannot be looked at here; leave them out" if block.type == "image" else "only text is known here"
    raise unsupported_field(f"{field} of type {block.type[:64]!r}", advice)


def _set(field: str, text: str | None) -> str:
    if text is None:
        raise bad_parameter(field, "missing", "it must be set")
    return text


def _combined(messages: Iterable[ChatMessage]) -> Iterator[ChatMessage]:
    """Puts neighbours of one role together, for many templates know no two messages of a user in a row."""
    for role, neighbours in groupby(messages, lambda message: message.role):
        if role == "tool":
            yield from neighbours
            continue
        run = list(neighbours)
        yield ChatMessage(
            role,
            "\n".join(message.content for message in run if message.content),
            tool_calls=tuple(call for message in run for call in message.tool_calls),
            reasoning="\n".join(message.reasoning for message in run if message.reasoning),
        )


def _check_lifetimes(body: ConversationFields, ignored: list[str]) -> None:
    """Names the times for which clients want something cached: how long that lasts depends on what else is asked."""
    contents = [body.system, *(message.content for message in body.messages)]
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    marks = [body.cache_control, *(block.cache_control for block in blocks)]
    if any(mark and mark.ttl for mark in marks):
        ignored.append("cache_control.ttl")


def _variables(
    body: ConversationFields, tokenizer: ModelTokenizer, with_tools: bool, ignored: list[str]
) -> dict[str, Any]:
    """Returns the variables of the template that say whether and how much the model is to think."""
    effort = body.output_config.effort if body.output_config else None
    found = readable_variables({}, effort, tokenizer, with_tools, ignored, "output_config.effort")
    if body.thinking:
        switches = tokenizer.template_variables(with_tools) & {*SWITCHES}
        found |= dict.fromkeys(switches, body.thinking.type != "disabled")
    return found
