"""Declares prompts (text, token ids, or a conversation), and writes them into octavo.v1 messages."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.v1 import generation_pb2 as pb


@dataclass(frozen=True)
class ToolCall:
    """A call that an assistant made; `arguments` is a JSON object, or its text."""

    name: str
    arguments: str | Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True)
class Message:
    """`role` is system, developer, user, assistant or tool. Special tokens in `content` are plain text.

    `reasoning` is what an assistant had thought before.
    """

    role: str
    content: str
    name: str = ""
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str = ""
    reasoning: str = ""


@dataclass(frozen=True)
class Tool:
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Chat:
    """A conversation, which the server puts into the model's own format.

    Messages may be mappings with the keys of `Message`, as other clients have them; `content` then may be a list of
    text parts.
    """

    messages: Sequence[Message | Mapping[str, Any]]
    tools: Sequence[Tool] = ()
    template_variables: Mapping[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


@dataclass(frozen=True)
class TextPair:
    """Two texts that a model reads together, as a cross-encoder reads a query and a document."""

    first: str
    second: str


# Text may hold special tokens; a sequence of integers is token ids.
Prompt = str | Sequence[int] | Chat
Prediction = str | Sequence[int]
EmbedInput = str | Sequence[int] | TextPair


def chat_message(chat: Chat) -> pb.ChatPrompt:
    """Makes the message of a chat. Raises `ValueError` for an unusable message, or a part that is no text."""
    variables = chat.template_variables
    return pb.ChatPrompt(
        messages=map(_message, chat.messages),
        tools=map(_tool, chat.tools),
        template_variables_json=json.dumps(dict(variables)) if variables else "",
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
    )


def prediction_message(prediction: Prediction) -> pb.Prediction | None:
    """Makes the message of what an answer is expected to be; None for an empty one."""
    if not prediction:
        return None
    if isinstance(prediction, str):
        return pb.Prediction(text=prediction)
    return pb.Prediction(token_ids=pb.TokenIds(ids=prediction))


def prompt_fields(prompt: Prompt) -> dict[str, Any]:
    """Returns the field of a request that holds the prompt, as a keyword argument."""
    match prompt:
        case str():
            return {"text": prompt}
        case Chat():
            return {"chat": chat_message(prompt)}
    return {"token_ids": pb.TokenIds(ids=prompt)}


def _message(given: Message | Mapping[str, Any]) -> pb.ChatMessage:
    message = given if isinstance(given, Message) else _read_message(given)
    return pb.ChatMessage(
        role=message.role,
        content=message.content,
        name=message.name,
        tool_calls=[
            pb.ToolCall(id=call.id, name=call.name, arguments_json=_json_text(call.arguments))
            for call in message.tool_calls
        ],
        tool_call_id=message.tool_call_id,
        reasoning=message.reasoning,
    )


def _read_message(given: Mapping[str, Any]) -> Message:
    known = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content"}
    if unknown := sorted(given.keys() - known):
        raise ValueError(f"a message has no {unknown[0]!r}; it has {', '.join(sorted(known))}")
    if "role" not in given:
        raise ValueError("a message has no role; give it one, such as 'user'")
    return Message(
        role=given["role"],
        content=_content(given.get("content")),
        name=given.get("name") or "",
        tool_calls=[_read_tool_call(call) for call in given.get("tool_calls") or ()],
        tool_call_id=given.get("tool_call_id") or "",
        reasoning=given.get("reasoning") or given.get("reasoning_content") or "",
    )


def _content(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.get("type") != "text":
            raise ValueError(f"a message's content has a part of type {part.get('type')!r}; only text can be had")
    return "".join(part["text"] for part in content)


def _read_tool_call(given: ToolCall | Mapping[str, Any]) -> ToolCall:
    if isinstance(given, ToolCall):
        return given
    function = given.get("function", given)
    return ToolCall(function["name"], function.get("arguments", "{}"), given.get("id", ""))


def _tool(tool: Tool) -> pb.Tool:
    parameters = json.dumps(dict(tool.parameters)) if tool.parameters is not None else ""
    return pb.Tool(name=tool.name, description=tool.description, parameters_json=parameters)


def _json_text(value: str | Mapping[str, Any]) -> str:
    return value if isinstance(value, str) else json.dumps(dict(value))
