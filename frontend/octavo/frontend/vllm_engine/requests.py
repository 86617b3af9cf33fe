"""Reads the protocol's requests as `GenerationRequest`.

In most fields 0 means "left out"; Octavo's own defaults decide what the protocol cannot say.
"""

from array import array
from typing import Any, Final

from octavo.frontend.errors import Reason, Unsupported, bad_parameter
from octavo.frontend.grpc.requests import check_counts, refuse_unknown_fields, values_of
from octavo.frontend.request.request import FIELDS, Constraint, ConstraintKind, GenerationRequest, Prompt
from octavo.frontend.request.validation import check_room

# Fields that need another engine: images, and KV that another process computed.
_UNSUPPORTED: Final = (
    "kv_transfer_params",
    "mm_inputs",
    "extra_mm_inputs",
    "kv_transfer_params_json",
    "media_refs",
)
_TEXT_CONSTRAINTS: Final = {
    "json_schema": ConstraintKind.JSON_SCHEMA,
    "regex": ConstraintKind.REGEX,
    "grammar": ConstraintKind.GRAMMAR,
}
# The protocol's names -> those of a request. Fields without presence are left out where they are 0.
_NAMES: Final = {field.called: name for name, field in FIELDS.items()} | {"logprobs": "top_logprobs"}


def read_generate(message: Any, max_model_len: int) -> GenerationRequest:
    """Returns the message as a request. Raises `InvalidRequest`, and `Unsupported` for fields of another engine."""
    params = message.sampling_params
    _check_counts(message, max_model_len)
    _check_supported(message)
    refuse_unknown_fields(message)
    return GenerationRequest(
        prompt=_prompt(message),
        request_id=message.request_id,
        **{
            **dict(values_of(params, _NAMES)),
            # Only stop strings are looked for in the text, which itself is not sent.
            "skip_special_tokens": params.skip_special_tokens,
        },
        incremental=message.stream,
        constraint=_constraint(params),
    )


def _prompt(message: Any) -> Prompt:
    match message.WhichOneof("input"):
        case "text":
            return str(message.text)
        case "tokenized":
            return array("I", message.tokenized.input_ids)
    raise bad_parameter("input", "missing", "one of tokenized and text must be set")


def _constraint(params: Any) -> Constraint | None:
    match params.WhichOneof("constraint"):
        case None:
            return None
        case "json_object":
            return Constraint(ConstraintKind.JSON_OBJECT) if params.json_object else None
        case "choice":
            return Constraint(ConstraintKind.CHOICE, choices=tuple(params.choice.choices))
        case field:
            return Constraint(_TEXT_CONSTRAINTS[field], getattr(params, field))


def _check_counts(message: Any, max_model_len: int) -> None:
    """Bounds the fields that are walked over: millions of entries would stop the event loop."""
    check_room(len(message.tokenized.input_ids), max_model_len)
    check_counts(message.sampling_params, _NAMES)


def _check_supported(message: Any) -> None:
    params = message.sampling_params
    set_fields = {descriptor.name for descriptor, _ in message.ListFields()}
    for field in _UNSUPPORTED:
        if field in set_fields:
            raise _unsupported(field, "leave it out")
    if message.data_parallel_rank:
        raise _unsupported("data_parallel_rank", "there is one rank, which is 0; the scheduler chooses the worker")
    if params.HasField("truncate_prompt_tokens"):
        raise _unsupported("truncate_prompt_tokens", "send a prompt that fits")
    if params.HasField("structural_tag"):
        raise _unsupported("structural_tag", "use json_schema, regex, grammar or choice")


def _unsupported(field: str, what_to_do: str) -> Unsupported:
    return Unsupported(Reason.UNSUPPORTED_FIELD, f"{field} cannot be had from this server; {what_to_do}", field=field)
