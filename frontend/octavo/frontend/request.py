"""A request as any door hands it on, free of the door's message types."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from octavo.frontend.tokenizer import ChatMessage
from octavo.wire.sampling import BeamSearch

# Text, token ids, or a chat.
Prompt = str | list[int] | tuple[ChatMessage, ...]


@dataclass(frozen=True)
class GenerationRequest:
    """What a client asks for. None means "left out", as do empty texts and collections.

    `top_logprobs` and `prompt_logprobs` are how many alternatives to report with each token's logprob.
    """

    prompt: Prompt
    request_id: str = ""
    model: str = ""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    num_sequences: int = 1
    best_of: int | None = None
    beam: BeamSearch | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] = ()
    banned_token_ids: Sequence[int] = ()
    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    stop_strings: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    incremental: bool = True
    tenant: str = ""
    priority: int = 0
    salt: str = ""
    pinned_prefix: str = ""

    @property
    def parallel(self) -> int:
        """The most sequences that run side by side."""
        return self.beam.width if self.beam else self.best_of or self.num_sequences
