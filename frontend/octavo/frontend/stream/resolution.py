"""Puts in what a request leaves out, and checks it against the model and what the workers can hold."""

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from octavo.frontend.errors import InvalidRequest, NotFound, Reason, bad_parameter
from octavo.frontend.request.request import GenerationRequest
from octavo.frontend.request.validation import check_room
from octavo.frontend.text.model_defaults import ModelDefaults
from octavo.wire.requests import ServiceStatus
from octavo.wire.sampling import MAX_STOP_TOKEN_IDS, SamplingParams

T = TypeVar("T")

# Logprobs of a prompt travel in one message, of at most 32 MiB, at up to 17 bytes each.
MAX_PROMPT_LOGPROBS = 1 << 20


@dataclass(frozen=True)
class Limits:
    """What the model and the workers behind it allow: in tokens, and in sequences that run side by side."""

    vocab_size: int
    max_model_len: int
    capacity_tokens: int
    max_parallel: int
    block_size: int = 1


def model_len(defaults: ModelDefaults, status: ServiceStatus | None) -> int:
    """The context in tokens: the model's, or less where its workers were started with less."""
    info = status.model if status else None
    return min(defaults.max_model_len, info.max_model_len) if info else defaults.max_model_len


def resolve_sampling(
    request: GenerationRequest,
    prompt_token_ids: Sequence[int],
    defaults: ModelDefaults,
    limits: Limits,
    grammar: str = "",
) -> SamplingParams:
    """The parameters in force; `grammar` is what the request's constraint became.

    Raises `InvalidRequest` for token ids, a length or a limit that cannot be.
    """
    _check_parallel(request, limits.max_parallel)
    check_token_ids("prompt token id", prompt_token_ids, limits.vocab_size)
    for field in ("stop_token_ids", "logit_bias", "allowed_token_ids", "banned_token_ids"):
        check_token_ids(field, getattr(request, field), limits.vocab_size)
    _check_prompt_logprobs(request.prompt_logprobs, len(prompt_token_ids))
    stop_token_ids = _stop_token_ids(request, defaults)
    _check_choice(request, stop_token_ids, limits.vocab_size)
    if request.beam is not None:
        defaults = defaults.without_sampling()
    return SamplingParams(
        temperature=_or(request.temperature, defaults.temperature),
        top_k=_or(request.top_k, defaults.top_k),
        top_p=_or(request.top_p, defaults.top_p),
        min_p=_or(request.min_p, defaults.min_p),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        repetition_penalty=_or(request.repetition_penalty, defaults.repetition_penalty),
        seed=_or(request.seed, secrets.randbits(64)),
        num_sequences=request.num_sequences if request.best_of is None else request.best_of,
        beam=request.beam,
        max_tokens=_max_tokens(request, len(prompt_token_ids), limits, defaults.max_new_tokens),
        min_tokens=request.min_new_tokens,
        stop_token_ids=stop_token_ids,
        logit_bias=sorted(request.logit_bias.items()),
        allowed_token_ids=sorted(set(request.allowed_token_ids)),
        banned_token_ids=sorted(set(request.banned_token_ids)),
        # The best are known by their logprobs, whoever sees these.
        logprobs=0 if request.top_logprobs is None and request.best_of is not None else request.top_logprobs,
        prompt_logprobs=request.prompt_logprobs,
        grammar=grammar,
    )


def check_token_ids(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Raises `InvalidRequest` for an id that the vocabulary does not have."""
    # Without a loop in Python, for this runs on the event loop.
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < vocab_size:
            raise bad_parameter(name, token_id, f"the vocabulary ends at {vocab_size - 1}")


def find_prefix(name: str, known: Mapping[str, list[int]], *, tells_names: bool) -> list[int]:
    """The token ids of a pinned prefix. Raises `NotFound`, naming those that are known to whom they may be told."""
    if name in known:
        return known[name]
    names = ", ".join(map(repr, sorted(known))) or "none"
    others = f"pinned are: {names[:2048]}" if tells_names else "ask who runs this server for the names"
    raise NotFound(Reason.PREFIX_NOT_FOUND, f"no prefix {name[:256]!r} is pinned; {others}", pinned_prefix=name[:256])


def _or(asked: T | None, default: T) -> T:
    return default if asked is None else asked


def _check_parallel(request: GenerationRequest, most: int) -> None:
    if request.parallel > most:
        field = "beam_width" if request.beam else "num_sequences" if request.best_of is None else "best_of"
        raise bad_parameter(field, request.parallel, f"at most {most} sequences run side by side here; lower it")


def _check_prompt_logprobs(top: int | None, prompt_tokens: int) -> None:
    if top is not None and prompt_tokens * (1 + top) > MAX_PROMPT_LOGPROBS:
        rule = f"with {prompt_tokens} prompt tokens that is more than {MAX_PROMPT_LOGPROBS} logprobs in all; lower it"
        raise bad_parameter("prompt_logprobs", top, rule)


def _check_choice(request: GenerationRequest, stop_token_ids: Sequence[int], vocab_size: int) -> None:
    """Some token must be left to choose, also before `min_new_tokens`."""
    excluded = set(request.banned_token_ids) | set(stop_token_ids if request.min_new_tokens else ())
    allowed = set(request.allowed_token_ids)
    if (len(allowed - excluded) if allowed else vocab_size - len(excluded)) < 1:
        field = "allowed_token_ids" if allowed else "banned_token_ids"
        rule = "what is banned, and what stops before min_new_tokens, must leave a token to choose"
        raise bad_parameter(field, "all excluded", rule)


def _stop_token_ids(request: GenerationRequest, defaults: ModelDefaults) -> list[int]:
    eos = frozenset() if request.ignore_eos else defaults.eos_token_ids
    ids = sorted(eos | set(request.stop_token_ids))
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise bad_parameter("stop_token_ids", f"{len(ids)} ids with EOS", f"at most {MAX_STOP_TOKEN_IDS} may be")
    return ids


def _max_tokens(request: GenerationRequest, prompt_tokens: int, limits: Limits, default: int | None) -> int:
    check_room(prompt_tokens, limits.max_model_len)
    room, asked = limits.max_model_len - prompt_tokens, request.max_new_tokens
    if asked is not None and asked > room:
        raise bad_parameter(
            "max_new_tokens",
            asked,
            f"the prompt's {prompt_tokens} tokens leave {room} of the context's {limits.max_model_len};"
            " lower it, or leave it out to use what there is",
        )
    room = min(room, _room_in_cache(request, prompt_tokens, limits))
    if request.min_new_tokens > room:
        raise bad_parameter("min_new_tokens", request.min_new_tokens, f"there is room for {room} new tokens; lower it")
    # What is only recommended gives way to what is asked for, and to what there is room for.
    return asked or (room if default is None else min(room, max(default, request.min_new_tokens)))


def _room_in_cache(request: GenerationRequest, prompt_tokens: int, limits: Limits) -> int:
    """New tokens that fit the cache with nothing shared, each sequence in blocks of its own."""
    needed = prompt_tokens + max(request.max_new_tokens or 1, request.min_new_tokens)
    capacity_tokens = limits.capacity_tokens
    share = capacity_tokens // request.parallel // limits.block_size * limits.block_size
    if needed > share:
        sequences = f"{request.parallel} sequences of {needed}" if request.parallel > 1 else str(needed)
        raise InvalidRequest(
            Reason.NEVER_FITS_KV,
            f"the request needs room for {sequences} tokens and the largest worker's KV cache holds"
            f" {capacity_tokens}; shorten the prompt, lower max_new_tokens or the number of sequences, or give the"
            " workers more cache",
            needed_tokens=needed * request.parallel,
            capacity_tokens=capacity_tokens,
        )
    return share - prompt_tokens
