"""Tells a model of functions in plain text, where its chat template says nothing of them."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

import msgspec

from octavo.frontend.request.chat import Chat, ChatMessage, Tool, ToolCall

# What a call begins with in an answer; the form is that of Hermes, which many models have seen.
CALL_BEGINS: Final = "<tool_call>"
_HEAD: Final = "You can call functions. Each line describes one, with a JSON schema of its arguments:\n"
_TAIL: Final = (
    "\nTo call one, write this and nothing else, once for each call:\n"
    '<tool_call>\n{"name": "the function\'s name", "arguments": {"argument": "value"}}\n</tool_call>\n'
    "What it gives comes back between <tool_response> and </tool_response>. Where no function helps, just answer."
)


def uses_tools(chat: Chat) -> bool:
    """Whether a chat has functions, calls of them, or what came of these."""
    return bool(chat.tools) or any(message.tool_calls or message.role == "tool" for message in chat.messages)


def tools_in_text(chat: Chat) -> Chat:
    """Returns the same chat without any of that but in the text of its messages: functions in the first system message,
    calls in an assistant's, and what came of them in a user's."""
    messages = list(_in_text(chat.messages))
    if chat.tools:
        text = _HEAD + "\n".join(map(_described, chat.tools)) + _TAIL
        if messages and messages[0].role in ("system", "developer"):
            messages[0] = replace(messages[0], content=f"{messages[0].content}\n\n{text}")
        else:
            messages.insert(0, ChatMessage("system", text))
    return replace(chat, messages=tuple(messages), tools=())


def without_system(chat: Chat) -> Chat:
    """Returns a chat whose first message, a system's, is the beginning of the user's behind it: some templates know no
    other."""
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
