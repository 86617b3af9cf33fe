"""Builds the HTTP port's ASGI application from the table of its routes."""

from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from octavo.frontend.access.access import Access
from octavo.frontend.anthropic import models as anthropic_models
from octavo.frontend.anthropic.messages import count_tokens, messages
from octavo.frontend.api.endpoint import Api, Handler, route
from octavo.frontend.api.explanations import Explainer, explained
from octavo.frontend.batch import routes as batch
from octavo.frontend.batch.service import BatchService
from octavo.frontend.config import FrontendConfig
from octavo.frontend.errors import NotFound, Reason
from octavo.frontend.http.errors import error_response, is_anthropic
from octavo.frontend.openai import other_routes
from octavo.frontend.openai.chat_completions import chat_completions
from octavo.frontend.openai.completions import completions
from octavo.frontend.openai.embeddings import embeddings
from octavo.frontend.openai.infill import infill
from octavo.frontend.openai.scores import classify, rerank, score
from octavo.frontend.page import routes as page
from octavo.frontend.stored.routes import creating
from octavo.frontend.stored.routes import routes as stored_routes
from octavo.frontend.stored.service import StoredResponses
from octavo.frontend.stream.generation import Generation


def _by_api(openai: Handler, anthropic: Handler) -> Handler:
    """Returns a handler of a path that both APIs have."""

    async def answer(api: Api, request: Request) -> Response:
        return await (anthropic if is_anthropic(request.scope) else openai)(api, request)

    return answer


# Routes are tried in this order, those that generate first.
_GENERATING: Final[dict[tuple[str, str], Handler]] = {
    ("POST", "/v1/chat/completions"): chat_completions,
    ("POST", "/v1/completions"): completions,
    ("POST", "/v1/messages"): messages,
    ("POST", "/infill"): infill,
}
_ROUTES: Final[dict[tuple[str, str], Handler]] = {
    ("POST", "/v1/embeddings"): embeddings,
    ("POST", "/v1/score"): score,
    ("POST", "/score"): score,
    ("POST", "/v1/rerank"): rerank,
    ("POST", "/v2/rerank"): rerank,
    ("POST", "/rerank"): rerank,
    ("POST", "/v1/classify"): classify,
    ("POST", "/classify"): classify,
    ("POST", "/v1/messages/count_tokens"): count_tokens,
    ("GET", "/v1/models"): _by_api(other_routes.list_models, anthropic_models.list_models),
    ("GET", "/v1/models/{name:path}"): _by_api(other_routes.get_model, anthropic_models.get_model),
    ("POST", "/tokenize"): other_routes.tokenize,
    ("POST", "/detokenize"): other_routes.detokenize,
    ("GET", "/livez"): other_routes.livez,
    ("GET", "/health"): other_routes.health,
    ("GET", "/ready"): other_routes.ready,
    ("GET", "/metrics"): other_routes.show_metrics,
    ("GET", "/version"): other_routes.version,
    ("GET", "/load"): other_routes.load,
}
# Where the frontend was told to have them.
_CACHE_RESET: Final[dict[tuple[str, str], Handler]] = {
    ("POST", "/reset_prefix_cache"): other_routes.reset_prefix_cache,
}


def build_app(
    generation: Generation,
    access: Access,
    config: FrontendConfig,
    batches: BatchService | None = None,
    stored: StoredResponses | None = None,
) -> Starlette:
    """Returns the ASGI application; without `batches` the routes of files and batches say that there are none, and
    without `stored` no response is kept."""
    api = Api(generation, access, config)
    explainer = Explainer(config.scheduler_admin)
    generating = _GENERATING | {("POST", "/v1/responses"): creating(stored)}
    explained_routes = {key: explained(handler, explainer) for key, handler in generating.items()}
    table = explained_routes | _ROUTES | (_CACHE_RESET if config.enable_cache_reset else {})
    app = Starlette(
        routes=[
            *(route(api, path, handler, method) for (method, path), handler in table.items()),
            *stored_routes(api, stored),
            *batch.routes(api, batches),
            *page.routes(api, explainer),
        ],
        exception_handlers={HTTPException: _no_route},
    )
    # A redirect would send clients wherever their Host header says.
    app.router.redirect_slashes = False
    return app


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:256]
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        wrong = NotFound(Reason.ROUTE_NOT_FOUND, f"{path} is not for {request.method}; use {allowed}")
        refusal = error_response(wrong, request.scope, 405)
        refusal.headers["allow"] = allowed
        return refusal
    unknown = NotFound(Reason.ROUTE_NOT_FOUND, f"there is nothing at {path}; look into the documentation")
    return error_response(unknown, request.scope)
