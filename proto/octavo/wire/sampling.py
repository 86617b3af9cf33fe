"""Defines how the next token is chosen and when a sequence ends, as the scheduler and the workers need to know it."""

import enum
from typing import Annotated, Final

from msgspec import Meta, field
from msgspec.structs import fields

from octavo.wire.base import MAX_TOKENS, Identity, TokenId, Value

MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 300
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_TOP_LOGPROBS = 20
# Of a grammar, in characters.
MAX_GRAMMAR = 1 << 18
# Sequences of one request that run side by side: n, best_of or the width of a beam.
MAX_PARALLEL = 16

# The numbers that clients set: what is allowed, and how they are told.
Temperature = Annotated[float, Meta(ge=0.0, le=100.0, description="between 0 (greedy) and 100")]
TopK = Annotated[int, Meta(ge=0, le=2**31 - 1, description=f"between 0 (off) and {2**31 - 1}")]
TopP = Annotated[float, Meta(gt=0.0, le=1.0, description="above 0 and at most 1 (off)")]
MinP = Annotated[float, Meta(ge=0.0, le=1.0, description="between 0 (off) and 1")]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0, description="between -2 and 2; 0 is off")]
# Logits are divided by it, and must stay numbers.
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=2.0, description="between 0.01 and 2; 1 is off")]
Bias = Annotated[
    float, Meta(ge=-100.0, le=100.0, description="between -100 and 100; use banned_token_ids to exclude a token")
]
Parallel = Annotated[int, Meta(ge=1, le=MAX_PARALLEL, description=f"between 1 and {MAX_PARALLEL}")]
LengthPenalty = Annotated[float, Meta(ge=-100.0, le=100.0, description="between -100 and 100")]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS, description=f"between 0 and {MAX_TOP_LOGPROBS}")]


class EarlyStopping(enum.StrEnum):
    """Says when a beam search is content with the hypotheses it has (the terms of transformers).

    ON: as soon as there are `width` of them. OFF: once no running beam scores better at its present length. NEVER: once
    none could at any length.
    """

    ON = "on"
    OFF = "off"
    NEVER = "never"


class BeamSearch(Value, frozen=True):
    """Search for the likeliest sequences with `width` beams; a hypothesis scores its cumulative logprob divided by its
    length to the power of `length_penalty`."""

    width: Parallel
    length_penalty: LengthPenalty
    early_stopping: EarlyStopping


class SamplingParams(Value, frozen=True, kw_only=True):
    """Describes one request's choice of tokens. All defaults are resolved before it is made.

    `num_sequences` are generated: by sampling, side by side; or, with `beam`, the best of the search. `temperature` 0
    is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. `seed` is always the one in force: the client's or one the
    frontend drew.

    `stop_token_ids` holds every id that ends the sequence, EOS ids included; none is chosen before `min_tokens` tokens.
    `repetition_penalty` (1 is off) divides or multiplies the logits of all tokens seen (CTRL, Keskar et al. 2019);
    `presence_penalty` and `frequency_penalty` (0 is off) are subtracted for generated ones, once or per occurrence.
    `logit_bias` is added; an `allowed_token_ids` that is not empty excludes all others, as `banned_token_ids` are.

    `grammar`, where not empty, is what the text of every sequence must match: a grammar of the llguidance library,
    which a frontend has compiled before. EOS ends a sequence where the grammar lets the text end, and only there.

    `logprobs`: how many alternatives to report with each token's logprob (None: report none); `prompt_logprobs` the
    same for the prompt. Both are of the model's own distribution, before any of the above.
    """

    temperature: Temperature = 0.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    min_p: MinP = 0.0
    seed: Identity = 0
    num_sequences: Parallel = 1
    beam: BeamSearch | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] = field(default_factory=list)
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[list[tuple[TokenId, Bias]], Meta(max_length=MAX_LOGIT_BIAS)] = field(default_factory=list)
    allowed_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_ALLOWED_TOKEN_IDS)] = field(default_factory=list)
    banned_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_ALLOWED_TOKEN_IDS)] = field(default_factory=list)
    logprobs: TopLogprobs | None = None
    prompt_logprobs: TopLogprobs | None = None
    grammar: Annotated[str, Meta(max_length=MAX_GRAMMAR)] = ""

    @property
    def parallel(self) -> int:
        """Returns the most sequences that run side by side."""
        return self.beam.width if self.beam else self.num_sequences

    @property
    def is_penalised(self) -> bool:
        """Tells whether the tokens there are change the logits of the next."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


# What shapes the draw of a token, and means nothing where none is drawn; what penalises the tokens there are; and the
# value of each that changes nothing.
DRAWING: Final = ("temperature", "top_k", "top_p", "min_p")
PENALTIES: Final = ("repetition_penalty", "presence_penalty", "frequency_penalty")
NEUTRAL: Final[dict[str, float]] = {
    each.name: each.default for each in fields(SamplingParams) if each.name in (*DRAWING, *PENALTIES)
}


class Logprobs(Value, frozen=True):
    """Holds a token's natural-log probability, its rank (1: the most probable), and the most probable tokens with their
    log probabilities, in falling order."""

    logprob: float
    rank: Annotated[int, Meta(ge=1, le=2**31)]
    top_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_TOP_LOGPROBS)]
    top_logprobs: Annotated[list[float], Meta(max_length=MAX_TOP_LOGPROBS)]
