"""Reads the body of POST /v1/responses as a chat and a constraint."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final

from msgspec import Meta, Raw, Struct

from octavo.frontend.api.body import Neutral, Reading, decoded, given, unsupported_field
from octavo.frontend.api.sampling import constraint_of, schema_constraint
from octavo.frontend.api.schemas import MAX_PARTS, Sampling
from octavo.frontend.api.template_variables import readable_variables
from octavo.frontend.errors import bad_parameter
from octavo.frontend.http.connection import MAX_BODY
from octavo.frontend.openai.schemas import CHAT_UNSUPPORTED, ContentPart
from octavo.frontend.request.chat import MAX_MESSAGES, MAX_VARIABLES_BYTES, Chat, ChatMessage, Tool, ToolCall
from octavo.frontend.request.request import Constraint, ConstraintKind
from octavo.frontend.text.tokenizer import ModelTokenizer

_Parts = Annotated[list[ContentPart], Meta(max_length=MAX_PARTS)]


class Item(Struct, frozen=True, kw_only=True):
    """Holds an item of the input: a message, reasoning, a call of a function, or its output.

    Clients may send an answer's back.
    """

    type: str = "message"
    role: str = ""
    content: str | _Parts | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: str | _Parts | None = None
    summary: _Parts | None = None


class Format(Struct, frozen=True, kw_only=True):
    """Says what the answer's text must be. `schema` is JSON text."""

    type: str
    name: str | None = None
    description: str | None = None
    schema: Raw = Raw()
    strict: bool | None = None


class TextOptions(Struct, frozen=True, kw_only=True):
    """Holds the options of the answer's text."""

    format: Format | None = None
    verbosity: str | None = None


class Reasoning(Struct, frozen=True, kw_only=True):
    """Holds the options of reasoning; `effort` is a variable of the chat template."""

    effort: str | None = None
    summary: str | None = None


class ResponsesBody(Sampling, frozen=True, kw_only=True):
    """Holds the body of /v1/responses. `input` is JSON: a text or a list of items."""

    input: Raw
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: Raw = Raw()
    tool_choice: Raw = Raw()
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: Raw = Raw()
    # Where responses are stored.
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Raw = Raw()


RESPONSES_UNSUPPORTED: Final[Neutral] = {
    **CHAT_UNSUPPORTED,
    "prompt": (),
    "top_logprobs": (b"0",),
    # Fields of other routes.
    "n": (b"1",),
    "best_of": (b"1",),
    "max_tokens": (),
    "response_format": (),
    "prompt_logprobs": (),
    "return_token_ids": (b"false",),
    "use_beam_search": (b"false",),
    "length_penalty": (),
    "early_stopping": (),
}
# What else cannot be had where nothing is stored.
NEEDS_STORE: Final[Neutral] = {"previous_response_id": (), "conversation": (), "background": (b"false",)}


_NEEDS_ITEM: Final = "send the item itself, or start the frontend with --response-store, which keeps items"
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def chat_of(
    body: ResponsesBody,
    tools: tuple[Tool, ...],
    tokenizer: ModelTokenizer,
    ignored: list[str],
    earlier: Sequence[Item] = (),
) -> Chat:
    """Returns the conversation, with the items of `earlier` calls before those of this one; fields and items that are
    not honoured are named in `ignored`.

    Raises `InvalidRequest`, and `Unsupported` for items that are no text.
    """
    before = [ChatMessage("system", body.instructions)] if body.instructions else []
    if body.reasoning is not None and body.reasoning.summary is not None:
        ignored.append("reasoning.summary")
    effort = body.reasoning.effort if body.reasoning else None
    given_variables = decoded("chat_template_kwargs", body.chat_template_kwargs, dict[str, Any], MAX_VARIABLES_BYTES)
    variables = readable_variables(given_variables or {}, effort, tokenizer, bool(tools), ignored)
    messages = (*before, *messages_of(earlier, []), *messages_of(_items(body), ignored))
    return Chat(messages, tools, template_variables=variables)


def format_of(body: ResponsesBody, reading: Reading) -> Constraint | None:
    """Returns what the answer's text must match, None for any text. Raises `InvalidRequest`, `Unsupported`."""
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


def messages_of(items: Iterable[Item], ignored: list[str]) -> list[ChatMessage]:
    """Returns items as messages; those that are not honoured are named in `ignored`. Raises `InvalidRequest`, and
    `Unsupported` for items that are no text."""
    messages: list[ChatMessage] = []
    # What the assistant has thought before its next message or call.
    thought = ""
    for place, item in enumerate(items):
        field = f"input[{place}]"
        match item.type:
            case "message":
                text = _text(f"{field}.content", item.content)
                is_assistant = item.role == "assistant"
                messages.append(ChatMessage(item.role, text, reasoning=thought if is_assistant else ""))
                thought = ""
            case "function_call":
                _add_call(messages, ToolCall(item.call_id, item.name, item.arguments or "{}"), thought)
                thought = ""
            case "function_call_output":
                output = _text(f"{field}.output", item.output)
                messages.append(ChatMessage("tool", output, tool_call_id=item.call_id))
            case "reasoning":
                thought = _thought(field, item)
                if not thought:
                    ignored.append(f"{field}.{item.type}")
            case "web_search_call":
                # The searches of another turn.
                ignored.append(f"{field}.{item.type}")
            case "item_reference":
                raise unsupported_field(f"{field} of type {item.type!r}", _NEEDS_ITEM)
            case _:
                known = "messages, reasoning, function calls and their outputs are known here"
                raise unsupported_field(f"{field} of type {item.type[:64]!r}", known)
    return messages


def _thought(field: str, item: Item) -> str:
    """Returns the text of reasoning, or else its summary; empty where there is but an encrypted one of elsewhere."""
    content = item.content or item.summary or ()
    return _text(f"{field}.content", content if isinstance(content, str) else list(content))


def _add_call(messages: list[ChatMessage], call: ToolCall, thought: str) -> None:
    """Adds a call to the message of the assistant before it, or to a new empty message."""
    if not messages or messages[-1].role != "assistant" or thought:
        messages.append(ChatMessage("assistant", "", reasoning=thought))
    messages[-1] = replace(messages[-1], tool_calls=(*messages[-1].tool_calls, call))


def _text(field: str, content: str | list[ContentPart] | None) -> str:
    if content is None:
        raise bad_parameter(field, "missing", "it must be set")
    if isinstance(content, str):
        return content
    return "\n".join(_part(f"{field}[{place}]", part) for place, part in enumerate(content))


def _part(field: str, part: ContentPart) -> str:
    if part.type not in _TEXT_PARTS:
        raise unsupported_field(f"{field} of type {part.type[:64]!r}", "only text is known here")
    if part.text is None:
        raise bad_parameter(f"{field}.text", "missing", "it must be set")
    return part.text


def _of_text(text: TextOptions | None, reading: Reading) -> Constraint | None:
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
