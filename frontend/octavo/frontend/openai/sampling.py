"""The sampling fields of completions and chats, in the terms of a `GenerationRequest`."""

from typing import Any, Final

from octavo.frontend.errors import bad_parameter
from octavo.frontend.openai.body import Reading
from octavo.frontend.openai.schemas import Sampling
from octavo.frontend.openai.structured import constraint_of
from octavo.wire.requests import MAX_PRIORITY
from octavo.wire.sampling import BeamSearch, EarlyStopping

_EARLY_STOPPING: Final = {
    None: EarlyStopping.OFF,
    False: EarlyStopping.OFF,
    True: EarlyStopping.ON,
    "never": EarlyStopping.NEVER,
}


def sampling_of(body: Sampling, reading: Reading) -> dict[str, Any]:
    """Arguments of `GenerationRequest`. Raises `InvalidRequest`."""
    beam = _beam(body) if body.use_beam_search else None
    return {
        "model": body.model or "",
        "temperature": reading.temperature if body.temperature is None and not beam else body.temperature,
        "top_p": body.top_p,
        # What vLLM's users write for "off".
        "top_k": 0 if body.top_k == -1 else body.top_k,
        "min_p": body.min_p,
        "frequency_penalty": body.frequency_penalty,
        "presence_penalty": body.presence_penalty,
        "repetition_penalty": body.repetition_penalty,
        "seed": _seed(body.seed),
        "num_sequences": number_of_choices(body),
        "best_of": None if beam else body.best_of,
        "beam": beam,
        "logit_bias": body.logit_bias or {},
        "allowed_token_ids": tuple(body.allowed_token_ids or ()),
        "min_new_tokens": body.min_tokens or 0,
        "stop_strings": _stop(body.stop),
        "stop_token_ids": tuple(body.stop_token_ids or ()),
        "include_stop": bool(body.include_stop_str_in_output),
        "ignore_eos": bool(body.ignore_eos),
        "skip_special_tokens": body.skip_special_tokens is not False,
        "prompt_logprobs": body.prompt_logprobs,
        # A stream's pieces are whole where it has an end only.
        "incremental": bool(body.stream),
        "priority": _priority(body.priority),
        "salt": body.cache_salt or "",
        "pinned_prefix": body.pinned_prefix or "",
        "max_queue_s": seconds("max_queue_time", body.max_queue_time),
        "constraint": constraint_of(body, reading),
    }


def number_of_choices(body: Sampling) -> int:
    """How many answers each prompt gets."""
    return 1 if body.n is None else body.n


def seconds(field: str, value: float | None) -> float | None:
    """A time that is a field. Raises `InvalidRequest` for one that is none."""
    if value is not None and not 0 < value <= 1e6:
        raise bad_parameter(field, value, "it must be above 0 and at most 1000000 seconds")
    return value


def _seed(seed: int | None) -> int | None:
    """Negative ones are of signed 64-bit numbers, and mean what these would as unsigned ones."""
    return seed + 2**64 if seed is not None and -(2**63) <= seed < 0 else seed


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    """An empty text, which some clients send for none, stops nothing."""
    return (stop,) if stop and isinstance(stop, str) else tuple(stop or ())


def _priority(priority: int | None) -> int:
    """vLLM's counts the other way: lower is earlier."""
    if priority is not None and abs(priority) > MAX_PRIORITY:
        raise bad_parameter("priority", priority, f"it must be between -{MAX_PRIORITY} and {MAX_PRIORITY}")
    return -(priority or 0)


def _beam(body: Sampling) -> BeamSearch:
    return BeamSearch(
        width=number_of_choices(body) if body.best_of is None else body.best_of,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        early_stopping=_EARLY_STOPPING[body.early_stopping],
    )
