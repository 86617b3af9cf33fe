"""Sends requests when they are due, whether or not earlier ones are answered."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final, TypeVar

from octavo.loadgen.failures import Failure
from octavo.loadgen.records import Answer, Clock, Record
from octavo.loadgen.transports import Call
from octavo.workload.job import Job
from octavo.workload.measures import Gaps

T = TypeVar("T")
# Requests that are ready to be sent before they are due.
_AHEAD: Final = 1000


@dataclass
class Run:
    """Holds the results of jobs that were sent one by one: a record for each job, in their order, over `seconds` from
    the start of the run to the last answer. `interrupted`: the user ended the run."""

    records: list[Record]
    gaps: Gaps = field(default_factory=Gaps)
    seconds: float = 0.0
    interrupted: bool = False


class OpenLoop:
    """Runs jobs once. `prepare` makes the call of the job of a number. `changed` gets every record that was sent, and
    again when it ended. `clock` and `sleep` are in seconds."""

    def __init__(
        self,
        jobs: Sequence[Job],
        prepare: Callable[[Job, int], Call],
        *,
        timeout_s: float,
        changed: Callable[[Record], None] = lambda _: None,
        clock: Clock | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._prepare = prepare
        self._timeout_s = timeout_s
        self._changed = changed
        self._clock = clock or asyncio.get_running_loop().time
        self._sleep = sleep
        self._start = 0.0
        self._sender: asyncio.Task[None] | None = None
        self._answers: set[asyncio.Task[None]] = set()
        self.run = Run([Record(job) for job in sorted(jobs, key=lambda job: job.arrival_s)])

    async def serve(self) -> Run:
        """Runs it until the last answer, or until it is stopped."""
        self._sender = asyncio.create_task(self._send_all())
        await asyncio.wait([self._sender])
        while self._answers:
            await asyncio.wait(self._answers)
        if not self.run.interrupted:
            self._sender.result()
        self.run.seconds = self._now() if self.run.interrupted else self._last_end()
        return self.run

    def stop(self) -> None:
        """Sends nothing more, and gives up what is under way."""
        self.run.interrupted = True
        for task in [self._sender, *self._answers]:
            if task is not None:
                task.cancel()

    def _now(self) -> float:
        return self._clock() - self._start

    def _last_end(self) -> float:
        return max((record.finished_s or record.sent_s or 0.0 for record in self.run.records), default=0.0)

    async def _send_all(self) -> None:
        made = ahead(((record, self._prepare(record.job, i)) for i, record in enumerate(self.run.records)), _AHEAD)
        self._start = self._clock()
        for record, call in made:
            # Even if it is too late already: the others must go on.
            await self._sleep(max(0.0, record.job.arrival_s - self._now()))
            task = asyncio.create_task(self._answer(record, call))
            self._answers.add(task)
            task.add_done_callback(self._answers.discard)

    async def _answer(self, record: Record, call: Call) -> None:
        record.sent_s = self._now()
        self._changed(record)
        try:
            async with asyncio.timeout(self._timeout_s):
                await call(Answer(record, self.run.gaps, self._now))
        except Failure as failure:
            record.failure = failure
        except TimeoutError:
            record.failure = Failure("timeout", f"no complete answer within {self._timeout_s:g} s")
        except Exception as error:
            # Whatever it is, it is no reason to lose the rest of the run, nor to say nothing of it.
            record.failure = Failure(type(error).__name__, str(error))
        self._changed(record)


def ahead(items: Iterable[T], count: int) -> Iterator[T]:
    """Yields the items, of which `count` are made before they are asked for: one now for each that is taken."""
    source = iter(items)
    made = deque(islice(source, count))

    def give() -> Iterator[T]:
        while made:
            yield made.popleft()
            made.extend(islice(source, 1))

    return give()


def warm_up_jobs(jobs: Sequence[Job], count: int) -> list[Job]:
    """Returns `count` jobs like the first ones, all at once. Their prefixes are their own: those of the run stay
    cold."""
    return [
        replace(job, arrival_s=0.0, prefix=f"warm-up {job.prefix}" if job.prefix else "")
        for job in islice((job for _ in range(count) for job in jobs), count)
    ]
