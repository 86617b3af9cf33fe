"""From the body of /v1/responses to what is generated."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from octavo.frontend.chat import Chat, ChatMessage, Tool, ToolCall
from octavo.frontend.chat_form import MAX_MESSAGES
from octavo.frontend.constraint import Constraint, ConstraintKind
from octavo.frontend.errors import bad_parameter
from octavo.frontend.openai.connection import MAX_BODY
from octavo.frontend.openai.fields import decoded, given, unsupported_field
from octavo.frontend.openai.messages import readable_variables
from octavo.frontend.openai.reading import Reading
from octavo.frontend.openai.responses_schemas import Format, Item, ResponsesBody, Text
from octavo.frontend.openai.schemas import Part
from octavo.frontend.openai.structured import constraint_of, schema_constraint
from octavo.frontend.tokenizer import ModelTokenizer

_TEXT_PARTS = ("input_text", "output_text", "text")


def chat_of(body: ResponsesBody, tools: tuple[Tool, ...], tokenizer: ModelTokenizer, ignored: list[str]) -> Chat:
    """The conversation; what of it is not honoured is named in `ignored`. Raises `InvalidRequest`, and `Unsupported`
    for items that are no text."""
    before = [ChatMessage("system", body.instructions)] if body.instructions else []
    wanted: dict[str, Any] = {}
    if body.reasoning is not None:
        if body.reasoning.summary is not None:
            ignored.append("reasoning.summary")
        if body.reasoning.effort is not None:
            wanted["reasoning_effort"] = body.reasoning.effort
    variables = readable_variables(wanted, tokenizer, bool(tools), ignored)
    return Chat((*before, *_messages(_items(body), ignored)), tools, template_variables=variables)


def format_of(body: ResponsesBody, reading: Reading) -> Constraint | None:
    """What the answer's text must match. Raises `InvalidRequest`, `Unsupported`."""
    asked, form = constraint_of(body, reading), _of_text(body.text, reading)
    if asked and form:
        raise bad_parameter("text.format", "one constraint too many", "structured_outputs excludes it; leave one out")
    return asked or form


def _items(body: ResponsesBody) -> list[Item]:
    text = given(body.input)
    if text.startswith(b'"'):
        return [Item(role="user", content=decoded("input", body.input, str, MAX_BODY))]
    items = decoded("input", body.input, list[Item], MAX_BODY) or []
    if not 1 <= len(items) <= MAX_MESSAGES:
        raise bad_parameter("input", f"a list of {len(items)}", f"it may hold 1 to {MAX_MESSAGES} items")
    return items


def _messages(items: Iterable[Item], ignored: list[str]) -> list[ChatMessage]:
    messages: list[ChatMessage] = []
    for place, item in enumerate(items):
        field = f"input[{place}]"
        match item.type:
            case "message":
                messages.append(ChatMessage(item.role, _text(f"{field}.content", item.content)))
            case "function_call":
                _add_call(messages, ToolCall(item.call_id, item.name, item.arguments or "{}"))
            case "function_call_output":
                output = _text(f"{field}.output", item.output)
                messages.append(ChatMessage("tool", output, tool_call_id=item.call_id))
            case "reasoning" | "web_search_call":
                # What another turn thought, or looked up, on its way to what it said.
                ignored.append(f"{field}.{item.type}")
            case _:
                known = "messages, function calls and their outputs are known here"
                raise unsupported_field(f"{field} of type {item.type[:64]!r}", known)
    return messages


def _add_call(messages: list[ChatMessage], call: ToolCall) -> None:
    """An assistant's calls belong to what it said before them."""
    if not messages or messages[-1].role != "assistant":
        messages.append(ChatMessage("assistant", ""))
    messages[-1] = replace(messages[-1], tool_calls=(*messages[-1].tool_calls, call))


def _text(field: str, content: str | list[Part] | None) -> str:
    if content is None:
        raise bad_parameter(field, "missing", "it must be set")
    if isinstance(content, str):
        return content
    return "\n".join(_part(f"{field}[{place}]", part) for place, part in enumerate(content))


def _part(field: str, part: Part) -> str:
    if part.type not in _TEXT_PARTS:
        raise unsupported_field(f"{field} of type {part.type[:64]!r}", "only text is known here")
    if part.text is None:
        raise bad_parameter(f"{field}.text", "missing", "it must be set")
    return part.text


def _of_text(text: Text | None, reading: Reading) -> Constraint | None:
    if text is None:
        return None
    if text.verbosity not in (None, "medium"):
        reading.ignored.append("text.verbosity")
    match text.format:
        case None | Format(type="text"):
            return None
        case Format(type="json_object"):
            return Constraint(ConstraintKind.JSON_OBJECT)
        case Format(type="json_schema") as form:
            if not given(form.schema):
                raise bad_parameter("text.format.schema", "missing", "json_schema needs one")
            return schema_constraint("text.format.schema", form.schema, reading, strict=bool(form.strict))
        case form:
            raise unsupported_field(f"text.format of type {form.type[:64]!r}", "use text, json_object or json_schema")
