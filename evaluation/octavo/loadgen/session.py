"""Runs against servers, one after another, with their progress on stderr: requests are sent when they are due, whether
or not earlier ones are answered."""

import asyncio
import contextlib
import signal
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Final, Self, TypeVar

import click
from tqdm import tqdm

from octavo.loadgen.events import FoundTokens, TimedCommand, found_between, found_tokens, run_at
from octavo.loadgen.grpc_transport import GrpcTransport
from octavo.loadgen.http_transport import HttpTransport
from octavo.loadgen.servers import (
    NOTHING_SAID,
    Answer,
    AnswerRecorder,
    Asking,
    Call,
    Clock,
    Failure,
    Record,
    Said,
    Secrets,
    ServerAddress,
    TargetError,
    Transport,
)
from octavo.workload.conversations import LaterTurns
from octavo.workload.job import Job
from octavo.workload.measures import Gaps

# -- one run ----------------------------------------------------------------------------------------------------------


T = TypeVar("T")
# Requests that are ready to be sent before they are due.
_AHEAD: Final = 1000


@dataclass
class LoadRun:
    """Holds the results of jobs that were sent one by one: a record for each job, in their order, over `seconds` from
    the start of the run to the last answer. `interrupted`: the user ended the run. Meanwhile so many tokens of prompts
    were `found` computed, by tier, if the scheduler was asked; and the `commands` were run."""

    records: list[Record]
    gaps: Gaps = field(default_factory=Gaps)
    seconds: float = 0.0
    interrupted: bool = False
    found: dict[str, int] = field(default_factory=dict)
    commands: list[TimedCommand] = field(default_factory=list)


class OpenLoop:
    """Runs jobs once. `prepare` makes the call of the job of a number, behind what was said before it; `said_after`
    returns what was said once it is answered. Later turns of conversations are sent when those before have ended, and
    fail with them. `changed` gets every record that was sent, and again when it ended. `clock` and `sleep` are in
    seconds."""

    def __init__(
        self,
        jobs: Sequence[Job],
        prepare: Callable[[Job, int, Said], Call],
        *,
        timeout_s: float,
        said_after: Callable[[Job, int, Said, Answer], Said] = lambda *_: NOTHING_SAID,
        changed: Callable[[Record], None] = lambda _: None,
        clock: Clock | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._prepare = prepare
        self._said_after = said_after
        self._later = LaterTurns[tuple[int, Record]]()
        self._timeout_s = timeout_s
        self._changed = changed
        self._clock = clock or asyncio.get_running_loop().time
        self._sleep = sleep
        self._start = 0.0
        self._sender: asyncio.Task[None] | None = None
        self._answers: set[asyncio.Task[None]] = set()
        self.run = LoadRun([Record(job) for job in sorted(jobs, key=lambda job: job.arrival_s)])

    async def serve(self) -> LoadRun:
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
        records = enumerate(self.run.records)
        first = [(i, record) for i, record in records if not self._later.hold(record.job, (i, record))]
        made = ahead(((i, record, self._prepare(record.job, i, NOTHING_SAID)) for i, record in first), _AHEAD)
        self._start = self._clock()
        for index, record, call in made:
            # Even if it is too late already: the others must go on.
            await self._sleep(max(0.0, record.job.arrival_s - self._now()))
            self._begin(self._talk(index, record, call))

    def _begin(self, talk: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(talk)
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    async def _talk(self, index: int, record: Record, call: Call) -> None:
        """Sends a request, and one after the other the later turns of its conversation."""
        said = NOTHING_SAID
        while True:
            answer = await self._answer(record, call)
            found = self._later.after(record.job)
            if found is None:
                return
            if answer is None:
                break
            said = self._said_after(record.job, index, said, answer)
            _, (index, record) = found
            due = max(record.job.arrival_s, self._now() + record.job.think_s)
            record.job = replace(record.job, arrival_s=due)
            call = self._prepare(record.job, index, said)
            await self._sleep(max(0.0, due - self._now()))
        while found is not None:
            _, (_, record) = found
            record.job = replace(record.job, arrival_s=max(record.job.arrival_s, self._now()))
            record.sent_s = self._now()
            self._changed(record)
            record.failure = Failure("conversation broken", "a turn before failed")
            self._changed(record)
            found = self._later.after(record.job)

    async def _answer(self, record: Record, call: Call) -> Answer | None:
        """Sends a request; returns what it was answered, None if it failed."""
        record.sent_s = self._now()
        self._changed(record)
        recorder = AnswerRecorder(record, self.run.gaps, self._now)
        try:
            async with asyncio.timeout(self._timeout_s):
                await call(recorder)
        except Failure as failure:
            record.failure = failure
        except TimeoutError:
            record.failure = Failure("timeout", f"no complete answer within {self._timeout_s:g} s")
        except Exception as error:
            # Whatever it is, it is no reason to lose the rest of the run, nor to say nothing of it.
            record.failure = Failure(type(error).__name__, str(error))
        self._changed(record)
        return None if record.failure else recorder.answer or Answer()


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
        replace(job, arrival_s=0.0, prefix=f"warm-up {job.prefix}" if job.prefix else "", conversation="", turn=0)
        for job in islice((job for _ in range(count) for job in jobs if job.turn <= 1), count)
    ]


# -- all of them ------------------------------------------------------------------------------------------------------


_LINE_EVERY_S: Final = 10.0
_BAR_EVERY_S: Final = 0.2


class SessionProgress:
    """Shows the progress of `total` requests on stderr, in a `with` block: a bar on a terminal, a line now and then
    elsewhere. `quiet` shows nothing."""

    def __init__(self, label: str, total: int, *, quiet: bool = False) -> None:
        self._label = label
        self._total = total
        self._sent = self._ended = self._failed = 0
        self._lines = not quiet and not sys.stderr.isatty()
        self._shown_at = time.monotonic()
        # No thread to look after it.
        tqdm.monitor_interval = 0
        self._bar = tqdm(total=total, desc=label, unit="req", disable=quiet or self._lines, file=sys.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
        if self._lines:
            self._line()

    def changed(self, record: Record) -> None:
        """Notes that a request was sent, or has ended."""
        if record.finished_s is None and record.failure is None:
            self._sent += 1
        else:
            self._ended += 1
            self._failed += record.failure is not None
            self._bar.update()
        if self._lines and time.monotonic() - self._shown_at >= _LINE_EVERY_S:
            self._line()
        elif not self._bar.disable:
            # Before any has ended, too: what is sent shows that something goes on.
            is_due = time.monotonic() - self._shown_at >= _BAR_EVERY_S
            self._bar.set_postfix_str(self._state(), refresh=is_due)
            self._shown_at = time.monotonic() if is_due else self._shown_at

    def _line(self) -> None:
        self._shown_at = time.monotonic()
        click.echo(f"{self._label}: {self._ended} of {self._total} requests ended, {self._state()}", err=True)

    def _state(self) -> str:
        return f"{self._sent - self._ended} under way, {self._failed} failed"


_TRANSPORTS: Final[dict[str, Callable[[ServerAddress, Asking, Secrets], Transport]]] = {
    "http": HttpTransport,
    "grpc": GrpcTransport,
}


@dataclass
class Side:
    """Holds a server with all that was asked of it: a run for each round. `model` is known after the first."""

    target: ServerAddress
    asking: Asking
    secrets: Secrets
    model: str = ""
    runs: list[LoadRun] = field(default_factory=list)


@dataclass(frozen=True)
class Session:
    """Runs the same jobs on each server in turn. `warm_up` requests that do not count come before each run; a request
    that takes longer than `timeout_s` has failed. The `commands` are run in each run, and the scheduler with Admin
    service at `admin_address` is asked before and after ("": none is)."""

    jobs: Sequence[Job]
    rounds: int = 1
    warm_up: int = 0
    timeout_s: float = 600.0
    commands: Sequence[TimedCommand] = ()
    admin_address: str = ""

    async def run(self, sides: Sequence[Side]) -> None:
        """Adds a run to each side in every round, until the user interrupts one. No contents come twice: a server that
        remembers prompts gains nothing by it. Raises `TargetError`."""
        turns = [(number, side) for number in range(self.rounds) for side in sides]
        for turn, (number, side) in enumerate(turns):
            label = f"round {number + 1}: {side.target}" if len(turns) > 1 else str(side.target)
            await self._measure(side, label, replace(side.asking, seed=side.asking.seed + turn))
            if side.runs[-1].interrupted:
                return

    async def _measure(self, side: Side, label: str, asking: Asking) -> None:
        try:
            transport = _TRANSPORTS[side.target.protocol](side.target, asking, side.secrets)
        except OSError as error:
            raise TargetError(f"{side.secrets.ca_certificate} is no certificate: {error}") from error
        try:
            side.model = await transport.open()
            await self._warm(side, transport, f"{label}, warm-up")
            with SessionProgress(label, len(self.jobs)) as progress:
                loop = OpenLoop(
                    self.jobs,
                    transport.prepare,
                    timeout_s=self.timeout_s,
                    said_after=asking.said_after,
                    changed=progress.changed,
                )
                before = await self._found()
                running = asyncio.create_task(run_at(self.commands))
                with _interrupting(loop.stop):
                    side.runs.append(await loop.serve())
                side.runs[-1].commands = await _ended(running, self.commands)
                side.runs[-1].found = found_between(before, await self._found())
        finally:
            await transport.aclose()

    async def _found(self) -> FoundTokens:
        return await found_tokens(self.admin_address) if self.admin_address else {}

    async def _warm(self, side: Side, transport: Transport, label: str) -> None:
        def prepare(job: Job, index: int, said: Said = NOTHING_SAID) -> Call:
            return transport.prepare(job, len(self.jobs) + index, said)

        jobs = warm_up_jobs(self.jobs, self.warm_up)
        with SessionProgress(label, len(jobs), quiet=not jobs) as progress:
            run = await OpenLoop(jobs, prepare, timeout_s=self.timeout_s, changed=progress.changed).serve()
        failures = [record.failure for record in run.records if record.failure]
        if failures and len(failures) == self.warm_up:
            raise TargetError(f"{side.target} failed every request of the warm-up: {failures[0]}{_advice(failures[0])}")


async def _ended(running: asyncio.Task[list[TimedCommand]], commands: Sequence[TimedCommand]) -> list[TimedCommand]:
    """Returns how the commands ended that the last answer has left time for."""
    if not running.done():
        running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        return await running
    return list(commands)


def _advice(failure: Failure) -> str:
    """Returns advice where the server has read the request and refused it."""
    if not failure.kind.startswith(("HTTP 400", "HTTP 422")):
        return ""
    return (
        "; if it does not know ignore_eos, min_tokens and their like, give --openai-only; if it takes no token ids,"
        " --prompts text or --api chat"
    )


@contextlib.contextmanager
def _interrupting(stop: Callable[[], None]) -> Iterator[None]:
    """Calls `stop` at the first Ctrl-C; a second one does what it does everywhere."""
    loop = asyncio.get_running_loop()

    def once() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        stop()

    try:
        loop.add_signal_handler(signal.SIGINT, once)
    except (RuntimeError, ValueError):
        # Only the main thread hears signals.
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
