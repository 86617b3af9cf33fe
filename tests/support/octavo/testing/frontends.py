"""Runs a real frontend inside the test's process, and makes it impatient."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from octavo.frontend.config import FrontendConfig
from octavo.frontend.server import FrontendServer


@contextlib.asynccontextmanager
async def running_frontend(config: FrontendConfig) -> AsyncIterator[tuple[FrontendServer, asyncio.Event]]:
    """A frontend that serves inside the block, and the event that makes it drain and stop."""
    server, stopping = FrontendServer(config), asyncio.Event()
    task = asyncio.create_task(server.serve(stopping))
    try:
        yield server, stopping
    finally:
        stopping.set()
        await task


def lose_patience(server: FrontendServer, seconds: float) -> None:
    """Lets schedulers be away for so long from now on: a test begins patiently, for its machine may be busy."""
    server.scheduler.grace_s = seconds
    for link in server.scheduler.links:
        link._grace_s = seconds
