"""Reads the messages of a chat, as OpenAI's clients write them."""

from typing import Any, Protocol

from msgspec import Raw

from octavo.frontend.api.body import decoded, given, unsupported_field
from octavo.frontend.api.template_variables import readable_variables
from octavo.frontend.api.tool_calls import read_tools
from octavo.frontend.errors import bad_parameter
from octavo.frontend.openai.schemas import ContentPart, MessageBody, PredictionBody, ToolCallBody
from octavo.frontend.request.chat import MAX_VARIABLES_BYTES, Chat, ChatMessage, Tool, ToolCall
from octavo.frontend.text.tokenizer import ModelTokenizer


class ChatFields(Protocol):
    """Names the fields of a body that make a chat's prompt."""

    @property
    def messages(self) -> list[MessageBody]: ...
    @property
    def tools(self) -> Raw: ...
    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def continue_final_message(self) -> bool | None: ...
    @property
    def chat_template_kwargs(self) -> Raw: ...
    @property
    def reasoning_effort(self) -> str | None: ...


def chat_of(body: ChatFields, tools: tuple[Tool, ...], tokenizer: ModelTokenizer, ignored: list[str]) -> Chat:
    """Returns the chat, with the `tools` that its prompt shows to the model.

    Variables that the model's template does not read are left out, and named in `ignored`. Raises `InvalidRequest`, and
    `Unsupported` for content that is no text.
    """
    continues = bool(body.continue_final_message)
    return Chat(
        messages=tuple(_message(place, message) for place, message in enumerate(body.messages)),
        tools=tools,
        template_variables=readable_variables(_variables(body), body.reasoning_effort, tokenizer, bool(tools), ignored),
        add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continues,
    )


def prediction_of(body: PredictionBody | None) -> str:
    """Returns the text that the answer is expected to be, empty for none; its parts are put together as they are.

    Raises `InvalidRequest`, and `Unsupported` for a kind of prediction that is not known, or content that is no text.
    """
    if body is None:
        return ""
    if body.type != "content":
        raise unsupported_field(f"prediction of type {body.type[:64]!r}", "only content is known here")
    if isinstance(body.content, str):
        return body.content
    return "".join(_part(f"prediction.content[{place}]", part) for place, part in enumerate(body.content))


def tools_of(body: ChatFields, ignored: list[str]) -> tuple[Tool, ...]:
    """Returns the functions that the model may call; see `read_tools`. Raises `InvalidRequest`."""
    return read_tools(decoded("tools", body.tools, object), ignored).functions


def _variables(body: ChatFields) -> dict[str, Any]:
    return decoded("chat_template_kwargs", body.chat_template_kwargs, dict[str, Any], MAX_VARIABLES_BYTES) or {}


def _message(place: int, message: MessageBody) -> ChatMessage:
    field = f"messages[{place}]"
    for name in ("audio", "function_call"):
        if given(getattr(message, name)):
            raise unsupported_field(f"{field}.{name}")
    _check_content(field, message)
    return ChatMessage(
        role=message.role,
        content=_text(field, message),
        name=message.name or "",
        tool_calls=tuple(_tool_call(f"{field}.tool_calls", call) for call in message.tool_calls or ()),
        tool_call_id=message.tool_call_id or "",
        reasoning=message.reasoning or message.reasoning_content or "",
    )


def _check_content(field: str, message: MessageBody) -> None:
    is_assistant = message.role == "assistant"
    if message.tool_calls and not is_assistant:
        raise bad_parameter(
            f"{field}.tool_calls", f"of the role {message.role[:64]!r}", "only an assistant calls tools"
        )
    if message.content is None and not (is_assistant and (message.tool_calls or message.refusal)):
        raise bad_parameter(f"{field}.content", "missing", "only an assistant's that calls tools may be left out")


def _text(field: str, message: MessageBody) -> str:
    if isinstance(message.content, list):
        parts = (_part(f"{field}.content[{place}]", part) for place, part in enumerate(message.content))
        return "\n".join(parts)
    return message.content or message.refusal or ""


def _part(field: str, part: ContentPart) -> str:
    if part.type != "text":
        raise unsupported_field(f"{field} of type {part.type[:64]!r}", "only text is known here")
    if part.text is None:
        raise bad_parameter(f"{field}.text", "missing", "it must be set")
    return part.text


def _tool_call(field: str, call: ToolCallBody) -> ToolCall:
    if call.type != "function":
        raise unsupported_field(f"{field} of type {call.type[:64]!r}", "only functions are known here")
    return ToolCall(call.id, call.function.name, call.function.arguments or "{}")
