"""A long answer that is no stream: written as the client reads it, so that no more of it is held than one slice."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Mapping
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.frontend.errors import log_failure
from octavo.frontend.http.connection import until_gone

_log: Final = logging.getLogger(__name__)


class Sliced(Response):
    """Sends what `source` yields, which is closed when the client goes away. Nobody knows how long it will be."""

    def __init__(self, source: AsyncGenerator[bytes], *, headers: Mapping[str, str], media_type: str) -> None:
        self._source = source
        self._head = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        self._head.append((b"content-type", media_type.encode("latin-1")))
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(until_gone(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self._head})
            async with contextlib.aclosing(self._source) as source:
                async for body in source:
                    if gone.done():
                        return
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except Exception:
            # The answer breaks off, and the client sees that it does.
            log_failure(_log, "an answer could not be written")
            raise
        finally:
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
