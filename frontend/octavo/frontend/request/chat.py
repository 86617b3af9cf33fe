"""A conversation as clients send it, and the checks that need neither the model nor its template."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from octavo.frontend.errors import bad_parameter


@dataclass(frozen=True)
class ToolCall:
    """A function that an assistant called; `arguments_json` is the text of a JSON object."""

    id: str
    name: str
    arguments_json: str


@dataclass(frozen=True)
class ChatMessage:
    """`role` must come from a fixed list, for templates build control tokens from it; everything else is plain text.

    `tool_calls` are an assistant's, `tool_call_id` is of a tool's answer.
    """

    role: str
    content: str
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""


@dataclass(frozen=True)
class Tool:
    """A function that the model may call; `parameters_json` is the JSON schema of its arguments, or empty. `strict`:
    arguments that cannot be held to all of it are refused."""

    name: str
    description: str = ""
    parameters_json: str = ""
    strict: bool = False


@dataclass(frozen=True)
class Chat:
    """What a chat template turns into a prompt.

    The prompt ends where the assistant is to begin, with `add_generation_prompt`; or, with `continue_final_message`, in
    the midst of the last message, which then is an assistant's. `template_variables` are further ones of the template.
    """

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    template_variables: Mapping[str, object] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def num_bytes(self) -> int:
        """Of all the text that the client has written; a lower bound where variables are other than texts."""
        return sum(len(text.encode("utf-8", "replace")) for text in self._texts())

    def _texts(self) -> Iterator[str]:
        for message in self.messages:
            yield from (message.content, message.name, message.tool_call_id)
            for call in message.tool_calls:
                yield from (call.id, call.name, call.arguments_json)
        for tool in self.tools:
            yield from (tool.name, tool.description, tool.parameters_json)
        yield from map(str, self.template_variables.values())


# Checks a chat against the rules that need neither the model nor its template.


MAX_MESSAGES: Final = 4096
# Of the JSON text of a template's further variables.
MAX_VARIABLES_BYTES: Final = 1 << 14
MAX_TOOLS: Final = 128
# Of one message.
MAX_TOOL_CALLS: Final = 128
# Of the JSON text of a tool's parameters, or of a call's arguments.
MAX_JSON_BYTES: Final = 65536
MAX_NAME_LENGTH: Final = 256
# Templates build control tokens from roles, so only these are let through.
ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_TOOL_NAME: Final = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


def check_chat(chat: Chat) -> None:
    """Raises `InvalidRequest`."""
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
    """Raises `InvalidRequest` for more than `most` characters, or one that cannot be printed."""
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
