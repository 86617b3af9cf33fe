"""Checks a request against the rules and the model, and puts in what it leaves out.

In two steps, because the first needs nothing but the request and the second its tokens and what the workers can hold.
"""

import secrets
from collections.abc import Sequence, Sized
from dataclasses import dataclass

from octavo.frontend.errors import InvalidRequest, Reason, bad_parameter
from octavo.frontend.model_defaults import ModelDefaults
from octavo.frontend.tokenizer import ChatMessage
from octavo.wire.sampling import MAX_STOP_TOKEN_IDS, SamplingParams

MAX_REQUEST_ID_LENGTH = 128
MAX_STOP_STRINGS = 8
MAX_STOP_STRING_BYTES = 256
MAX_TEMPERATURE = 100.0
# Templates build control tokens from roles, so only these are let through.
ROLES = ("system", "developer", "user", "assistant", "tool")
# No tokenizer in use needs more bytes for a token on average; what is longer cannot fit and is not worth tokenizing.
_BYTES_PER_TOKEN = 8
_SLACK_BYTES = 1024
# Every message of a chat costs at least a token of the template's own.
_BYTES_PER_MESSAGE = _BYTES_PER_TOKEN

# Text, token ids, or a chat.
Prompt = str | list[int] | tuple[ChatMessage, ...]


@dataclass(frozen=True)
class GenerationRequest:
    """What a client asks for, free of any door's message types. None means "left out"."""

    prompt: Prompt
    request_id: str = ""
    model: str = ""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    max_new_tokens: int | None = None
    stop_strings: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True


@dataclass(frozen=True)
class Limits:
    """What the model and the workers behind it allow, in tokens."""

    vocab_size: int
    max_model_len: int
    capacity_tokens: int


def check_form(request: GenerationRequest) -> None:
    """Raises `InvalidRequest` for what is wrong whatever the model."""
    if len(request.request_id) > MAX_REQUEST_ID_LENGTH or not request.request_id.isprintable():
        raise bad_parameter(
            "request_id",
            f"{len(request.request_id)} characters",
            f"it may hold at most {MAX_REQUEST_ID_LENGTH} printable ones",
        )
    _check_sampling(request)
    _check_stopping(request)
    _check_prompt_form(request.prompt)


def _check_sampling(request: GenerationRequest) -> None:
    temperature, top_p = request.temperature, request.top_p
    # Written so that NaN fails too.
    if temperature is not None and not 0.0 <= temperature <= MAX_TEMPERATURE:
        raise bad_parameter("temperature", temperature, f"it must be between 0 (greedy) and {MAX_TEMPERATURE:g}")
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise bad_parameter("top_p", top_p, "it must be above 0 and at most 1 (off)")
    if request.top_k is not None and not 0 <= request.top_k < 2**31:
        raise bad_parameter("top_k", request.top_k, f"it must be between 0 (off) and {2**31 - 1}")
    if request.seed is not None and not 0 <= request.seed < 2**64:
        raise bad_parameter("seed", request.seed, "it must be an unsigned 64-bit number")


def _check_stopping(request: GenerationRequest) -> None:
    if request.max_new_tokens is not None and request.max_new_tokens < 1:
        raise bad_parameter(
            "max_new_tokens", request.max_new_tokens, "it must be at least 1; leave it out for no limit"
        )
    check_count("stop_strings", request.stop_strings, MAX_STOP_STRINGS)
    check_count("stop_token_ids", request.stop_token_ids, MAX_STOP_TOKEN_IDS)
    for stop in request.stop_strings:
        if not 1 <= len(stop.encode()) <= MAX_STOP_STRING_BYTES:
            rule = f"each must have 1 to {MAX_STOP_STRING_BYTES} bytes"
            raise bad_parameter("stop_strings", f"one of {len(stop.encode())} bytes", rule)


def check_count(field: str, values: Sized, most: int) -> None:
    """Raises `InvalidRequest` for a field that is repeated more often than `most` times."""
    if len(values) > most:
        raise bad_parameter(field, f"repeated {len(values)} times", f"at most {most} may be")


def _check_prompt_form(prompt: Prompt) -> None:
    if not prompt:
        raise bad_parameter("prompt", "empty", "there must be at least one token to continue; send some text")
    for message in prompt if isinstance(prompt, tuple) else ():
        if message.role not in ROLES:
            raise bad_parameter("chat.messages.role", repr(message.role[:64]), f"it must be one of {', '.join(ROLES)}")


def check_prompt_size(prompt: Prompt, max_model_len: int) -> None:
    """Raises `InvalidRequest` for a prompt that cannot fit, before any work is spent on tokenizing it."""
    size = _num_bytes(prompt)
    bound = _BYTES_PER_TOKEN * max_model_len + _SLACK_BYTES
    if size > bound:
        raise InvalidRequest(
            Reason.PROMPT_TOO_LONG,
            f"the prompt has {size} bytes, more than the {bound} that could fit a context of {max_model_len} tokens;"
            " shorten it",
            prompt_bytes=size,
            max_prompt_bytes=bound,
        )


def _num_bytes(prompt: Prompt) -> int:
    match prompt:
        case str():
            return len(prompt.encode())
        case tuple():
            return sum(len(message.content.encode()) + _BYTES_PER_MESSAGE for message in prompt)
    return 0


def resolve_sampling(
    request: GenerationRequest, prompt_token_ids: Sequence[int], defaults: ModelDefaults, limits: Limits
) -> SamplingParams:
    """The parameters in force. Raises `InvalidRequest` for token ids, a length or a limit that cannot be."""
    check_token_ids("prompt token id", prompt_token_ids, limits.vocab_size)
    check_token_ids("stop_token_ids", request.stop_token_ids, limits.vocab_size)
    return SamplingParams(
        temperature=defaults.temperature if request.temperature is None else request.temperature,
        top_k=defaults.top_k if request.top_k is None else request.top_k,
        top_p=defaults.top_p if request.top_p is None else request.top_p,
        seed=secrets.randbits(64) if request.seed is None else request.seed,
        max_tokens=_max_tokens(request.max_new_tokens, len(prompt_token_ids), limits),
        stop_token_ids=_stop_token_ids(request, defaults),
    )


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises `InvalidRequest` for an id that the vocabulary does not have."""
    # Without a loop in Python, for this runs on the event loop.
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < vocab_size:
            raise bad_parameter(name, token_id, f"the vocabulary ends at {vocab_size - 1}")


def check_room(prompt_tokens: int, max_model_len: int) -> None:
    """Raises `InvalidRequest` for a prompt that leaves no room for an answer."""
    if prompt_tokens >= max_model_len:
        raise InvalidRequest(
            Reason.PROMPT_TOO_LONG,
            f"the prompt has {prompt_tokens} tokens and the context {max_model_len}, which leaves no room for an"
            " answer; shorten the prompt",
            prompt_tokens=prompt_tokens,
            max_model_len=max_model_len,
        )


def _stop_token_ids(request: GenerationRequest, defaults: ModelDefaults) -> list[int]:
    eos = frozenset() if request.ignore_eos else defaults.eos_token_ids
    ids = sorted(eos | set(request.stop_token_ids))
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise bad_parameter("stop_token_ids", f"{len(ids)} ids with EOS", f"at most {MAX_STOP_TOKEN_IDS} may be")
    return ids


def _max_tokens(asked: int | None, prompt_tokens: int, limits: Limits) -> int:
    check_room(prompt_tokens, limits.max_model_len)
    room = limits.max_model_len - prompt_tokens
    if asked is not None and asked > room:
        raise bad_parameter(
            "max_new_tokens",
            asked,
            f"the prompt's {prompt_tokens} tokens leave {room} of the context's {limits.max_model_len};"
            " lower it, or leave it out to use what there is",
        )
    return _fit_cache(asked, prompt_tokens, limits)


def _fit_cache(asked: int | None, prompt_tokens: int, limits: Limits) -> int:
    needed = prompt_tokens + (asked or 1)
    if needed > limits.capacity_tokens:
        raise InvalidRequest(
            Reason.NEVER_FITS_KV,
            f"the request needs room for {needed} tokens and the largest worker's KV cache holds"
            f" {limits.capacity_tokens}; shorten the prompt or lower max_new_tokens, or give the workers more cache",
            needed_tokens=needed,
            capacity_tokens=limits.capacity_tokens,
        )
    return asked or min(limits.max_model_len, limits.capacity_tokens) - prompt_tokens
