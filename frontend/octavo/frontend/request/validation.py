"""Checks a request against the rules that need nothing but the request itself."""

from collections.abc import Sized
from typing import Final

from octavo.frontend.errors import InvalidRequest, Reason, Unsupported, bad_parameter
from octavo.frontend.request import chat as chat_form
from octavo.frontend.request.chat import Chat, check_bytes, check_label
from octavo.frontend.request.fields import Range, range_of
from octavo.frontend.request.infill import Infill
from octavo.frontend.request.request import (
    FIELDS,
    MAX_CHOICES,
    MAX_CONSTRAINT_BYTES,
    Constraint,
    ConstraintKind,
    GenerationRequest,
    Prediction,
    Prompt,
)
from octavo.wire.sampling import DRAWING, NEUTRAL, Bias, LengthPenalty, Parallel

MAX_STOP_STRING_BYTES = 256
# No tokenizer in use needs more bytes for a token on average; a longer text cannot fit and is not worth tokenizing.
_BYTES_PER_TOKEN = 8
_SLACK_BYTES = 1024
# Every message of a chat costs at least one token that the template adds.
_BYTES_PER_MESSAGE = _BYTES_PER_TOKEN

_LABELS: Final = {name: field.most for name, field in FIELDS.items() if field.most and field.is_label}
_RANGES: Final = {name: field.range for name, field in FIELDS.items() if field.range}
_MOST: Final = {name: field.most for name, field in FIELDS.items() if field.most and not field.is_label}
_DRAWING: Final = [name for name in FIELDS if name in DRAWING]
_BIAS, _WIDTH, _LENGTH_PENALTY = range_of(Bias), range_of(Parallel), range_of(LengthPenalty)


def check_form(request: GenerationRequest) -> None:
    """Raises `InvalidRequest` for values that no model takes, `Unsupported` for fields that exclude each other."""
    for field, most in _LABELS.items():
        check_label(field, getattr(request, field), most)
    for field, bounds in _RANGES.items():
        _check_range(field, getattr(request, field), bounds)
    for field, most in _MOST.items():
        check_count(field, getattr(request, field), most)
    for bias in request.logit_bias.values():
        _check_range("logit_bias", bias, _BIAS)
    _check_stopping(request)
    _check_parallel(request)
    _check_beam(request)
    _check_constraint(request)
    _check_prompt_form(request.prompt)


def check_count(field: str, values: Sized, most: int) -> None:
    """Raises `InvalidRequest` for a `field` with more than `most` values."""
    chat_form.check_count(field, len(values), most)


def check_prompt_size(prompt: Prompt, max_model_len: int) -> None:
    """Raises `InvalidRequest` for a prompt that cannot fit, before any work is spent on tokenizing the prompt.

    `max_model_len` is in tokens.
    """
    if not isinstance(prompt, str | Chat | Infill):
        check_room(len(prompt), max_model_len)
        return
    if isinstance(prompt, Infill) and prompt.most_tokens is not None:
        # It is cut down to what fits.
        return
    size = _num_bytes(prompt)
    bound = _byte_bound(max_model_len)
    if size > bound:
        raise InvalidRequest(
            Reason.PROMPT_TOO_LONG,
            f"the prompt has {size} bytes, more than the {bound} that could fit a context of {max_model_len} tokens;"
            " shorten it",
            prompt_bytes=size,
            max_prompt_bytes=bound,
        )


def check_prediction_size(prediction: Prediction, max_model_len: int) -> None:
    """Raises `InvalidRequest` for a prediction that is longer than any answer, a text before it is tokenized.

    `max_model_len` is in tokens.
    """
    if not isinstance(prediction, str):
        if len(prediction) > max_model_len:
            raise bad_parameter(
                "prediction", f"{len(prediction)} tokens long", f"the context has room for {max_model_len}; shorten it"
            )
        return
    size, bound = len(prediction.encode()), _byte_bound(max_model_len)
    if size > bound:
        rule = f"at most {bound} could fit a context of {max_model_len} tokens; shorten it"
        raise bad_parameter("prediction", f"{size} bytes long", rule)


def check_room(prompt_tokens: int, max_model_len: int) -> None:
    """Raises `InvalidRequest` for a prompt that leaves no room for an answer. Both sizes are in tokens."""
    if prompt_tokens >= max_model_len:
        raise InvalidRequest(
            Reason.PROMPT_TOO_LONG,
            f"the prompt has {prompt_tokens} tokens and the context {max_model_len}, which leaves no room for an"
            " answer; shorten the prompt",
            prompt_tokens=prompt_tokens,
            max_model_len=max_model_len,
        )


def check_answer_size(max_new_tokens: int | None, max_model_len: int) -> None:
    """Raises `InvalidRequest` for an answer that cannot fit, whatever the prompt. It would count as so much work."""
    if (max_new_tokens or 0) >= max_model_len:
        rule = f"the context has room for {max_model_len} tokens, the prompt's among them; lower it"
        raise bad_parameter("max_new_tokens", max_new_tokens, rule)


def _check_range(field: str, value: float | None, bounds: Range) -> None:
    if value is not None and not bounds.holds(value):
        raise bad_parameter(field, value, f"it must be {bounds.rule}")


def _check_stopping(request: GenerationRequest) -> None:
    if request.max_new_tokens is not None and request.min_new_tokens > request.max_new_tokens:
        raise bad_parameter("min_new_tokens", request.min_new_tokens, f"max_new_tokens is {request.max_new_tokens}")
    for stop in request.stop_strings:
        if not 1 <= len(stop.encode()) <= MAX_STOP_STRING_BYTES:
            rule = f"each must have 1 to {MAX_STOP_STRING_BYTES} bytes"
            raise bad_parameter("stop_strings", f"one of {len(stop.encode())} bytes", rule)


def _check_parallel(request: GenerationRequest) -> None:
    if request.best_of is None:
        return
    if request.beam is not None:
        raise bad_parameter("best_of", request.best_of, "a beam search keeps the best by itself; leave one of them out")
    if request.best_of < request.num_sequences:
        rule = f"num_sequences is {request.num_sequences}, and that many are chosen among best_of"
        raise bad_parameter("best_of", request.best_of, rule)


def _check_beam(request: GenerationRequest) -> None:
    if (beam := request.beam) is None:
        return
    _check_range("beam_width", beam.width, _WIDTH)
    _check_range("length_penalty", beam.length_penalty, _LENGTH_PENALTY)
    if beam.width < request.num_sequences:
        rule = f"num_sequences is {request.num_sequences}, and a search has no more results than beams"
        raise bad_parameter("beam_width", beam.width, rule)
    _check_beam_is_not_sampling(request)
    for field in ("stop_strings", "top_logprobs", "prompt_logprobs"):
        if getattr(request, field) not in (None, ()):
            raise Unsupported(
                Reason.UNSUPPORTED_FIELD,
                f"{field} cannot be had with a beam search: its sequences are known only when it ends; leave it out",
                field=field,
            )


def _check_beam_is_not_sampling(request: GenerationRequest) -> None:
    for field in _DRAWING:
        if (value := getattr(request, field)) not in (None, off := NEUTRAL[field]):
            rule = f"a beam search takes the likeliest tokens and samples none; leave it out or set it to {off:g}"
            raise bad_parameter(field, value, rule)


def _check_constraint(request: GenerationRequest) -> None:
    if (constraint := request.constraint) is None:
        return
    if request.ignore_eos:
        rule = "a constrained text ends with EOS where it may end; leave out ignore_eos or the constraint"
        raise bad_parameter("ignore_eos", "set together with a constraint", rule)
    if constraint.kind is ConstraintKind.CHOICE:
        _check_choices(constraint)
    elif constraint.kind is not ConstraintKind.JSON_OBJECT:
        if not constraint.text:
            raise bad_parameter(f"constraint.{constraint.kind}", "empty", "it must say what the text is to match")
        check_bytes(f"constraint.{constraint.kind}", constraint.text, MAX_CONSTRAINT_BYTES)


def _check_choices(constraint: Constraint) -> None:
    check_count("constraint.choice", constraint.choices, MAX_CHOICES)
    if not any(constraint.choices):
        raise bad_parameter("constraint.choice", "empty", "there must be a text to choose")
    check_bytes("constraint.choice", "".join(constraint.choices), MAX_CONSTRAINT_BYTES)


def _check_prompt_form(prompt: Prompt) -> None:
    match prompt:
        case Chat():
            is_empty = not prompt.messages
        case Infill():
            # The control tokens around the gap are there to continue.
            is_empty = False
        case _:
            is_empty = not prompt
    if is_empty:
        raise bad_parameter("prompt", "empty", "there must be at least one token to continue; send some text")
    if isinstance(prompt, Chat):
        chat_form.check_chat(prompt)


def _byte_bound(max_model_len: int) -> int:
    """Returns the most bytes of a text that is worth tokenizing for a context of so many tokens."""
    return _BYTES_PER_TOKEN * max_model_len + _SLACK_BYTES


def _num_bytes(prompt: str | Chat | Infill) -> int:
    match prompt:
        case str():
            return len(prompt.encode())
        case Infill():
            return prompt.num_bytes
    return prompt.num_bytes + len(prompt.messages) * _BYTES_PER_MESSAGE
