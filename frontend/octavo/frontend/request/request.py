"""Declares a request as every interface hands it on: the parameters, the constraint on its text, and the caller."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from octavo.frontend.request.chat import Chat
from octavo.wire.sampling import BeamSearch


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
    `lenient` leaves out the keywords that no grammar can enforce instead of refusing them.
    """

    kind: ConstraintKind
    text: str = ""
    choices: tuple[str, ...] = ()
    closes: bool = False
    lenient: bool = False


# Text, token ids, or a chat.
Prompt = str | Sequence[int] | Chat


@dataclass(frozen=True)
class GenerationRequest:
    """Holds a client's request, free of the message types of any interface.

    None means "left out", as do empty texts and collections.

    `top_logprobs` and `prompt_logprobs` are how many alternatives to report with each token's logprob. `max_queue_s` is
    how long the request may wait to be computed, `detach_grace_s` how long it is kept without a reader, in seconds.
    `add_special_tokens` lets the tokenizer add its own tokens (a BOS) to a prompt that is text. `traceparent` is the
    W3C trace context of the caller.
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
        """Returns the most sequences of the request that run side by side."""
        return self.beam.width if self.beam else self.best_of or self.num_sequences
