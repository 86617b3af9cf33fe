"""GET /v1/models."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.frontend.errors import NotFound, Reason
from octavo.frontend.openai.answers import encode
from octavo.frontend.openai.door import Door


async def list_models(door: Door, request: Request) -> Response:
    """The model, under each of its names."""
    names = door.generation.model_names
    listed = {"object": "list", "data": [_model(door, name) for name in names]}
    return Response(encode(listed), media_type="application/json")


async def get_model(door: Door, request: Request) -> Response:
    """The model under one of its names."""
    if not (name := request.path_params["name"]):
        raise NotFound(Reason.ROUTE_NOT_FOUND, "the path names no model; leave out the slash at its end to list them")
    door.generation.check_model(name)
    return Response(encode(_model(door, name)), media_type="application/json")


def _model(door: Door, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": door.started_at,
        "owned_by": "octavo",
        "root": door.generation.model_name,
        "parent": None,
        "max_model_len": door.generation.max_model_len,
    }
