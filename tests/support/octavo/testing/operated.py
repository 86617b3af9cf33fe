"""Serves the Admin service over a core that a test drives by hand."""

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from octavo.scheduler.core.events import Event
from octavo.scheduler.core.scheduler import Scheduler
from octavo.scheduler.server.admin_service import start_admin_server
from octavo.scheduler.server.event_log import StepFeed
from octavo.testing.cluster import Cluster


@dataclass
class OperatedCluster:
    """Holds as much of the scheduler's shell as the Admin service needs."""

    cluster: Cluster
    dropped_messages: int = 0

    @property
    def core(self) -> Scheduler:
        return self.cluster.core

    def now(self) -> float:
        return self.cluster.now

    def handle(self, event: Event) -> None:
        self.cluster.handle(event)


@asynccontextmanager
async def admin_server(cluster: Cluster, feed: StepFeed | None = None) -> AsyncIterator[str]:
    """A real server inside the block; gives its address."""
    # Not in pytest's directory, whose path may be too long for a socket.
    with tempfile.TemporaryDirectory(prefix="octavo-") as directory:
        address = f"unix:{directory}/admin.sock"
        server = await start_admin_server(OperatedCluster(cluster), feed or StepFeed(), address)
        try:
            yield address
        finally:
            await server.stop(None)
