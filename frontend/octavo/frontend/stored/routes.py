"""Routes responses and conversations, and says what there is of them where nothing is stored."""

from collections.abc import Awaitable, Callable
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.frontend.api.endpoint import Api, Handler, route
from octavo.frontend.errors import NotFound, Reason
from octavo.frontend.openai.responses import responses
from octavo.frontend.stored import conversations, creation, retrieval
from octavo.frontend.stored.service import StoredResponses

_StoredHandler = Callable[[Api, Request, StoredResponses], Awaitable[Response]]

_RESPONSE: Final = "/v1/responses/{response_id}"
_CONVERSATION: Final = "/v1/conversations/{conversation_id}"
_ROUTES: Final[dict[tuple[str, str], _StoredHandler]] = {
    ("POST", f"{_RESPONSE}/cancel"): retrieval.cancel,
    ("GET", f"{_RESPONSE}/input_items"): retrieval.input_items,
    ("GET", _RESPONSE): retrieval.retrieve,
    ("DELETE", _RESPONSE): retrieval.delete,
    ("POST", "/v1/conversations"): conversations.create,
    ("GET", f"{_CONVERSATION}/items"): conversations.list_items,
    ("POST", f"{_CONVERSATION}/items"): conversations.add_items,
    ("GET", f"{_CONVERSATION}/items/{{item_id}}"): conversations.retrieve_item,
    ("DELETE", f"{_CONVERSATION}/items/{{item_id}}"): conversations.delete_item,
    ("GET", _CONVERSATION): conversations.retrieve,
    ("POST", _CONVERSATION): conversations.update,
    ("DELETE", _CONVERSATION): conversations.delete,
}


def creating(stored: StoredResponses | None) -> Handler:
    """Returns the handler of POST /v1/responses; without `stored` responses are answered and not kept."""
    return _with(stored, creation.create) if stored else responses


def routes(api: Api, stored: StoredResponses | None) -> list[Route]:
    """Returns the routes of what is stored."""
    found: dict[str, dict[str, Handler]] = {}
    for (method, path), handler in _ROUTES.items():
        found.setdefault(path, {})[method] = _with(stored, handler) if stored else _refuse
    return [route(api, path, _by_method(handlers), *handlers) for path, handlers in found.items()]


def _by_method(handlers: dict[str, Handler]) -> Handler:
    async def answer(api: Api, request: Request) -> Response:
        method = "GET" if request.method == "HEAD" else request.method
        return await handlers[method](api, request)

    return answer


def _with(stored: StoredResponses, handler: _StoredHandler) -> Handler:
    async def answer(api: Api, request: Request) -> Response:
        return await handler(api, request, stored)

    return answer


async def _refuse(api: Api, request: Request) -> Response:
    raise NotFound(
        Reason.NOT_STORED,
        "this server stores no responses and conversations; send what was said before along, or start the frontend"
        " with --response-store",
    )
