"""Declares a conversation as clients send it, and checks what needs neither the model nor its chat template."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from octavo.frontend.errors import bad_parameter


@dataclass(frozen=True)
class ToolCall:
    """Holds a call of a function that an assistant made. `arguments_json` is the text of a JSON object."""

    id: str
    name: str
    arguments_json: str


@dataclass(frozen=True)
class ChatMessage:
    """Holds one message of a conversation. All of its fields but `role` are plain text.

    `role` must be one of `ROLES`, for chat templates build control tokens from the role. An assistant's message may
    have `tool_calls`, and the `reasoning` that came before them, a tool's answer a `tool_call_id`.
    """

    role: str
    content: str
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. `parameters_json` is the JSON schema of its arguments, or empty.

    `strict` refuses a schema that no grammar can enforce in full.
    """

    name: str
    description: str = ""
    parameters_json: str = ""
    strict: bool = False


@dataclass(frozen=True)
class Chat:
    """A conversation that the model's chat template turns into a prompt.

    With `add_generation_prompt` the prompt ends where the assistant is to begin. With `continue_final_message` the
    prompt ends within the last message, which must be an assistant's. `template_variables` are further variables of
    the template, by name.
    """

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    template_variables: Mapping[str, object] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of all text that the client has written; a lower bound if a variable is no text."""
        return sum(len(text.encode("utf-8", "replace")) for text in self._texts())

    def _texts(self) -> Iterator[str]:
        for message in self.messages:
            yield from (message.content, message.name, message.tool_call_id, message.reasoning)
            for call in message.tool_calls:
                yield from (call.id, call.name, call.arguments_json)
        for tool in self.tools:
            yield from (tool.name, tool.description, tool.parameters_json)
        yield from map(str, self.template_variables.values())


MAX_MESSAGES: Final = 4096
# The longest JSON text of a template's further variables.
MAX_VARIABLES_BYTES: Final = 1 << 14
MAX_TOOLS: Final = 128
# The most calls in one message.
MAX_TOOL_CALLS: Final = 128
# The longest JSON text of a tool's parameters, or of a call's arguments.
MAX_JSON_BYTES: Final = 65536
MAX_NAME_LENGTH: Final = 256
# Templates build control tokens from roles, so no other role is accepted.
ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_TOOL_NAME: Final = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


def check_chat(chat: Chat) -> None:
    """Raises `InvalidRequest` for a role, a label, a tool or a call that breaks a rule, or for too many of them."""
    check_count("chat.tools", len(chat.tools), MAX_TOOLS)
    for message in chat.messages:
        _check_message(message)
    for tool in chat.tools:
        _check_tool(tool)


def check_count(field: str, count: int, most: int) -> None:
    """Raises `InvalidRequest` for a field that is repeated more often than `most` times."""
    if count > most:
        raise bad_parameter(field, f"repeated {count} times", f"at most {most} may be")


def check_label(field: str, text: str, most: int) -> None:
    """Raises `InvalidRequest` for a `text` of more than `most` characters, or with one that cannot be printed."""
    if len(text) > most or not text.isprintable():
        raise bad_parameter(field, f"{len(text)} characters", f"it may hold at most {most} printable ones")


def check_bytes(field: str, text: str, most: int) -> None:
    """Raises `InvalidRequest` for a text of more than `most` bytes."""
    # A character has four bytes at most, so most texts need not be encoded.
    if 4 * len(text) > most and (size := len(text.encode(errors="surrogatepass"))) > most:
        raise bad_parameter(field, f"{size} bytes long", f"at most {most} are taken; shorten it")


def _check_message(message: ChatMessage) -> None:
    if message.role not in ROLES:
        raise bad_parameter("chat.messages.role", repr(message.role[:64]), f"it must be one of {', '.join(ROLES)}")
    check_label("chat.messages.name", message.name, MAX_NAME_LENGTH)
    check_label("chat.messages.tool_call_id", message.tool_call_id, MAX_NAME_LENGTH)
    if message.tool_call_id and message.role != "tool":
        raise bad_parameter("chat.messages.tool_call_id", f"of the role {message.role!r}", "only a tool answers a call")
    if message.tool_calls:
        _check_calls(message)


def _check_calls(message: ChatMessage) -> None:
    if message.role != "assistant":
        raise bad_parameter(
            "chat.messages.tool_calls", f"of the role {message.role!r}", "only an assistant calls tools"
        )
    check_count("chat.messages.tool_calls", len(message.tool_calls), MAX_TOOL_CALLS)
    for call in message.tool_calls:
        check_label("chat.messages.tool_calls.id", call.id, MAX_NAME_LENGTH)
        check_label("chat.messages.tool_calls.name", call.name, MAX_NAME_LENGTH)
        check_bytes("chat.messages.tool_calls.arguments_json", call.arguments_json, MAX_JSON_BYTES)


def _check_tool(tool: Tool) -> None:
    if not _TOOL_NAME.fullmatch(tool.name):
        rule = "it must have 1 to 128 of the characters A-Z a-z 0-9 _ . : / -"
        raise bad_parameter("chat.tools.name", ascii(tool.name[:64]), rule)
    check_bytes("chat.tools.parameters_json", tool.parameters_json, MAX_JSON_BYTES)
