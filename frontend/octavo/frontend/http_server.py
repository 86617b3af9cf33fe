"""The HTTP port: an ASGI server around the app, with limits on everything a client sends."""

from starlette.types import ASGIApp

from octavo.frontend.config import FrontendConfig


class HttpServer:
    """`port` is the one bound, for `listen` may leave the choice to the system."""

    def __init__(self, app: ASGIApp, config: FrontendConfig) -> None:
        """Binds. Raises `EndpointError` if the address cannot be had."""
        self._app = app
        self.port = 0

    async def start(self) -> None:
        """Begins to serve."""

    async def stop(self) -> None:
        """Ends what is still served."""
