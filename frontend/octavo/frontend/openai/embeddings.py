"""Serves POST /v1/embeddings: vectors of texts."""

import asyncio
import base64
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

import msgspec
from msgspec import Raw
from starlette.requests import Request
from starlette.responses import Response

from octavo.frontend.api.body import UNREADABLE, given, read_call, unknown_fields_header
from octavo.frontend.api.endpoint import Api, caller_of, fresh_id, origin_of
from octavo.frontend.api.sampling import seconds
from octavo.frontend.errors import InvalidRequest, bad_parameter
from octavo.frontend.http.connection import while_connected
from octavo.frontend.openai.answers import encode
from octavo.frontend.openai.schemas import POOLING_UNSUPPORTED, EmbeddingBody, PoolingBody
from octavo.frontend.request.pooling import PoolingRequest, check_dimensions, check_inputs, numbers_of, shortened
from octavo.frontend.stream.pooling import Output, outputs
from octavo.frontend.stream.preparation import check_task
from octavo.wire.pooling import PoolingTask

# What a client asks for in place of a number of tokens: as many as the model takes.
_ALL: Final = -1

_decode_text = msgspec.json.Decoder(str).decode
_decode_ids = msgspec.json.Decoder(list[int]).decode
_decode_texts = msgspec.json.Decoder(list[str]).decode
_decode_lists = msgspec.json.Decoder(list[list[int]]).decode

Input = str | list[int]


async def embeddings(api: Api, request: Request) -> Response:
    """Answers one call, in OpenAI's form."""
    body, unknown = await read_call(request, EmbeddingBody, POOLING_UNSUPPORTED, api.generation.beginnings)
    if body.encoding_format not in (None, "float", "base64"):
        raise bad_parameter("encoding_format", repr(body.encoding_format), "it must be float or base64")
    inputs = read_inputs("input", body.input)
    pooling = api.generation.pooling_model
    if pooling is not None:
        check_task(pooling, PoolingTask.EMBED, api.generation.model_name)
        if body.dimensions is not None:
            check_dimensions(body.dimensions, pooling.num_outputs)
    prompt = api.generation.pooling_defaults.prompt(body.prompt_name)
    asks = asking(api, request, body, PoolingTask.EMBED)
    asked = [asks(each, prompt=prompt) for each in inputs]
    found = await run(api, request, asked, body)
    data = []
    for index, output in enumerate(found):
        # Others get their turn between vectors that are written one number after the other.
        if index % 64 == 63:
            await asyncio.sleep(0)
        vector = numbers_of(output.values)
        if body.dimensions is not None:
            check_dimensions(body.dimensions, len(vector))
            vector = shortened(vector, body.dimensions)
        data.append({"object": "embedding", "index": index, "embedding": _written(vector, body.encoding_format)})
    answer = {
        "id": f"embd-{body.request_id or fresh_id()}",
        "object": "list",
        "created": api.started_at,
        "model": body.model or api.generation.model_name,
        "data": data,
        "usage": usage_of(found),
    }
    return Response(encode(answer), headers=unknown_fields_header(unknown), media_type="application/json")


def _written(vector: "array[float]", form: str | None) -> str | list[float]:
    return base64.b64encode(vector.tobytes()).decode() if form == "base64" else vector.tolist()


# -- what all calls for outputs share ---------------------------------------------------------------------------


def read_inputs(field: str, raw: Raw) -> list[Input]:
    """Returns all texts, in order, each a text or token ids. Raises `InvalidRequest` for anything else, and for none or
    too many."""
    text = given(raw)
    try:
        inputs = _read(field, text)
    except UNREADABLE as error:
        raise _wrong_form(field) from error
    check_inputs(field, len(inputs))
    return inputs


def _read(field: str, text: bytes) -> list[Input]:
    match text[:1], text[1:].lstrip()[:1]:
        case b'"', _:
            return [_decode_text(text)]
        case b"[", b'"':
            return list(_decode_texts(text))
        case b"[", b"[":
            # Counted before lists are made.
            check_inputs(field, text.count(b"[") - 1)
            return list(_decode_lists(text))
        case b"[", b"]":
            return []
        case b"[", _:
            return [_decode_ids(text)]
    raise _wrong_form(field)


def _wrong_form(field: str) -> InvalidRequest:
    return bad_parameter(
        field, "of another form", "it must be a text, token ids, or a list of texts or of lists of token ids"
    )


class Asks(Protocol):
    """Makes the request for the output of one text, which `prompt` comes before, or of a pair of texts."""

    def __call__(self, text: Input, *, pair: str | None = None, prompt: str = "") -> PoolingRequest: ...


def asking(api: Api, request: Request, body: PoolingBody, task: PoolingTask) -> Asks:
    """Returns what makes a call's requests, as its fields say. Raises `InvalidRequest`."""
    cut = body.truncate_prompt_tokens
    origin = origin_of(request)
    # Read once, not for each text.
    fields: dict[str, Any] = {
        "task": task,
        "truncate_to": api.generation.max_model_len if cut == _ALL else cut,
        "add_special_tokens": body.add_special_tokens is not False,
        "model": body.model or "",
        "tenant": origin["tenant"],
        # vLLM counts the other way.
        "priority": -(body.priority or 0),
        "salt": body.cache_salt or "",
        "max_queue_s": seconds("max_queue_time", body.max_queue_time),
        "traceparent": origin["traceparent"],
    }

    def asks(text: Input, *, pair: str | None = None, prompt: str = "") -> PoolingRequest:
        return PoolingRequest(prompt + text if isinstance(text, str) and text else text, pair=pair, **fields)

    return asks


async def run(api: Api, request: Request, asked: Sequence[PoolingRequest], body: PoolingBody) -> list[Output]:
    """Runs all that is asked for, until the call's time is up or its client is gone; returns the outputs in order.
    Raises `ServiceError`."""
    api.generation.check_model(body.model or "")
    timeout_s = seconds("timeout", body.timeout)
    deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
    if len(asked) == 1 and body.request_id:
        asked = [replace(asked[0], request_id=body.request_id)]
    caller = caller_of(request)
    found = await while_connected(request, outputs(lambda one: api.generation.pool(one, caller, deadline), asked))
    request.state.cached_tokens = _cached(found)
    return found


def usage_of(found: Sequence[Output]) -> dict[str, Any]:
    """Returns the usage object of a call."""
    tokens = sum(output.prompt_tokens for output in found)
    details = {"cached_tokens": _cached(found)}
    return {"prompt_tokens": tokens, "total_tokens": tokens, "prompt_tokens_details": details}


def _cached(found: Sequence[Output]) -> int:
    return sum(output.cached_tokens for output in found)
