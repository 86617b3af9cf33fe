"""Declares the parameters of a request, and writes them into an octavo.v1 message."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from octavo.client.prompts import EmbedInput, Prediction, Prompt, TextPair, prediction_message, prompt_fields
from octavo.v1 import generation_pb2 as pb

_CONSTRAINTS: Final = ("json_object", "json_schema", "regex", "choice", "grammar")
# octavo.v1's names -> those here, which are vLLM's.
_NAMES: Final = {
    "num_sequences": "n",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "include_stop": "include_stop_str_in_output",
    "top_logprobs": "logprobs",
}
_EARLY_STOPPING: Final = {
    None: pb.EARLY_STOPPING_UNSPECIFIED,
    True: pb.EARLY_STOPPING_ON,
    False: pb.EARLY_STOPPING_OFF,
    "never": pb.EARLY_STOPPING_NEVER,
}


@dataclass(frozen=True)
class BeamSearch:
    """Finds the sequences with the highest probabilities instead of sampling.

    `early_stopping` is that of transformers.
    """

    beam_width: int
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Tells how tokens are chosen, and where a sequence ends.

    None is the value that the model's makers recommend, or else the neutral one; for `max_tokens`, None is all the room
    that there is. At most one of `json_object`, `json_schema` (its text, or the schema itself), `regex`, `choice` and
    `grammar` (Lark or GBNF) may be set: the text must match it. `logprobs` and `prompt_logprobs` are how many
    alternatives to report with each token. `stop_token_ids` end a sequence besides EOS; `ignore_eos` treats EOS as any
    other token. After `max_reasoning_tokens` the answer to a chat must end its reasoning.
    """

    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    beam_search: BeamSearch | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    max_reasoning_tokens: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] = ()
    banned_token_ids: Sequence[int] = ()
    json_object: bool = False
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        """Raises `ValueError` for two constraints at once."""
        given = [name for name in _CONSTRAINTS if getattr(self, name) not in (None, False)]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} cannot be had together; leave all but one out")


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """Names a request and its tenant, and bounds its time. Times are in seconds.

    `timeout` covers the whole call, with all attempts; None is the client's. `detach_grace` is how long the server
    keeps the request without a reader, so how long a broken connection may last. 0 gives a stream up with its
    connection, and None is the client's. `prediction` is what the answer is expected to be, which may make it faster
    and changes nothing else.
    """

    request_id: str = ""
    model: str = ""
    priority: int | None = None
    tenant: str = ""
    cache_salt: str = ""
    pinned_prefix: str = ""
    max_queue_time: float | None = None
    timeout: float | None = None
    detach_grace: float | None = None
    prediction: Prediction = ""


@dataclass(frozen=True)
class EmbedOptions:
    """Says how texts are read, and vectors given; None leaves it to the server.

    Vectors are cut to `dimensions` numbers and divided by their length again; texts of more tokens are cut to
    `truncate_to`, 0: to as many as the model takes. `prompt_name` names the prompt, of those in the model's files, that
    comes before each text. `timeout` covers the whole call, with all attempts; times are in seconds.
    """

    dimensions: int | None = None
    truncate_to: int | None = None
    prompt_name: str | None = None
    add_special_tokens: bool = True
    model: str = ""
    priority: int | None = None
    tenant: str = ""
    max_queue_time: float | None = None
    timeout: float | None = None


def embed_request(inputs: Sequence[EmbedInput], options: EmbedOptions) -> pb.EmbedRequest:
    """Makes the message, with `options` as they are. Raises `ValueError` for values that no message can hold."""
    try:
        return pb.EmbedRequest(
            model=options.model,
            inputs=[_embed_input(each) for each in inputs],
            dimensions=options.dimensions,
            truncate_to=options.truncate_to,
            prompt_name=options.prompt_name,
            add_special_tokens=options.add_special_tokens,
            tenant=options.tenant,
            priority=options.priority,
            max_queue_time=_duration(options.max_queue_time),
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"not a request that can be sent: {error}") from error


def _embed_input(given: EmbedInput) -> pb.EmbedInput:
    match given:
        case str():
            return pb.EmbedInput(text=given)
        case TextPair(first=first, second=second):
            return pb.EmbedInput(pair=pb.TextPair(first=first, second=second))
    return pb.EmbedInput(token_ids=pb.TokenIds(ids=given))


def generate_request(
    prompt: Prompt, params: SamplingParams, options: RequestOptions, *, incremental: bool = True
) -> pb.GenerateRequest:
    """Makes the message, with `options` as they are. Raises `ValueError` for values that no message can hold."""
    try:
        return pb.GenerateRequest(
            request_id=options.request_id,
            model=options.model,
            sampling=pb.SamplingParams(**_given(params, _SAMPLING), beam_search=_beam_search(params.beam_search)),
            stopping=pb.StoppingCriteria(
                **_given(params, _STOPPING),
                stop_strings=(params.stop,) if isinstance(params.stop, str) else params.stop,
            ),
            response=pb.ResponseOptions(**_given(params, _RESPONSE), incremental=incremental),
            scheduling=_scheduling(options),
            cache=pb.CacheOptions(salt=options.cache_salt, pinned_prefix=options.pinned_prefix),
            constraint=_constraint(params),
            prediction=prediction_message(options.prediction),
            **prompt_fields(prompt),
        )
    except TypeError as error:
        raise ValueError(f"a parameter has a value of the wrong type: {error}") from error


def _beam_search(beam: BeamSearch | None) -> pb.BeamSearch | None:
    if beam is None:
        return None
    return pb.BeamSearch(
        beam_width=beam.beam_width,
        length_penalty=beam.length_penalty,
        early_stopping=_EARLY_STOPPING[beam.early_stopping],
    )


def _shared(kind: type[Message]) -> list[tuple[str, str]]:
    """Returns the fields of a message that are fields of `SamplingParams`: the name there, and the one here."""
    own = {each.name for each in fields(SamplingParams)}
    pairs = [(each.name, _NAMES.get(each.name, each.name)) for each in kind.DESCRIPTOR.fields]
    # A search is another type here.
    return [(name, named) for name, named in pairs if named in own - {"beam_search"}]


_SAMPLING, _STOPPING, _RESPONSE = map(_shared, (pb.SamplingParams, pb.StoppingCriteria, pb.ResponseOptions))


def _given(params: SamplingParams, shared: Iterable[tuple[str, str]]) -> dict[str, Any]:
    return {name: getattr(params, named) for name, named in shared}


def _scheduling(options: RequestOptions) -> pb.SchedulingHints:
    return pb.SchedulingHints(
        tenant=options.tenant,
        priority=options.priority,
        max_queue_time=_duration(options.max_queue_time),
        detach_grace=_duration(options.detach_grace or None),
    )


def _duration(seconds: float | None) -> Duration | None:
    if seconds is None:
        return None
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def _constraint(params: SamplingParams) -> pb.OutputConstraint | None:
    if params.json_object:
        return pb.OutputConstraint(json_object=True)
    if params.json_schema is not None:
        schema = params.json_schema
        return pb.OutputConstraint(json_schema=schema if isinstance(schema, str) else json.dumps(dict(schema)))
    if params.regex is not None:
        return pb.OutputConstraint(regex=params.regex)
    if params.choice is not None:
        return pb.OutputConstraint(choice=pb.ChoiceList(choices=params.choice))
    return pb.OutputConstraint(grammar=params.grammar) if params.grammar is not None else None
