"""Converts errors to what HTTP clients get: a status, and OpenAI's error object."""

import math
import re
from typing import Final

import msgspec
from starlette.responses import Response

from octavo.frontend.errors import Reason, ServiceError, Unauthenticated, Unsupported
from octavo.frontend.request.request import FIELDS

# Names of fields inside the frontend -> their names in OpenAI's API.
_NAMES: Final = {name: field.called for name, field in FIELDS.items() if name != field.called} | {
    "beam_width": "n",
    "chat.messages": "messages",
    "chat.messages.role": "messages.role",
    "text_or_ids": "prompt",
}
# Names that single routes have for these fields, and for the prompt, which some errors are about and do not name.
_PROMPT: Final = {"/v1/chat/completions": "messages", "/v1/responses": "input"}
_ROUTE_NAMES: Final[dict[str, dict[str, str]]] = {
    "/v1/responses": {"max_tokens": "max_output_tokens", "constraint": "text.format"},
    "/v1/chat/completions": {"constraint": "response_format"},
    "/v1/completions": {"constraint": "response_format"},
    "/detokenize": {"ids": "tokens"},
}
_ABOUT_THE_PROMPT: Final = {"prompt", "prompt token id", "text_or_ids", "chat.messages"}
_NAME: Final = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, sorted(_NAMES, key=len, reverse=True)))})(?!\w)")


def name_field(error: ServiceError, path: str) -> None:
    """Replaces the name of the field that `error` is about, if any, by its name in the body of the route `path`."""
    field = error.metadata.get("field", "")
    if isinstance(error, Unsupported):
        # Such an error names the body's own field already.
        return
    if field in _ABOUT_THE_PROMPT or error.reason is Reason.PROMPT_TOO_LONG:
        error.metadata["field"] = _PROMPT.get(path, "prompt")
    elif field:
        name = _NAMES.get(field, field)
        error.metadata["field"] = _ROUTE_NAMES.get(path, {}).get(name, name)


def error_object(error: ServiceError) -> dict[str, object]:
    """Returns OpenAI's error object; `code` is the error's reason in lower case."""
    field = error.metadata.get("field")
    return {
        "message": _NAME.sub(lambda found: _NAMES[found[0]], str(error)),
        "type": error.terms.openai_type,
        "param": _NAMES.get(field, field) if field else None,
        "code": error.reason.lower(),
    }


def error_body(error: ServiceError) -> bytes:
    """Returns the error as JSON text."""
    return msgspec.json.encode({"error": error_object(error)})


def error_response(error: ServiceError, status: int | None = None) -> Response:
    """Returns the error as a response; `status` replaces the error's own status."""
    headers = {}
    if error.retry_after_s is not None:
        # Whole seconds, and not before there is room.
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    return Response(error_body(error), status or error.terms.status, headers, "application/json")
