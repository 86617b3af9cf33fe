"""Health: the scheduler reports again and again whether it serves, and publishes its books for those who read
metrics."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from grpc_health.v1 import health
from grpc_health.v1.health_pb2 import HealthCheckResponse

from octavo.runtime.telemetry.optional import METRICS, tolerated
from octavo.scheduler.core.scheduler import Scheduler

# The service whose health is told, besides that of the server.
SERVICE: Final = "octavo.v1.AdminService"
_INTERVAL_S: Final = 0.5

_log = logging.getLogger(__name__)


class HealthServicer(health.aio.HealthServicer):  # type: ignore[misc, name-defined]  # missing from the stubs
    """Answers the health of each service as it was last set."""


class HealthLoop:
    """Sets the health of the gRPC services, and calls `publish` for the books, if there is one. It runs in the shell's
    event loop, so the books are never half changed. `now` is the scheduler's clock."""

    def __init__(
        self,
        core: Scheduler,
        now: Callable[[], float],
        servicer: HealthServicer,
        publish: Callable[[], None] | None = None,
    ) -> None:
        self._core = core
        self._now = now
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
        if self._publish:
            with tolerated(METRICS, "the numbers stay as they were"):
                self._publish()
        # Asked here too: where the shell does not turn, nothing else asks.
        self._core.watchdog.look(self._now())
        serving = not self._core.replica_table.stands_still
        if serving != self._serving:
            self._serving = serving
            if not serving:
                _log.error("not serving: every worker that gets new requests stands still")
            for service in ("", SERVICE):
                await self._servicer.set(service, _status(self._serving))


def _status(serving: bool) -> "HealthCheckResponse.ServingStatus.ValueType":
    return HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING
