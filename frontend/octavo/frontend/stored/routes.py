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
from octavo.frontend.stored.call import Call, delete, list_items
from octavo.frontend.stored.service import StoredResponses
from octavo.frontend.stored.values import Kind

_StoredHandler = Callable[[Call], Awaitable[Response]]

_RESPONSE: Final = "/v1/responses/{record_id}"
_CONVERSATION: Final = "/v1/conversations/{record_id}"
_ROUTES: Final[dict[str, dict[str, _StoredHandler]]] = {
    f"{_RESPONSE}/cancel": {"POST": retrieval.cancel},
    f"{_RESPONSE}/input_items": {"GET": list_items},
    _RESPONSE: {"GET": retrieval.retrieve, "DELETE": delete},
    "/v1/conversations": {"POST": conversations.create},
    f"{_CONVERSATION}/items": {"GET": list_items, "POST": conversations.add_items},
    f"{_CONVERSATION}/items/{{item_id}}": {"GET": conversations.retrieve_item, "DELETE": conversations.delete_item},
    _CONVERSATION: {"GET": conversations.retrieve, "POST": conversations.update, "DELETE": delete},
}


def create_response(stored: StoredResponses | None) -> Handler:
    """Returns the handler of POST /v1/responses; without `stored` responses are answered and not kept."""
    return _by_method({"POST": creation.create}, Kind.RESPONSE, stored) if stored else responses


def routes(api: Api, stored: StoredResponses | None) -> list[Route]:
    """Returns the routes of what is stored."""
    found = []
    for path, handlers in _ROUTES.items():
        kind = Kind.RESPONSE if path.startswith(_RESPONSE) else Kind.CONVERSATION
        found.append(route(api, path, _by_method(handlers, kind, stored), *handlers))
    return found


def _by_method(handlers: dict[str, _StoredHandler], kind: Kind, stored: StoredResponses | None) -> Handler:
    async def answer(api: Api, request: Request) -> Response:
        if stored is None:
            raise NotFound(
                Reason.NOT_STORED,
                "this server stores no responses and conversations; send what was said before along, or start the"
                " frontend with --response-store",
            )
        method = "GET" if request.method == "HEAD" else request.method
        return await handlers[method](Call(api, request, stored, kind))

    return answer
