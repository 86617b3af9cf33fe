"""Holds the bodies of Anthropic's API as structs. None means "left out" everywhere."""

from typing import Annotated, Final

from msgspec import Meta, Raw

from octavo.frontend.api.body import Neutral
from octavo.frontend.api.schemas import MAX_PARTS, BodyStruct, Sampling
from octavo.frontend.request.chat import MAX_MESSAGES


class CacheControl(BodyStruct, frozen=True, kw_only=True):
    """Marks the end of a beginning that is to be cached, which happens here anyway. `ttl` says for how long."""

    type: str = "ephemeral"
    ttl: str | None = None


class ContentBlock(BodyStruct, frozen=True, kw_only=True):
    """Holds a block of a message's content: which fields it has, `type` says.

    `input` is JSON text, what a tool is called with; `content` is what came of a call.
    """

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Raw = Raw()
    tool_use_id: str | None = None
    content: "Content | None" = None
    is_error: bool | None = None
    source: Raw = Raw()
    cache_control: CacheControl | None = None


Content = str | Annotated[list[ContentBlock], Meta(max_length=MAX_PARTS)]


class MessageParam(BodyStruct, frozen=True, kw_only=True):
    """Holds one message of a conversation."""

    role: str
    content: Content


class ToolChoiceParam(BodyStruct, frozen=True, kw_only=True):
    """Holds the choice among tools."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingParam(BodyStruct, frozen=True, kw_only=True):
    """Says whether the model is to think, with how many tokens, and whether the client is shown what it thinks."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(BodyStruct, frozen=True, kw_only=True):
    """Says what the answer's text must be. `schema` is JSON text."""

    type: str
    schema: Raw = Raw()


class OutputConfig(BodyStruct, frozen=True, kw_only=True):
    """Holds the options of the answer; `effort` is a variable of the chat template."""

    effort: str | None = None
    format: OutputFormat | None = None


_Messages = Annotated[list[MessageParam], Meta(max_length=MAX_MESSAGES)]


class MessagesBody(Sampling, frozen=True, kw_only=True):
    """Holds the body of /v1/messages."""

    messages: _Messages
    max_tokens: int
    system: Content | None = None
    tools: Raw = Raw()
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingParam | None = None
    output_config: OutputConfig | None = None
    stop_sequences: Annotated[list[str], Meta(max_length=64)] | None = None
    cache_control: CacheControl | None = None


class CountTokensBody(BodyStruct, frozen=True, kw_only=True):
    """Holds the body of /v1/messages/count_tokens."""

    messages: _Messages
    model: str | None = None
    system: Content | None = None
    tools: Raw = Raw()
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingParam | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None


COUNT_UNSUPPORTED: Final[Neutral] = {
    # Others' computers would do it.
    "container": (),
    "mcp_servers": (b"[]",),
    # Conversations are not kept: clients send the whole of one with every call.
    "thread": (),
}
MESSAGES_UNSUPPORTED: Final[Neutral] = {
    **COUNT_UNSUPPORTED,
    # Fields of other routes.
    "n": (b"1",),
    "best_of": (b"1",),
    "stop": (),
    "stream_options": (),
    "response_format": (),
    "prompt_logprobs": (),
    "return_token_ids": (b"false",),
    "use_beam_search": (b"false",),
    "length_penalty": (),
    "early_stopping": (),
}
