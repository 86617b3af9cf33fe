"""Converts errors to what HTTP clients get: a status, and the error object of OpenAI's API or of Anthropic's."""

import math
import re
from typing import Final

import msgspec
from starlette.responses import Response
from starlette.types import Scope

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
_PROMPT: Final = {
    "/v1/chat/completions": "messages",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "messages",
    "/v1/responses": "input",
}
_ROUTE_NAMES: Final[dict[str, dict[str, str]]] = {
    "/v1/responses": {"max_tokens": "max_output_tokens", "constraint": "text.format"},
    "/v1/chat/completions": {"constraint": "response_format"},
    "/v1/completions": {"constraint": "response_format"},
    "/detokenize": {"ids": "tokens"},
}
# Names that Anthropic's API has for fields inside the frontend, where they differ from OpenAI's.
_ANTHROPIC_NAMES: Final = _NAMES | {"stop_strings": "stop_sequences"}
# Fields that Anthropic's clients leave out by themselves, and call again, where the error has this code.
_ANTHROPIC_CODES: Final = {"thread": "thread_unsupported_request"}
_MESSAGES: Final = "/v1/messages"
_VERSION_HEADER: Final = b"anthropic-version"
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


def is_anthropic(scope: Scope) -> bool:
    """Tells whether a call is one of Anthropic's API: by its path, or by the header that its clients always send."""
    path: str = scope["path"]
    if path == _MESSAGES or path.startswith(f"{_MESSAGES}/"):
        return True
    return any(name == _VERSION_HEADER for name, _ in scope["headers"])


def request_id_of(scope: Scope) -> str:
    """Returns the id under which the call's response is sent; empty before it has one."""
    found: str = scope.get("state", {}).get("request_id", "")
    return found


def anthropic_error(error: ServiceError, scope: Scope) -> bytes:
    """Returns Anthropic's error object as JSON text."""
    message = _NAME.sub(lambda found: _ANTHROPIC_NAMES[found[0]], str(error))
    told: dict[str, object] = {"type": error.terms.anthropic_type, "message": message}
    if code := _ANTHROPIC_CODES.get(error.metadata.get("field", "")):
        told["details"] = {"error_code": code}
    return msgspec.json.encode({"type": "error", "error": told, "request_id": request_id_of(scope) or None})


def error_response(error: ServiceError, scope: Scope, status: int | None = None) -> Response:
    """Returns the error as a response, in the form of the API that the call of `scope` is of; `status` replaces the
    error's own status."""
    headers = {}
    if error.retry_after_s is not None:
        # Whole seconds, and not before there is room.
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    own, body = error.terms.status, b""
    if is_anthropic(scope):
        own, body = error.terms.anthropic_status or own, anthropic_error(error, scope)
    return Response(body or error_body(error), status or own, headers, "application/json")
