"""Writes a conversation as the text of a prompt, by the model's chat template."""

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec

from octavo.frontend.request.chat import Chat, ChatMessage, Tool, ToolCall
from octavo.frontend.text.control_tokens import ControlTokens, ReservedText
from octavo.frontend.text.tokenizer_files import TokenizerFiles

# The text with which a call begins in an answer; the form is that of Hermes, which many models have seen.
CALL_BEGINS: Final = "<tool_call>"
_HEAD: Final = "You can call functions. Each line describes one, with a JSON schema of its arguments:\n"
_TAIL: Final = (
    "\nTo call one, write this and nothing else, once for each call:\n"
    '<tool_call>\n{"name": "the function\'s name", "arguments": {"argument": "value"}}\n</tool_call>\n'
    "What it gives comes back between <tool_response> and </tool_response>. Where no function helps, just answer."
)


def uses_tools(chat: Chat) -> bool:
    """Tells whether `chat` has functions, calls of functions, or results of calls."""
    return bool(chat.tools) or any(message.tool_calls or message.role == "tool" for message in chat.messages)


def tools_in_text(chat: Chat) -> Chat:
    """Returns `chat` with its functions, calls and results written into the text of its messages.

    Functions go into the first system message, calls into an assistant's, and results of calls into a user's.
    """
    messages = list(_in_text(chat.messages))
    if chat.tools:
        text = _HEAD + "\n".join(map(_described, chat.tools)) + _TAIL
        if messages and messages[0].role in ("system", "developer"):
            messages[0] = replace(messages[0], content=f"{messages[0].content}\n\n{text}")
        else:
            messages.insert(0, ChatMessage("system", text))
    return replace(chat, messages=tuple(messages), tools=())


def without_system(chat: Chat) -> Chat:
    """Returns `chat` with its leading system message put before the text of the first user message.

    Some templates know no system messages.
    """
    system, *others = chat.messages
    if system.role not in ("system", "developer"):
        return chat
    if others and others[0].role == "user":
        others[0] = replace(others[0], content=f"{system.content}\n\n{others[0].content}")
    else:
        others.insert(0, ChatMessage("user", system.content))
    return replace(chat, messages=tuple(others))


def _described(tool: Tool) -> str:
    parameters = msgspec.Raw(tool.parameters_json.encode() or b"{}")
    fields = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return msgspec.json.encode({key: value for key, value in fields.items() if value}).decode()


def _in_text(messages: Iterable[ChatMessage]) -> Iterator[ChatMessage]:
    responses: list[str] = []
    for message in messages:
        if message.role == "tool":
            responses.append(f"<tool_response>\n{message.content}\n</tool_response>")
            continue
        if responses:
            yield ChatMessage("user", "\n".join(responses))
            responses = []
        texts = [message.content] if message.content else []
        texts += map(_call, message.tool_calls)
        yield replace(message, content="\n".join(texts), tool_calls=())
    if responses:
        yield ChatMessage("user", "\n".join(responses))


def _call(call: ToolCall) -> str:
    name = json.dumps(call.name, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {call.arguments_json or "{}"}}}\n</tool_call>'


# A model's chat template: a conversation in, the text of a prompt out. Control tokens in it are the template's own.


# Characters of a rendered chat; more could not fit any context.
MAX_RENDERED: Final = 1 << 24
_MAX_MESSAGE: Final = 500
_NO_PARAMETERS: Final = {"type": "object", "properties": {}}
# Stands at the end of a message that is to be continued, while it is rendered. The space tells whether the template
# trims messages.
_END: Final = "\U000f4243 "
# Words that templates look up or compare in tools: those of JSON schema. Clients cannot make control tokens of them.
_SCHEMA_WORDS: Final = frozenset(
    """
    $defs $ref additionalProperties allOf anyOf array boolean const default definitions description enum examples
    format function integer items maximum minimum name null number object oneOf parameters pattern properties
    required string title type
    """.split()  # noqa: SIM905 (a list of words is read as one)
)
# Variables that have fields of their own in a chat, and functions that templates call.
_RESERVED: Final = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
)


class ChatTemplateError(Exception):
    """The chat cannot be put into the model's format; `str()` says why."""


class ChatTemplate:
    """Runs the chat templates of a model directory in a sandbox. Threads may share one object."""

    def __init__(self, files: TokenizerFiles, control_tokens: ControlTokens) -> None:
        self._files = files
        self._guard = control_tokens.guard
        self._environment = _environment()
        self._compiled: dict[str, tuple[jinja2.Template, frozenset[str]]] = {}

    def render(self, chat: Chat) -> str:
        """Returns the prompt's text, with a break in every control token that is not the template's own.

        `ControlTokens` says what a break is. Raises `ChatTemplateError`.
        """
        try:
            return self._render(chat)
        except ReservedText as error:
            raise ChatTemplateError(str(error)) from error
        except (ValueError, TypeError, ArithmeticError, LookupError, jinja2.TemplateError) as error:
            raise ChatTemplateError(str(error)[:_MAX_MESSAGE]) from error
        except RecursionError as error:
            raise ChatTemplateError("a JSON value is nested too deeply; flatten it") from error

    def variables(self, with_tools: bool) -> frozenset[str]:
        """Returns the variables that a client may set in the template for chats with or without tools.

        A template that cannot be read has none; rendering says what is wrong with the template.
        """
        try:
            return self._compile(with_tools)[1]
        except (ChatTemplateError, jinja2.TemplateError, RecursionError):
            return frozenset()

    @functools.cached_property
    def reads_tools(self) -> bool:
        """Tells whether the template for chats with tools reads them; False where there is no template."""
        try:
            return "tools" in jinja2.meta.find_undeclared_variables(self._environment.parse(self._source(True)))
        except (jinja2.TemplateError, RecursionError):
            return False

    def _render(self, chat: Chat) -> str:
        if self.reads_tools or not uses_tools(chat) or not self._files.chat_template:
            return self._filled(chat)
        _check_json(chat)
        plain = tools_in_text(chat)
        try:
            return self._filled(plain)
        except jinja2.TemplateError:
            if plain.messages[0] == chat.messages[0]:
                raise
            # A template may know no system.
            return self._filled(without_system(plain))

    def _filled(self, chat: Chat) -> str:
        template, settable = self._compile(bool(chat.tools))
        _check_variables(chat.template_variables, settable)
        messages = [self._message(message) for message in chat.messages]
        if "developer" not in self._source(bool(chat.tools)):
            _rename_developer(messages)
        if chat.continue_final_message:
            _mark_end(chat, messages)
        rendered = _joined(
            template.generate(
                **self._files.special_tokens,
                **{name: self._guarded(value) for name, value in chat.template_variables.items()},
                messages=messages,
                tools=[self._tool(tool) for tool in chat.tools] or None,
                documents=None,
                add_generation_prompt=chat.add_generation_prompt,
            )
        )
        return _up_to_end(rendered) if chat.continue_final_message else rendered

    def _source(self, with_tools: bool) -> str:
        return self._files.tool_template if with_tools else self._files.chat_template

    def _compile(self, with_tools: bool) -> tuple[jinja2.Template, frozenset[str]]:
        """Returns a template, and the variables that it reads and that only a client may set."""
        source = self._source(with_tools)
        if not source:
            raise ChatTemplateError("the model's directory has no chat_template; send the prompt as text")
        if source not in self._compiled:
            names = jinja2.meta.find_undeclared_variables(self._environment.parse(source))
            settable = frozenset(names) - _RESERVED - self._files.special_tokens.keys()
            self._compiled[source] = self._environment.from_string(source), settable
        return self._compiled[source]

    def _message(self, message: ChatMessage) -> dict[str, Any]:
        found: dict[str, Any] = {"role": message.role, "content": self._guard(message.content)}
        if message.name:
            found["name"] = self._guard(message.name)
        if message.reasoning:
            found.update(self._reasoning(message))
        if message.tool_calls:
            found["tool_calls"] = [self._tool_call(call) for call in message.tool_calls]
        if message.tool_call_id:
            found["tool_call_id"] = self._guard(message.tool_call_id)
        return found

    def _reasoning(self, message: ChatMessage) -> dict[str, str]:
        """Returns what an assistant has thought, under each of the names by which templates read it."""
        text = self._guard(message.reasoning)
        found = {"reasoning": text, "reasoning_content": text}
        # gpt-oss's template refuses a message with a call that has thinking and content.
        return found if message.content and message.tool_calls else {**found, "thinking": text}

    def _tool_call(self, call: ToolCall) -> dict[str, Any]:
        arguments = _json_object(call.arguments_json, f"the arguments of the tool call {call.name[:64]!r}")
        function = {"name": self._guard(call.name), "arguments": self._guarded(arguments)}
        return {"id": self._guard(call.id), "type": "function", "function": function}

    def _tool(self, tool: Tool) -> dict[str, Any]:
        what = f"the parameters of the tool {tool.name[:64]!r}"
        parameters = _json_object(tool.parameters_json, what) if tool.parameters_json else _NO_PARAMETERS
        description = {"description": self._guard(tool.description)} if tool.description else {}
        function = {"name": self._guard(tool.name), **description, "parameters": self._guarded(parameters)}
        return {"type": "function", "function": function}

    def _guarded(self, value: object) -> object:
        match value:
            case str():
                return value if value in _SCHEMA_WORDS else self._guard(value)
            case Mapping():
                return {self._guarded(key): self._guarded(item) for key, item in value.items()}
            case list() | tuple():
                return [self._guarded(item) for item in value]
        return value


class _Generation(jinja2.ext.Extension):
    """A tag that marks what an assistant says, for training; it adds nothing."""

    tags = {"generation"}  # noqa: RUF012 (so the base class declares it)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Returns only the nodes inside the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    """Returns the Jinja environment of the transformers library, for which chat templates are written."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Writes JSON as it is, where Jinja's own filter escapes characters for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _check_variables(variables: Iterable[str], settable: frozenset[str]) -> None:
    if unknown := sorted(set(variables) - settable):
        has = ", ".join(sorted(settable)) or "none"
        raise ChatTemplateError(f"{unknown[0][:64]!r} is no variable of it that may be set; it has {has}")


def _check_json(chat: Chat) -> None:
    """Raises `ChatTemplateError` for parameters or arguments that are no JSON object, as a template would need them."""
    for tool in chat.tools:
        if tool.parameters_json:
            _json_object(tool.parameters_json, f"the parameters of the tool {tool.name[:64]!r}")
    for call in (call for message in chat.messages for call in message.tool_calls):
        _json_object(call.arguments_json, f"the arguments of the tool call {call.name[:64]!r}")


def _rename_developer(messages: list[dict[str, Any]]) -> None:
    """Gives the role "developer" the older name "system", by which most templates know it."""
    for message in messages:
        if message["role"] == "developer":
            message["role"] = "system"


def _mark_end(chat: Chat, messages: list[dict[str, Any]]) -> None:
    if chat.add_generation_prompt or chat.messages[-1].role != "assistant":
        raise ChatTemplateError(
            "continue_final_message needs an assistant's message at the end, and add_generation_prompt off"
        )
    messages[-1]["content"] += _END


def _up_to_end(rendered: str) -> str:
    end = rendered.rfind(_END.strip())
    if end < 0:
        raise ChatTemplateError("it does not end with the last message as it is, so that cannot be continued")
    return rendered[:end] if rendered.startswith(_END, end) else rendered[:end].rstrip()


def _joined(pieces: Iterable[str]) -> str:
    """Joins `pieces`. Raises `ChatTemplateError` for a template that makes more than `MAX_RENDERED` characters."""
    found, size = [], 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_RENDERED:
            raise ChatTemplateError(f"it makes more than {MAX_RENDERED} characters of this chat; shorten the chat")
        found.append(piece)
    return "".join(found)


def _json_object(text: str, what: str) -> dict[str, object]:
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError):
        found = None
    if not isinstance(found, dict):
        raise ChatTemplateError(f"{what} are not a JSON object")
    return found
