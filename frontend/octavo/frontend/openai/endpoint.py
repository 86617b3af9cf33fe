"""What every handler of the HTTP door is given, and how a route becomes one."""

import functools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.frontend.access.access import Access
from octavo.frontend.config import FrontendConfig
from octavo.frontend.errors import Reason, ServiceError, Unauthenticated, internal_error, log_failure
from octavo.frontend.http.connection import ClientGone
from octavo.frontend.http.envelope import unix_time
from octavo.frontend.http.errors import error_response, name_field
from octavo.frontend.openai.body import Reading
from octavo.frontend.openai.tool_calls import detect_kind
from octavo.frontend.request.request import ANYBODY, Caller
from octavo.frontend.stream.generation import Generation

_log = logging.getLogger(__name__)

# OpenAI's, where neither the call nor the model says another.
_TEMPERATURE: Final = 1.0
# The silence after which a stream says that it is alive.
PING_S = 15.0
VERSION: Final = version("octavo")
# The same for all answers of one build, as clients expect that compare answers of one seed.
SYSTEM_FINGERPRINT: Final = f"octavo-{VERSION}"


@dataclass(frozen=True)
class Api:
    """The services behind the routes. `started_at` is a Unix time, `tool_format` what the model writes calls in."""

    generation: Generation
    access: Access
    config: FrontendConfig
    started_at: int = field(default_factory=unix_time)

    @property
    def ping_s(self) -> float:
        return PING_S

    @functools.cached_property
    def tool_format(self) -> str:
        parser = self.config.tool_parser
        tokenizer = self.generation.tokenizer
        if parser != "auto":
            return parser
        return detect_kind(tokenizer.files.tool_template, tells_of_tools=tokenizer.tells_of_tools)

    def reading(self, ignored: list[str]) -> Reading:
        """How a call is read of whose fields some, `ignored`, are not honoured."""
        temperature = None if self.generation.recommends_sampling else _TEMPERATURE
        return Reading(not self.config.open_json_schemas, temperature, ignored)


Handler = Callable[[Api, Request], Awaitable[Response]]


def caller_of(request: Request) -> Caller:
    """Who calls, as the credentials of the call said; anybody where none are asked for."""
    return getattr(request.state, "caller", ANYBODY)


def check_trusted(request: Request, what: str) -> None:
    """Raises `Unauthenticated` for a tenant, who must not see what others do."""
    if not caller_of(request).trusted:
        raise Unauthenticated(
            Reason.UNAUTHENTICATED, f"{what} show what all tenants do; use the key of a trusted tenant"
        )


def route(api: Api, path: str, handler: Handler, *methods: str) -> Route:
    """A route whose failures are answered as OpenAI error objects."""

    @functools.wraps(handler)
    async def answer(request: Request) -> Response:
        try:
            return await handler(api, request)
        except ServiceError as error:
            name_field(error, path)
            return error_response(error)
        except ClientGone:
            # Nobody hears it.
            return Response(status_code=499)
        except Exception:
            log_failure(_log, "a request failed")
            return error_response(internal_error())

    return Route(path, answer, methods=methods)
