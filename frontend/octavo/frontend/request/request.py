"""A request as any interface hands it on: what is asked, what its text must match, and who calls."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from octavo.frontend.request.chat import Chat
from octavo.wire.sampling import BeamSearch


@dataclass(frozen=True)
class Caller:
    """`tenant` is who shares the service fairly with others. A `trusted` caller may speak for any tenant, and name
    cache salts as they are: everybody is, where no keys are asked for."""

    tenant: str = ""
    trusted: bool = True


# Where no keys are asked for.
ANYBODY = Caller()


# What the text of an answer must match, as a client says it.


class ConstraintKind(enum.StrEnum):
    """Any JSON object; one of a JSON schema; a regular expression; one of some texts; a context-free grammar."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


@dataclass(frozen=True)
class Constraint:
    """`text` is the schema, the expression or the grammar (Lark or GBNF); `choices` are those of `CHOICE`.

    Of a schema: `closes` limits objects to the properties that they list (`json_schemas.closed`); `lenient` leaves out
    what no grammar can hold an answer to, instead of refusing it.
    """

    kind: ConstraintKind
    text: str = ""
    choices: tuple[str, ...] = ()
    closes: bool = False
    lenient: bool = False


# A request as any door hands it on, free of the door's message types.


# Text, token ids, or a chat.
Prompt = str | Sequence[int] | Chat


@dataclass(frozen=True)
class GenerationRequest:
    """What a client asks for. None means "left out", as do empty texts and collections.

    `top_logprobs` and `prompt_logprobs` are how many alternatives to report with each token's logprob. `max_queue_s`
    and `detach_grace_s` are seconds: how long it may wait to be computed, and how long it is kept without a reader.
    `add_special_tokens` is of a text: whether the tokenizer adds what it adds by itself. `traceparent` is the W3C trace
    context of the caller.
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
    constraint: Constraint | None = None
    max_queue_s: float | None = None
    detach_grace_s: float = 0.0
    add_special_tokens: bool = True
    traceparent: str = ""

    @property
    def parallel(self) -> int:
        """The most sequences that run side by side."""
        return self.beam.width if self.beam else self.best_of or self.num_sequences
