"""Health: the scheduler reports again and again whether it serves, and publishes its books for those who read
metrics."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from grpc_health.v1.health_pb2 import HealthCheckResponse

from octavo.runtime.telemetry.optional import METRICS, tolerated
from octavo.scheduler.server.admin_messages import write_load
from octavo.scheduler.server.admin_service import SERVICE, HealthServicer, Operated
from octavo.v1.admin_pb2 import GetLoadResponse

_INTERVAL_S: Final = 0.5

_log = logging.getLogger(__name__)


class HealthLoop:
    """Sets the health of the gRPC services and gives the books to `publish`, if there is one. It runs in the shell's
    event loop, so the books it reads are never half changed."""

    def __init__(
        self, shell: Operated, servicer: HealthServicer, publish: Callable[[GetLoadResponse], None] | None = None
    ) -> None:
        self._shell = shell
        self._servicer = servicer
        self._publish = publish
        self._serving: bool | None = None

    async def follow(self) -> None:
        """Calls `look` every half second until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(_INTERVAL_S)

    async def look(self) -> None:
        """Publishes the books, asks the watchdog, and sets the health if it has changed."""
        core = self._shell.core
        if self._publish:
            with tolerated(METRICS, "the numbers stay as they were"):
                self._publish(write_load(core, self._shell.dropped_messages))
        # Asked here too: where the shell does not turn, nothing else asks.
        core.watchdog.look(self._shell.now())
        serving = not core.replica_table.stands_still
        if serving != self._serving:
            self._serving = serving
            if not serving:
                _log.error("not serving: every worker that gets new requests stands still")
            for service in ("", SERVICE):
                await self._servicer.set(service, _status(self._serving))


def _status(serving: bool) -> "HealthCheckResponse.ServingStatus.ValueType":
    return HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING
