"""Waits, as long as is worth it, for what a new request needs behind the frontend."""

import time

from octavo.frontend.cells import Cells
from octavo.frontend.errors import Reason, Unavailable
from octavo.frontend.resolution import find_prefix
from octavo.frontend.scheduler_client import Availability, unreachable
from octavo.wire.requests import ServiceStatus


class Readiness:
    """What of the service is there."""

    def __init__(self, scheduler: Cells, model_name: str, worker_grace_s: float) -> None:
        self._scheduler = scheduler
        self._model_name = model_name
        self._worker_grace_s = worker_grace_s

    async def wait(self) -> ServiceStatus:
        """Returns once there are workers of this frontend's model. Raises `Unavailable`."""
        waiting_since = time.monotonic()
        while (availability := self._scheduler.availability) is not Availability.READY:
            self._check_worth_waiting(availability, time.monotonic() - waiting_since)
            await self._scheduler.changed()
        status = self._scheduler.status
        assert status is not None
        return status

    async def prefix(self, name: str, *, tells_names: bool) -> list[int]:
        """The token ids of a pinned prefix; waits until the scheduler has said what is pinned.

        Raises `NotFound`, with the names of all where these may be told, and `Unavailable`.
        """
        prefixes = self._scheduler.prefixes
        while name not in prefixes.known and not prefixes.told:
            await self._scheduler.changed()
            await self.wait()
            prefixes = self._scheduler.prefixes
        return find_prefix(name, prefixes.known, tells_names=tells_names)

    def _check_worth_waiting(self, availability: Availability, waited_s: float) -> None:
        away_s = self._scheduler.away_s()
        if availability is Availability.NO_SCHEDULER and away_s > self._scheduler.grace_s:
            raise unreachable(away_s)
        if availability is Availability.NO_WORKER and waited_s >= self._worker_grace_s:
            raise Unavailable(
                Reason.NO_WORKER, f"no worker has registered in {waited_s:.0f} s; start one, or try again later"
            )
        if availability is Availability.STALLED and waited_s >= self._worker_grace_s:
            raise Unavailable(
                Reason.NO_WORKER,
                "the workers have answered no step for long, though there is work; the scheduler's log says which and"
                " why; try again later",
            )
        if availability is Availability.MODEL_MISMATCH:
            raise self._mismatch()

    def _mismatch(self) -> Unavailable:
        status = self._scheduler.status
        info = status.model if status else None
        theirs = f"{info.name} ({info.fingerprint[:12]})" if info else "another model"
        return Unavailable(
            Reason.MODEL_MISMATCH,
            f"the workers serve {theirs} and this frontend {self._model_name}"
            f" ({self._scheduler.model_fingerprint[:12]}); start both with the same model directory",
        )
