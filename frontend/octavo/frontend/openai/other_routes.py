"""Serves the routes that generate nothing: models, tokenizer, health, metrics and version."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.frontend.api.body import read_call, unknown_fields_header, unsupported_field
from octavo.frontend.api.endpoint import VERSION, Api, caller_of, check_trusted
from octavo.frontend.errors import NotFound, Reason, bad_parameter
from octavo.frontend.http.connection import while_connected
from octavo.frontend.openai.answers import encode
from octavo.frontend.openai.logprobs import token_text
from octavo.frontend.openai.messages import chat_of, tools_of
from octavo.frontend.openai.schemas import TOKENIZE_UNSUPPORTED, DetokenizeBody, TokenizeBody
from octavo.frontend.request.request import MAX_LABEL_LENGTH, Prompt
from octavo.frontend.request.validation import check_count
from octavo.frontend.stream.metrics import LOAD_METRICS
from octavo.runtime.telemetry import metrics


async def list_models(api: Api, request: Request) -> Response:
    """Lists the model under each of its names."""
    names = api.generation.model_names
    listed = {"object": "list", "data": [_model(api, name) for name in names]}
    return Response(encode(listed), media_type="application/json")


async def get_model(api: Api, request: Request) -> Response:
    """Describes the model under one of its names."""
    if not (name := request.path_params["name"]):
        raise NotFound(Reason.ROUTE_NOT_FOUND, "the path names no model; leave out the slash at its end to list them")
    api.generation.check_model(name)
    return Response(encode(_model(api, name)), media_type="application/json")


def _model(api: Api, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": api.started_at,
        "owned_by": "octavo",
        "root": api.generation.model_name,
        "parent": None,
        "max_model_len": api.generation.max_model_len,
    }


async def tokenize(api: Api, request: Request) -> Response:
    """Answers with the token ids of a text or of a chat, in vLLM's form."""
    body, unknown = await read_call(request, TokenizeBody, TOKENIZE_UNSUPPORTED, api.generation.beginnings)
    api.generation.check_model(body.model or "")
    prompt = _prompt(api, body, unknown)
    adds, caller = body.add_special_tokens is not False, caller_of(request)
    ids = await while_connected(request, api.generation.encode(prompt, caller, add_special_tokens=adds))
    found: dict[str, Any] = {"count": len(ids), "max_model_len": api.generation.max_model_len, "tokens": ids}
    if body.return_token_strs:
        found["token_strs"] = [token_text(api.generation.tokenizer, token_id) for token_id in ids]
    return Response(encode(found), headers=unknown_fields_header(unknown), media_type="application/json")


async def detokenize(api: Api, request: Request) -> Response:
    """Answers with the text of token ids, special tokens included, in vLLM's form."""
    body, unknown = await read_call(request, DetokenizeBody, {}, api.generation.beginnings)
    api.generation.check_model(body.model or "")
    check_count("tokens", body.tokens, api.generation.max_model_len)
    decoding = api.generation.decode(body.tokens, caller_of(request), skip_special_tokens=False)
    text = await while_connected(request, decoding)
    found = {"prompt": text}
    return Response(encode(found), headers=unknown_fields_header(unknown), media_type="application/json")


def _prompt(api: Api, body: TokenizeBody, ignored: list[str]) -> Prompt:
    if (body.prompt is None) == (not body.messages):
        raise bad_parameter("prompt", "not what there must be", "either prompt or messages must be set")
    if body.prompt is not None:
        return body.prompt
    if body.add_special_tokens:
        raise unsupported_field("add_special_tokens of a chat", "its template has all that it needs")
    return chat_of(body, tools_of(body, ignored), api.generation.tokenizer, ignored)


async def livez(api: Api, request: Request) -> Response:
    """Says that the event loop turns."""
    return _json({"status": "alive"})


async def health(api: Api, request: Request) -> Response:
    """Answers 200 while requests get on: the scheduler answers, or has been away for less than requests survive."""
    return _state("healthy" if api.generation.makes_progress else "stuck", api.generation.makes_progress)


async def ready(api: Api, request: Request) -> Response:
    """Answers 200 while a new request would be accepted and could run at once."""
    return _state("ready" if api.generation.ready else "not ready", api.generation.ready)


async def show_metrics(api: Api, request: Request) -> Response:
    """Answers with the metrics of this process, for Prometheus: the load alone for a tenant or a stranger, where that
    is public. Raises `Unauthenticated` for these where it is not."""
    if api.config.public_load_metrics and not caller_of(request).trusted:
        body, content_type = metrics.render(LOAD_METRICS)
    else:
        check_trusted(request, "the metrics show what all tenants do")
        body, content_type = metrics.render()
    return Response(body, headers={"content-type": content_type})


async def reset_prefix_cache(api: Api, request: Request) -> Response:
    """Has the schedulers forget what is cached, or what of it is behind the parameter `cache_salt`. What vLLM's
    parameters ask for holds whether or not they are there. Raises `Unauthenticated` for a tenant, `InvalidRequest`,
    `Unavailable`."""
    check_trusted(request, "a reset concerns all tenants")
    parameters = request.query_params
    if unknown := parameters.keys() - {"cache_salt", "reset_running_requests", "reset_external"}:
        raise bad_parameter(min(unknown), "not known here", "use cache_salt, or none to reset all")
    salt = parameters.get("cache_salt")
    if salt is not None and not 1 <= len(salt) <= MAX_LABEL_LENGTH:
        rule = f"use 1 to {MAX_LABEL_LENGTH} characters, or leave it out to reset all"
        raise bad_parameter("cache_salt", f"{len(salt)} characters long", rule)
    found = await while_connected(request, api.generation.reset_prefix_caches(salt))
    return _json(
        {"dropped_blocks": found.num_blocks, "blocks_in_use": found.num_in_use, "pinned_prefixes": found.num_prefixes}
    )


async def version(api: Api, request: Request) -> Response:
    return _json({"version": VERSION})


async def load(api: Api, request: Request) -> Response:
    """Answers with the number of requests that are held now, in vLLM's form."""
    return _json({"server_load": api.generation.num_running})


def _state(status: str, is_good: bool) -> Response:
    return _json({"status": status}, 200 if is_good else 503)


def _json(content: dict[str, object], status: int = 200) -> Response:
    return Response(encode(content), status, media_type="application/json")
