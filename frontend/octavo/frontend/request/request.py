"""Declares a request as every interface hands it on: the parameters, the constraint on its text, and the caller."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final

from msgspec import Meta

from octavo.frontend.request.chat import Chat
from octavo.frontend.request.fields import Elsewhere, Range, table_of
from octavo.frontend.request.infill import Infill
from octavo.wire.requests import Priority
from octavo.wire.sampling import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    BeamSearch,
    Bias,
    MinP,
    Parallel,
    Penalty,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopLogprobs,
    TopP,
)

MAX_LABEL_LENGTH: Final = 256
# The longest that a request may ask to wait or to be kept, in seconds.
MAX_WAIT_S: Final = 86400.0
# The longest schema, expression or grammar, and the longest that all choices together may be.
MAX_CONSTRAINT_BYTES: Final = 65536
MAX_CHOICES: Final = 1024


@dataclass(frozen=True)
class Caller:
    """Identifies who calls. Tenants share the service fairly.

    A `trusted` caller may speak for any tenant, and its cache salts are used as they are. Every caller is trusted
    where the server asks for no API keys.
    """

    tenant: str = ""
    trusted: bool = True


# Every caller, where the server asks for no API keys.
ANYBODY = Caller()
# A caller without a key, where the server asks for keys and yet has something for it.
STRANGER = Caller(trusted=False)


class ConstraintKind(enum.StrEnum):
    """Names a kind of constraint: any JSON object, a JSON schema, a regular expression, some texts, or a grammar."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


@dataclass(frozen=True)
class Constraint:
    """Tells what the text of an answer must match, as a client says it.

    `text` is the schema, the expression or the grammar (Lark or GBNF); `choices` are the texts of `CHOICE`. With a
    schema, `closes` limits objects to the properties that they list (`octavo.frontend.text.grammars.closed`), and
    `lenient` leaves out the keywords that no grammar can enforce instead of refusing them. A grammar that is `framed`
    has the model's own frame of messages in it, where it has one.
    """

    kind: ConstraintKind
    text: str = ""
    choices: tuple[str, ...] = ()
    closes: bool = False
    lenient: bool = False
    framed: bool = False


# Text, token ids, a chat, or a gap to fill.
Prompt = str | Sequence[int] | Chat | Infill
# Text, or token ids.
Prediction = str | Sequence[int]
_Label = Annotated[str, Meta(max_length=MAX_LABEL_LENGTH)]
_Seed = Annotated[int, Meta(ge=0, le=2**64 - 1, description="an unsigned 64-bit number")]
_NewTokens = Annotated[int, Meta(ge=1, description="at least 1; leave it out for no limit")]
_ReasoningTokens = Annotated[int, Meta(ge=0, description="at least 0; leave it out for no limit")]
_Wait = Annotated[
    float,
    Meta(ge=0.001, le=MAX_WAIT_S, description=f"between 0.001 and {MAX_WAIT_S:g} seconds; leave it out for no limit"),
]
_Grace = Annotated[float, Meta(ge=0, le=MAX_WAIT_S, description=f"between 0 (not kept) and {MAX_WAIT_S:g} seconds")]
_RECOMMENDED: Final = Elsewhere(recommended=True)


@dataclass(frozen=True)
class GenerationRequest:
    """Holds a client's request, free of the message types of any interface.

    None means "left out", as do empty texts and collections. The types say what is allowed, and where a field has
    another name or a recommended value: `FIELDS` is read from them, and what checks or reads requests goes by it.

    `top_logprobs` and `prompt_logprobs` are how many alternatives to report with each token's logprob. `max_queue_s` is
    how long the request may wait to be computed, `detach_grace_s` how long it is kept without a reader, in seconds.
    `add_special_tokens` lets the tokenizer add its own tokens (a BOS) to a prompt that is text. `prediction` is what
    the answer is expected to be, which may make it faster and changes nothing else. After `max_reasoning_tokens` the
    model must end its reasoning; 0 lets it think nothing. `kept_special_tokens` are not skipped with others.
    `traceparent` is the W3C trace context of the caller.
    """

    prompt: Prompt
    request_id: Annotated[str, Meta(max_length=128)] = ""
    model: str = ""
    temperature: Annotated[Temperature | None, _RECOMMENDED] = None
    top_p: Annotated[TopP | None, _RECOMMENDED] = None
    top_k: Annotated[TopK | None, _RECOMMENDED] = None
    min_p: Annotated[MinP | None, _RECOMMENDED] = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[RepetitionPenalty | None, _RECOMMENDED] = None
    seed: _Seed | None = None
    num_sequences: Annotated[Parallel, Elsewhere("n")] = 1
    best_of: Parallel | None = None
    beam: BeamSearch | None = None
    logit_bias: Annotated[Mapping[int, Bias], Meta(max_length=MAX_LOGIT_BIAS)] = field(default_factory=dict)
    allowed_token_ids: Annotated[Sequence[int], Meta(max_length=MAX_ALLOWED_TOKEN_IDS)] = ()
    banned_token_ids: Annotated[Sequence[int], Meta(max_length=MAX_ALLOWED_TOKEN_IDS)] = ()
    max_new_tokens: Annotated[_NewTokens | None, Elsewhere("max_tokens")] = None
    max_reasoning_tokens: _ReasoningTokens | None = None
    min_new_tokens: Annotated[int, Meta(ge=0, description="at least 0"), Elsewhere("min_tokens")] = 0
    stop_strings: Annotated[Sequence[str], Meta(max_length=8), Elsewhere("stop")] = ()
    stop_token_ids: Annotated[Sequence[int], Meta(max_length=MAX_STOP_TOKEN_IDS)] = ()
    include_stop: Annotated[bool, Elsewhere("include_stop_str_in_output")] = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    kept_special_tokens: Sequence[str] = ()
    top_logprobs: TopLogprobs | None = None
    prompt_logprobs: TopLogprobs | None = None
    incremental: bool = True
    tenant: _Label = ""
    priority: Priority = 0
    salt: Annotated[_Label, Elsewhere("cache_salt")] = ""
    pinned_prefix: str = ""
    constraint: Constraint | None = None
    max_queue_s: Annotated[_Wait | None, Elsewhere("max_queue_time")] = None
    detach_grace_s: _Grace = 0.0
    add_special_tokens: bool = True
    prediction: Prediction = ""
    traceparent: str = ""

    @property
    def parallel(self) -> int:
        """Returns the most sequences of the request that run side by side."""
        return self.beam.width if self.beam else self.best_of or self.num_sequences


FIELDS: Final = table_of(GenerationRequest)


def bounds_of(name: str) -> Range:
    """Returns the range of a field that is a number."""
    found = FIELDS[name].range
    assert found is not None, f"{name} is no number, or has no limits"
    return found
