"""Holds the stored responses of one frontend: writes how far those have got that it computes in the background, and
tells their events to readers, whichever frontend computes them."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, Final

from octavo.frontend.errors import NotFound, OutOfRange, Overloaded, Reason, ServiceError, Unavailable, log_failure
from octavo.frontend.stored.background import BackgroundRun
from octavo.frontend.stored.store import Store
from octavo.frontend.stored.store_thread import StoreThread
from octavo.frontend.stored.values import NOT_WRITTEN, Kind, Outcome

_log = logging.getLogger(__name__)

# Seconds between two writes of what is computed, and between two looks at what another frontend computes.
_WRITE_S: Final = 0.5
POLL_S: Final = 0.25
# Seconds between two sweeps.
_SWEEP_S: Final = 60.0


class StoredResponses:
    """Stores responses, and computes some of them in the background. Belongs to one event loop."""

    def __init__(self, store: StoreThread) -> None:
        self.store = store
        self._runs: dict[int, BackgroundRun] = {}
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        # As the last sweep has found them.
        self.num_records = self.num_bytes = 0

    @property
    def num_running(self) -> int:
        """Returns how many responses are computed, or still to be written."""
        return len(self._runs)

    def get(self, key: int) -> BackgroundRun | None:
        """Returns the response with that key if it is computed here."""
        return self._runs.get(key)

    def add(self, key: int, run: BackgroundRun) -> None:
        """Takes in a response that was stored under `key`."""
        self._runs[key] = run
        run.task.add_done_callback(lambda _: self._wake.set())
        self._wake.set()

    def apart(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Does `work` to its end, before the store is closed, whatever becomes of the caller."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def serve(self) -> None:
        """Writes and sweeps until cancelled."""
        sweeping = asyncio.create_task(self._sweep())
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_WRITE_S if self._runs else None):
                        await self._wake.wait()
                self._wake.clear()
                try:
                    await self._write()
                except ServiceError:
                    # The store has said so, and it is tried again.
                    continue
                except Exception:
                    log_failure(_log, "what is computed in the background could not be stored")
        finally:
            sweeping.cancel()
            await asyncio.gather(sweeping, return_exceptions=True)

    async def close(self) -> None:
        """Ends what is still computed as failed, writes that, and closes the store. Called after `serve` has ended."""
        message = "the frontend shut down before the response was complete; send it again"
        for run in self._runs.values():
            run.stop(Unavailable(Reason.DRAINING, message))
        await asyncio.gather(*(run.task for run in self._runs.values()), *self._tasks, return_exceptions=True)
        with contextlib.suppress(ServiceError):
            await self._write()
        if self._runs:
            _log.error("%d responses that have ended could not be stored, and are lost", len(self._runs))
        self.store.close()

    async def follow(self, tenant: str, record_id: str, key: int, number: int) -> AsyncGenerator[bytes]:
        """Yields a response's events from `number` on, wherever they are computed, until it ends or is removed. Raises
        `OutOfRange` where it ends before that number."""
        run: BackgroundRun | None = None
        while True:
            # Of one that could not be stored the rest is here alone, until it ends.
            run = self._runs.get(key) or run
            if run is not None and number >= run.first:
                events = run.since(number)
                if not events:
                    if run.ended:
                        return
                    await run.changed()
            else:
                # Before its events, for it may end in between.
                has_ended = await self._has_ended(tenant, record_id, key, number)
                events = await self.store.call(Store.events, key, number)
                if not events:
                    if has_ended:
                        return
                    await asyncio.sleep(POLL_S)
            if events:
                number += len(events)
                yield b"".join(events)

    async def _has_ended(self, tenant: str, record_id: str, key: int, number: int) -> bool:
        try:
            record = await self.store.call(Store.find, Kind.RESPONSE, tenant, record_id)
        except NotFound:
            return True
        if record.ended and record.key == key:
            check_number(number, record.num_events)
        return record.ended or record.key != key

    async def _write(self) -> None:
        """Writes all news at once. Raises `ServiceError` where that failed; the news are kept then."""
        progress = {key: run.progress(key) for key, run in self._runs.items()}
        if not progress:
            return
        outcomes = await self.store.call(Store.advance, list(progress.values()))
        for key, outcome in outcomes.items():
            run = self._runs[key]
            if outcome is not Outcome.UNWRITABLE:
                run.written(progress[key])
            match outcome:
                case Outcome.CANCELLED:
                    run.stop()
                case Outcome.NO_ROOM:
                    run.stop(Overloaded(Reason.STORE_FULL, "there is no room to store more of this response"))
                case Outcome.GONE:
                    run.stop()
                case Outcome.UNWRITABLE:
                    run.stop(Unavailable(Reason.STORAGE_FAILED, NOT_WRITTEN))
            if progress[key].ended or outcome in (Outcome.GONE, Outcome.UNWRITABLE):
                del self._runs[key]

    async def _sweep(self) -> None:
        while True:
            with contextlib.suppress(ServiceError):
                self.num_records, self.num_bytes = await self.store.call(Store.sweep)
            await asyncio.sleep(_SWEEP_S)


def check_number(number: int, num_events: int) -> None:
    """Raises `OutOfRange` where no event comes next to those before `number`."""
    if number > num_events:
        raise OutOfRange(
            Reason.ATTACH_OFFSET_GONE,
            f"the response has {num_events} events so far, of which the last has the number {num_events - 1}, and not"
            f" {number - 1}; start after one that was received",
            last_offset=num_events - 1,
        )
