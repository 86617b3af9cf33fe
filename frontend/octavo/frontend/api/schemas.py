"""What bodies of all HTTP APIs have in common, as structs: sampling fields, of OpenAI's clients and vLLM's users.

None means "left out" everywhere.
"""

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Raw

MAX_PARTS: Final = 1024
FewIds = Annotated[list[int], Meta(max_length=1024)]


class BodyStruct(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Sets what all bodies and their parts have in common: they are immutable, and made by field names."""


class StreamOptions(BodyStruct, frozen=True, kw_only=True):
    """Says how a stream reports its usage."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(BodyStruct, frozen=True, kw_only=True):
    """Wraps a schema as OpenAI does. `schema` is JSON text."""

    name: str = ""
    description: str | None = None
    schema: Raw = Raw()
    strict: bool | None = None


class ResponseFormat(BodyStruct, frozen=True, kw_only=True):
    """Asks for structured output as OpenAI does."""

    type: str
    json_schema: JsonSchema | None = None


class StructuredOutputs(BodyStruct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Asks for structured output as vLLM does. `json` is a schema, or the text of one."""

    json: Raw = Raw()
    regex: str | None = None
    choice: Annotated[list[str], Meta(max_length=1024)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Sampling(BodyStruct, frozen=True, kw_only=True):
    """Holds the fields that all bodies have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Meta(max_length=64)] | None = None
    logit_bias: Annotated[dict[int, float], Meta(max_length=1024)] | None = None
    response_format: ResponseFormat | None = None
    # vLLM's fields.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: FewIds | None = None
    allowed_token_ids: FewIds | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Raw = Raw()
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Meta(max_length=1024)] | None = None
    guided_grammar: str | None = None
    # Octavo's fields: seconds in all and in the queue, and the name of a pinned prefix.
    timeout: float | None = None
    max_queue_time: float | None = None
    pinned_prefix: str | None = None
    # The most tokens to think with: Octavo's name, vLLM's and Qwen's.
    max_reasoning_tokens: int | None = None
    thinking_token_budget: int | None = None
    thinking_budget: int | None = None
    # These fields say nothing about the answer.
    user: Raw = Raw()
    metadata: Raw = Raw()
    safety_identifier: Raw = Raw()
    prompt_cache_key: Raw = Raw()
    prompt_cache_retention: Raw = Raw()
