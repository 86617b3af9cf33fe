"""Serves GET /v1/models and /v1/models/{name} in the form of Anthropic's API."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from octavo.frontend.anthropic.answer import encode
from octavo.frontend.api.endpoint import Api
from octavo.frontend.errors import bad_parameter

_DEFAULT_LIMIT: Final = 20
_MAX_LIMIT: Final = 1000


async def list_models(api: Api, request: Request) -> Response:
    """Lists the model under each of its names, a page of them. Raises `InvalidRequest`."""
    parameters, names = request.query_params, list(api.generation.model_names)
    after, before = parameters.get("after_id"), parameters.get("before_id")
    if after is not None:
        names = names[_place("after_id", after, names) + 1 :]
    elif before is not None:
        names = names[: _place("before_id", before, names)]
    limit = _limit(parameters.get("limit", str(_DEFAULT_LIMIT)))
    page = names[-limit:] if before is not None else names[:limit]
    listed = {
        "data": [_model(api, name) for name in page],
        "has_more": len(page) < len(names),
        "first_id": page[0] if page else None,
        "last_id": page[-1] if page else None,
    }
    return Response(encode(listed), media_type="application/json")


async def get_model(api: Api, request: Request) -> Response:
    """Describes the model under one of its names."""
    name: str = request.path_params["name"]
    api.generation.check_model(name)
    return Response(encode(_model(api, name or api.generation.model_name)), media_type="application/json")


def _model(api: Api, name: str) -> dict[str, Any]:
    max_model_len = api.generation.max_model_len
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(api.started_at, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": max_model_len,
        # A prompt has one token at least.
        "max_tokens": max_model_len - 1,
    }


def _place(field: str, name: str, names: Sequence[str]) -> int:
    if name not in names:
        raise bad_parameter(field, repr(name[:64]), "it must be the id of a model")
    return names.index(name)


def _limit(text: str) -> int:
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(_MAX_LIMIT))
    if not is_number or not 1 <= int(text) <= _MAX_LIMIT:
        raise bad_parameter("limit", repr(text[:16]), f"it must be a number from 1 to {_MAX_LIMIT}")
    return int(text)
