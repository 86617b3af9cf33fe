"""What operators and their tools ask: whether it lives, what it does, which version it is."""

from starlette.requests import Request
from starlette.responses import Response

from octavo.frontend.openai.answers import encode
from octavo.frontend.openai.endpoint import VERSION, Api, check_trusted
from octavo.runtime.telemetry import metrics


async def livez(api: Api, request: Request) -> Response:
    """Says that the event loop turns."""
    return _json({"status": "alive"})


async def health(api: Api, request: Request) -> Response:
    """Whether requests get on: the scheduler answers, or has not been away for longer than they survive."""
    return _state("healthy" if api.generation.makes_progress else "stuck", api.generation.makes_progress)


async def ready(api: Api, request: Request) -> Response:
    """Whether a new request would be taken and could run now."""
    return _state("ready" if api.generation.ready else "not ready", api.generation.ready)


async def show_metrics(api: Api, request: Request) -> Response:
    """All metrics of this process, for Prometheus. Raises `Unauthenticated` for a tenant."""
    check_trusted(request, "the metrics")
    body, content_type = metrics.render()
    return Response(body, headers={"content-type": content_type})


async def version(api: Api, request: Request) -> Response:
    return _json({"version": VERSION})


async def load(api: Api, request: Request) -> Response:
    """Requests that are held now, in vLLM's form."""
    return _json({"server_load": api.generation.num_running})


def _state(status: str, is_good: bool) -> Response:
    return _json({"status": status}, 200 if is_good else 503)


def _json(content: dict[str, object], status: int = 200) -> Response:
    return Response(encode(content), status, media_type="application/json")
