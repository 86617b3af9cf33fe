"""Declares the bodies of requests, as OpenAI's clients and vLLM's users send them. None means "left out" everywhere."""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Raw

from octavo.frontend.openai.body import Neutral
from octavo.frontend.request.chat import MAX_MESSAGES, MAX_TOOL_CALLS

MAX_PARTS: Final = 1024
# More cannot fit in any context; checked before anything walks over them.
_MAX_IDS: Final = 1 << 21

Ids = Annotated[list[int], Meta(max_length=_MAX_IDS)]
FewIds = Annotated[list[int], Meta(max_length=1024)]


class _Body(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Sets what all bodies and their parts have in common: they are immutable, and made by field names."""


class StreamOptions(_Body, frozen=True, kw_only=True):
    """Says how a stream reports its usage."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(_Body, frozen=True, kw_only=True):
    """Wraps a schema as OpenAI does. `schema` is JSON text."""

    name: str = ""
    description: str | None = None
    schema: Raw = Raw()
    strict: bool | None = None


class ResponseFormat(_Body, frozen=True, kw_only=True):
    """Asks for structured output as OpenAI does."""

    type: str
    json_schema: JsonSchema | None = None


class StructuredOutputs(_Body, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Asks for structured output as vLLM does. `json` is a schema, or the text of one."""

    json: Raw = Raw()
    regex: str | None = None
    choice: Annotated[list[str], Meta(max_length=1024)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Sampling(_Body, frozen=True, kw_only=True):
    """Holds the fields that completions, chats and responses have in common."""

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
    # These fields say nothing about the answer.
    user: Raw = Raw()
    metadata: Raw = Raw()
    safety_identifier: Raw = Raw()
    prompt_cache_key: Raw = Raw()
    prompt_cache_retention: Raw = Raw()


class CompletionBody(Sampling, frozen=True, kw_only=True):
    """Holds the body of /v1/completions."""

    prompt: Raw
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None


class PoolingBody(_Body, frozen=True, kw_only=True):
    """Holds what the bodies of all calls have in common that ask for an output of the model in place of text."""

    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    request_id: str = ""
    cache_salt: str | None = None
    max_queue_time: float | None = None
    timeout: float | None = None


class EmbeddingBody(PoolingBody, frozen=True, kw_only=True):
    """Holds the body of /v1/embeddings."""

    input: Raw
    encoding_format: str | None = None
    dimensions: int | None = None
    prompt_name: str | None = None


_Texts = str | list[str]


class ScoreBody(PoolingBody, frozen=True, kw_only=True):
    """Holds the body of /score: two sides, under one of their names each."""

    text_1: _Texts | None = None
    queries: _Texts | None = None
    text_2: _Texts | None = None
    documents: _Texts | None = None
    items: _Texts | None = None
    use_activation: bool | None = None


class RerankBody(PoolingBody, frozen=True, kw_only=True):
    """Holds the body of /rerank."""

    query: str
    documents: list[str | dict[str, Any]]
    top_n: int | None = None
    return_documents: bool | None = None
    use_activation: bool | None = None


class ClassifyBody(PoolingBody, frozen=True, kw_only=True):
    """Holds the body of /classify."""

    input: Raw
    use_activation: bool | None = None


class ContentPart(_Body, frozen=True, kw_only=True):
    """Holds a part of a message's content."""

    type: str
    text: str | None = None


class Function(_Body, frozen=True, kw_only=True):
    """Names a function that was called; `arguments` is JSON text."""

    name: str
    arguments: str


class PredictionBody(_Body, frozen=True, kw_only=True):
    """Holds what a chat's answer is expected to be."""

    type: str
    content: str | Annotated[list[ContentPart], Meta(max_length=MAX_PARTS)]


class ToolCallBody(_Body, frozen=True, kw_only=True):
    """Holds a call in an assistant's message."""

    function: Function
    id: str = ""
    type: str = "function"


class MessageBody(_Body, frozen=True, kw_only=True):
    """Holds one message of a chat; `refusal` is what an assistant may have said instead of content."""

    role: str
    content: str | Annotated[list[ContentPart], Meta(max_length=MAX_PARTS)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCallBody], Meta(max_length=MAX_TOOL_CALLS)] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    audio: Raw = Raw()
    function_call: Raw = Raw()


Messages = Annotated[list[MessageBody], Meta(max_length=MAX_MESSAGES)]


class ChatBody(Sampling, frozen=True, kw_only=True):
    """Holds the body of /v1/chat/completions."""

    messages: Messages
    tools: Raw = Raw()
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Raw = Raw()
    reasoning_effort: str | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: Raw = Raw()
    parallel_tool_calls: bool | None = None
    prediction: PredictionBody | None = None


class TokenizeBody(_Body, frozen=True, kw_only=True):
    """Holds the body of /tokenize: a text, or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages = msgspec.field(default_factory=list)
    tools: Raw = Raw()
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Raw = Raw()
    reasoning_effort: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(_Body, frozen=True, kw_only=True):
    """Holds the body of /detokenize."""

    tokens: Ids
    model: str | None = None


_UNSUPPORTED: Final[Neutral] = {
    "bad_words": (b"[]",),
    "truncate_prompt_tokens": (),
    "logits_processors": (),
    "prompt_embeds": (),
    "kv_transfer_params": (),
    "spaces_between_special_tokens": (b"true",),
    "return_tokens_as_token_ids": (b"false",),
}
COMPLETION_UNSUPPORTED: Final[Neutral] = {**_UNSUPPORTED, "suffix": (b'""',)}
CHAT_UNSUPPORTED: Final[Neutral] = {
    **_UNSUPPORTED,
    "add_special_tokens": (b"false",),
    "audio": (),
    "modalities": (b'["text"]',),
    "functions": (b"[]",),
    "function_call": (),
    "chat_template": (),
    "documents": (b"[]",),
    "echo": (b"false",),
}
POOLING_UNSUPPORTED: Final[Neutral] = {
    "messages": (),
    "chat_template": (),
    "instruction": (),
    "mm_processor_kwargs": (),
    "embed_dtype": (b'"float32"',),
    "endianness": (b'"native"', b'"little"'),
    "max_tokens_per_doc": (),
}
TOKENIZE_UNSUPPORTED: Final[Neutral] = {
    "chat_template": (),
    "return_tokens_as_token_ids": (b"false",),
}
