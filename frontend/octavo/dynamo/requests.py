"""Reads Dynamo's requests, which are dictionaries, as messages of octavo.v1.

What would change an answer and cannot be had from Octavo is refused, never ignored. Stop strings, special tokens in the
text and the like are no concern of a cell: Dynamo's frontend makes the text of the tokens.
"""

from collections.abc import Mapping
from typing import Any, Final

from octavo.client.params import RequestOptions, SamplingParams, generate_request
from octavo.v1 import generation_pb2 as pb

# Fields of a request that need another kind of engine.
_UNSUPPORTED: Final = {
    "multi_modal_data": "Octavo serves text only",
    "encoder_result": "Octavo serves text only",
    "prompt_embeds": "send token ids",
    "prefill_result": "a cell computes prompt and answer itself; start no prefill workers beside it",
    "bootstrap_info": "a cell computes prompt and answer itself; start no prefill workers beside it",
}
# Dynamo's names of sampling options, all the same in the client.
_SAMPLING: Final = frozenset(
    {
        "best_of",
        "temperature",
        "top_p",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "allowed_token_ids",
    }
)
# What these ask for, Dynamo's frontend does.
_OF_THE_TEXT: Final = frozenset({"include_stop_str_in_output", "detokenize", "stop"})
_STOP_IDS: Final = ("stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden")
_STOPPING: Final = frozenset({"max_tokens", "min_tokens", "ignore_eos"})
_CONSTRAINTS: Final = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
_SEED_BITS: Final = 64
_MAX_PRIORITY: Final = 100


class RequestRefused(ValueError):
    """A request asks for what Octavo cannot do; says what, and what to do instead."""


def read_request(request: Mapping[str, Any], request_id: str) -> pb.GenerateRequest:
    """Returns the message that has a cell answer `request` in token ids. Raises `RequestRefused`."""
    for field, advice in _UNSUPPORTED.items():
        if request.get(field):
            raise RequestRefused(f"{field} cannot be had from Octavo: {advice}")
    try:
        return _message(request, request_id)
    except RequestRefused:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        raise RequestRefused(f"a field has an unusable value: {error}") from error


def _message(request: Mapping[str, Any], request_id: str) -> pb.GenerateRequest:
    sampling = _sampling(request)
    if request.get("require_reasoning") and sampling.keys() & {*_CONSTRAINTS.values()}:
        raise RequestRefused("Octavo holds the whole answer to a constraint, a reasoning phase too; leave out one")
    output = request.get("output_options") or {}
    logprobs: dict[str, Any] = {name: output.get(name) for name in ("logprobs", "prompt_logprobs")}
    params = SamplingParams(**sampling, **_stopping(request), **logprobs)
    message = generate_request(request["token_ids"], params, _options(request, request_id))
    message.response.text = False
    return message


def _sampling(request: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `SamplingParams` for the sampling options, those that Dynamo passes on unread too."""
    passed_on = (request.get("extra_args") or {}).get("sampling_options") or {}
    asked = _set({**(request.get("sampling_options") or {}), **passed_on})
    found: dict[str, Any] = {}
    for name, value in asked.items():
        match name:
            case "n" if value == 1:
                pass
            case "n":
                raise RequestRefused("n is above 1, but Dynamo takes one sequence of a worker; send several requests")
            case "top_k":
                found["top_k"] = max(value, 0)
            case "seed":
                found["seed"] = value % 2**_SEED_BITS
            case "logit_bias":
                found["logit_bias"] = {int(token_id): bias for token_id, bias in value.items()}
            case "bad_words_token_ids":
                found["banned_token_ids"] = _banned(value)
            case "guided_decoding":
                found |= _constraint(_set(value))
            case "use_beam_search" if not value:
                pass
            case _ if name in _SAMPLING:
                found[name] = value
            case _ if name not in _OF_THE_TEXT:
                raise _unknown("sampling_options", name)
    return found


def _banned(words: list[list[int]]) -> list[int]:
    if any(len(word) != 1 for word in words):
        raise RequestRefused("Octavo bans single tokens; leave out bad words of several tokens")
    return [token_id for [token_id] in words]


def _constraint(guided: Mapping[str, Any]) -> dict[str, Any]:
    for name in guided:
        if name not in _CONSTRAINTS:
            raise _unknown("sampling_options.guided_decoding", name)
    return {_CONSTRAINTS[name]: value for name, value in guided.items() if value != []}


def _stopping(request: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `SamplingParams` for the stop conditions."""
    asked = _set(request.get("stop_conditions") or {})
    for name in asked:
        if name not in (*_STOPPING, *_STOP_IDS, *_OF_THE_TEXT):
            raise _unknown("stop_conditions", name)
    if {"max_tokens", "min_tokens"} <= asked.keys():
        # Of a request that it moves, Dynamo lowers the former alone by what was generated elsewhere.
        asked["min_tokens"] = min(asked["min_tokens"], asked["max_tokens"])
    stop_ids = {token_id for name in _STOP_IDS for token_id in asked.get(name, ())}
    return {**{name: asked[name] for name in _STOPPING & asked.keys()}, "stop_token_ids": sorted(stop_ids)}


def _options(request: Mapping[str, Any], request_id: str) -> RequestOptions:
    routing = _set(request.get("routing") or {})
    if adapter := routing.get("lora_name"):
        raise RequestRefused(f"the adapter {adapter} cannot be had: Octavo serves no adapters")
    if rank := routing.get("dp_rank"):
        raise RequestRefused(f"there is no data-parallel rank {rank}: a cell has one, 0, and chooses the worker itself")
    # To Dynamo it is a hint, for which it knows no bounds.
    priority = max(-_MAX_PRIORITY, min(routing.get("priority", 0), _MAX_PRIORITY))
    return RequestOptions(request_id=request_id, priority=priority, cache_salt=routing.get("cache_salt", ""))


def _set(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _unknown(where: str, name: str) -> RequestRefused:
    return RequestRefused(f"{where}.{name} cannot be had from Octavo; leave it out")
