"""The routes of the HTTP port."""

from starlette.applications import Starlette

from octavo.frontend.access import Access
from octavo.frontend.config import FrontendConfig
from octavo.frontend.generation import Generation


def build_app(generation: Generation, access: Access, config: FrontendConfig) -> Starlette:
    """The ASGI application."""
    return Starlette(routes=[])
