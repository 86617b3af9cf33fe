"""Holds the bodies of requests as structs, as OpenAI's clients and vLLM's users send them. None means "left out"
everywhere."""

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw

from octavo.frontend.api.body import Neutral
from octavo.frontend.api.schemas import MAX_PARTS, BodyStruct, Sampling
from octavo.frontend.request.chat import MAX_MESSAGES, MAX_TOOL_CALLS

# More cannot fit in any context; checked before anything walks over them.
_MAX_IDS: Final = 1 << 21

Ids = Annotated[list[int], Meta(max_length=_MAX_IDS)]


class CompletionBody(Sampling, frozen=True, kw_only=True):
    """Holds the body of /v1/completions."""

    prompt: Raw
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    suffix: str | None = None


class PoolingBody(BodyStruct, frozen=True, kw_only=True):
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


class ContentPart(BodyStruct, frozen=True, kw_only=True):
    """Holds a part of a message's content."""

    type: str
    text: str | None = None


class Function(BodyStruct, frozen=True, kw_only=True):
    """Names a function that was called; `arguments` is JSON text."""

    name: str
    arguments: str


class PredictionBody(BodyStruct, frozen=True, kw_only=True):
    """Holds what a chat's answer is expected to be."""

    type: str
    content: str | Annotated[list[ContentPart], Meta(max_length=MAX_PARTS)]


class ToolCallBody(BodyStruct, frozen=True, kw_only=True):
    """Holds a call in an assistant's message."""

    function: Function
    id: str = ""
    type: str = "function"


class MessageBody(BodyStruct, frozen=True, kw_only=True):
    """Holds one message of a chat; `refusal` is what an assistant may have said instead of content.

    What it had thought before stands under either of two names.
    """

    role: str
    content: str | Annotated[list[ContentPart], Meta(max_length=MAX_PARTS)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCallBody], Meta(max_length=MAX_TOOL_CALLS)] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
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
    include_reasoning: bool | None = None
    prediction: PredictionBody | None = None


class TokenizeBody(BodyStruct, frozen=True, kw_only=True):
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


class DetokenizeBody(BodyStruct, frozen=True, kw_only=True):
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
COMPLETION_UNSUPPORTED: Final[Neutral] = _UNSUPPORTED
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
