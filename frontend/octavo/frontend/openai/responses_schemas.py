"""The body of /v1/responses. What sampling has in common with the other routes is theirs."""

from typing import Annotated, Final

from msgspec import Meta, Raw, Struct

from octavo.frontend.openai.fields import Neutral
from octavo.frontend.openai.schemas import CHAT_UNSUPPORTED, MAX_PARTS, Part, Sampling

_Parts = Annotated[list[Part], Meta(max_length=MAX_PARTS)]


class Item(Struct, frozen=True, kw_only=True):
    """One of the input: a message, a function's call, or what came of that. Items of an answer may be sent back."""

    type: str = "message"
    role: str = ""
    content: str | _Parts | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: str | _Parts | None = None


class Format(Struct, frozen=True, kw_only=True):
    """What the answer's text must be. `schema` is JSON text."""

    type: str
    name: str | None = None
    description: str | None = None
    schema: Raw = Raw()
    strict: bool | None = None


class Text(Struct, frozen=True, kw_only=True):
    """About the answer's text."""

    format: Format | None = None
    verbosity: str | None = None


class Reasoning(Struct, frozen=True, kw_only=True):
    """`effort` is a variable of the chat template."""

    effort: str | None = None
    summary: str | None = None


class ResponsesBody(Sampling, frozen=True, kw_only=True):
    """Of /v1/responses. `input` is a text or a list of items."""

    input: Raw
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: Raw = Raw()
    tool_choice: Raw = Raw()
    parallel_tool_calls: bool | None = None
    text: Text | None = None
    reasoning: Reasoning | None = None


RESPONSES_UNSUPPORTED: Final[Neutral] = {
    **CHAT_UNSUPPORTED,
    # Answers are not kept.
    "previous_response_id": (),
    "conversation": (),
    "background": (b"false",),
    "prompt": (),
    "top_logprobs": (b"0",),
    # What other routes have.
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
