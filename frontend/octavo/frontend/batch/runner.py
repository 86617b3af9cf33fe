"""Works on batches: checks their input, has their calls answered at the lowest priority, and writes what came of each.

A call is sent into the frontend's own application, so it meets all that one over HTTP meets. Its answer is written
before the next takes its place, and what is written is not asked again: after a restart, or by another frontend that
shares the directory, a batch goes on with the calls that have no answer yet.
"""

import asyncio
import enum
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, closing, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from starlette.types import ASGIApp

from octavo.frontend.batch.answers import AnswerFile
from octavo.frontend.batch.call import Answer, call
from octavo.frontend.batch.files import Files
from octavo.frontend.batch.lines import (
    BadLine,
    Line,
    answered_line,
    body_of,
    check_input,
    numbered_lines,
    read_line,
    unanswered_line,
)
from octavo.frontend.batch.records import INPUT, BatchRecord, Counts, Lock, Records
from octavo.frontend.batch.slots import Slots
from octavo.frontend.batch.storage import fresh_id
from octavo.frontend.errors import NotFound, log_failure
from octavo.frontend.request.request import Caller

T = TypeVar("T")
_log = logging.getLogger(__name__)

# Seconds between two looks for batches, and words about them, that other frontends have left.
_LOOK_S: Final = 2.0
_SWEEP_S: Final = 60.0
# Seconds between two notes of how far a batch is, for whoever asks another frontend.
_NOTE_S: Final = 1.0
# Lines that are read from the disk at once.
_AT_ONCE: Final = 32
# The server has no room, or no worker, or is about to end: the call itself may be fine.
_LATER: Final = frozenset({429, 503})
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.5, 30.0
_FINE: Final = range(200, 300)


class _Ending(enum.Enum):
    CANCELLED = "cancelled"
    EXPIRED = "expired"


_WORDS: Final = {
    _Ending.CANCELLED: "the batch was cancelled before this call was answered",
    _Ending.EXPIRED: "the completion window was over before this call was answered",
}


@dataclass
class _Run:
    """Holds a batch that is worked on here, with the files that its answers go to."""

    record: BatchRecord
    folder: Path
    answers: AnswerFile
    failures: AnswerFile
    noted_at: float = 0.0
    # Why it is to end before its time.
    ending: _Ending | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    # Lines that are being written. Each goes to its file even if the batch ends meanwhile.
    writing: set[asyncio.Task[None]] = field(default_factory=set)

    def end(self, ending: _Ending) -> None:
        self.ending = self.ending or ending
        self.ended.set()


class BatchRunner:
    """Works on all batches of a directory that nobody else works on. Belongs to one event loop."""

    def __init__(self, records: Records, files: Files, max_requests: int, clock: Callable[[], int]) -> None:
        self._records = records
        self._files = files
        self._clock = clock
        self._slots = Slots(max_requests)
        self._runs: dict[str, _Run] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        self._stopping = False

    async def run(self, app: ASGIApp) -> None:
        """Has `app` answer the calls of batches until it is cancelled."""
        loop = asyncio.get_running_loop()
        sweep_at = 0.0
        try:
            while True:
                self._wake.clear()
                try:
                    await self._look(app)
                    if loop.time() >= sweep_at:
                        await asyncio.to_thread(self._sweep)
                        sweep_at = loop.time() + _SWEEP_S
                except OSError as error:
                    _log.error("the directory of batches cannot be read: %s", error)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await self._wake.wait()
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def look(self) -> None:
        """Has new batches begun, and words about others heard, at once."""
        self._wake.set()

    def current(self, record: BatchRecord) -> BatchRecord:
        """Returns what is known of a batch now, which may be more than is on the disk."""
        run = self._runs.get(record.id)
        return run.record if run else record

    def drain(self) -> None:
        """Begins no further call. Those under way go on; without an answer they are asked again another time."""
        self._stopping = True

    async def _look(self, app: ASGIApp) -> None:
        if self._stopping:
            return
        for batch_id, tenant in await asyncio.to_thread(self._records.open_batches):
            if (run := self._runs.get(batch_id)) is not None:
                if await asyncio.to_thread(self._records.cancelled_at, run.record) is not None:
                    run.end(_Ending.CANCELLED)
            elif batch_id not in self._tasks:
                task = asyncio.create_task(self._work(app, tenant, batch_id))
                self._tasks[batch_id] = task
                task.add_done_callback(partial(self._forget, batch_id))

    def _forget(self, batch_id: str, task: asyncio.Task[None]) -> None:
        self._tasks.pop(batch_id, None)

    async def _work(self, app: ASGIApp, tenant: str, batch_id: str) -> None:
        try:
            folder = await asyncio.to_thread(self._records.folder, tenant, batch_id)
            lock = Lock(folder)
        except BlockingIOError:
            # Another frontend works on it.
            return
        except FileNotFoundError:
            await asyncio.to_thread(self._records.forget, batch_id)
            return
        except OSError as error:
            _log.error("batch %s cannot be worked on: %s", batch_id, error)
            return
        try:
            # What another frontend has done of it meanwhile is there by now.
            record = await asyncio.to_thread(self._records.get, tenant, batch_id)
            if record.is_over:
                await self._note(record)
            else:
                await self._carry_out(app, record, folder)
        except NotFound:
            await asyncio.to_thread(self._records.forget, batch_id)
        except OSError as error:
            _log.error("batch %s is left for later: %s", batch_id, error)
        except Exception:
            log_failure(_log, f"batch {batch_id} is left for later")
        finally:
            lock.release()

    async def _carry_out(self, app: ASGIApp, record: BatchRecord, folder: Path) -> None:
        if record.status == "validating":
            checked = await asyncio.to_thread(check_input, folder / INPUT, record.endpoint)
            if checked.errors:
                await self._note(record.at("failed", self._clock(), errors=checked.errors))
                return
            record = record.at("in_progress", self._clock(), counts=Counts(checked.num_lines))
            await self._note(record)
        with (
            closing(self._answer_file(record, record.output_file_id)) as answers,
            closing(self._answer_file(record, record.error_file_id)) as failures,
        ):
            run = self._runs[record.id] = _Run(record, folder, answers, failures)
            try:
                if await self._answer_all(app, run):
                    await self._finalize(run)
            finally:
                del self._runs[record.id]
                for writing in run.writing:
                    writing.cancel()

    def _answer_file(self, record: BatchRecord, file_id: str) -> AnswerFile:
        return AnswerFile(self._files.content_path(record.tenant, file_id))

    async def _note(self, record: BatchRecord) -> None:
        await asyncio.to_thread(self._records.note, record)

    async def _answer_all(self, app: ASGIApp, run: _Run) -> bool:
        """Has all calls answered that are not yet, or given up where the batch is to end. Returns False where this
        frontend is about to end before that."""
        if await asyncio.to_thread(self._records.cancelled_at, run.record) is not None:
            run.end(_Ending.CANCELLED)
        done = await self._note_done(run)
        if not run.ending:
            feeding = asyncio.create_task(self._feed(app, run, done))
            ended = asyncio.create_task(run.ended.wait())
            try:
                left_s = max(0.0, run.record.expires_at - self._clock())
                await asyncio.wait((feeding, ended), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if not feeding.done():
                    run.end(_Ending.EXPIRED)
            finally:
                for task in (feeding, ended):
                    task.cancel()
                await asyncio.gather(feeding, ended, return_exceptions=True)
            await asyncio.gather(*run.writing)
            if not run.ending:
                feeding.result()
                return not self._stopping or run.record.counts.total == _answered(run.record.counts)
        if run.ending is _Ending.CANCELLED:
            run.record = run.record.at("cancelling", self._clock())
            await self._note(run.record)
        done = await self._note_done(run)
        await self._give_up(run, done)
        return True

    async def _note_done(self, run: _Run) -> set[str]:
        """Returns the calls that are answered, as the files say, and counts them."""
        fine = await asyncio.to_thread(run.answers.custom_ids)
        failed = await asyncio.to_thread(run.failures.custom_ids)
        run.record = msgspec.structs.replace(
            run.record, counts=Counts(run.record.counts.total, len(fine), len(failed - fine))
        )
        return fine | failed

    async def _feed(self, app: ASGIApp, run: _Run, done: set[str]) -> None:
        tenant = run.record.tenant
        async with asyncio.TaskGroup() as calls, aclosing(_lines(run, done)) as lines:
            async for line in lines:
                await self._slots.take(tenant)
                if self._stopping:
                    self._slots.release(tenant)
                    return
                task = calls.create_task(self._answer(app, run, line))
                task.add_done_callback(lambda _: self._slots.release(tenant))

    async def _answer(self, app: ASGIApp, run: _Run, line: Line) -> None:
        try:
            body = body_of(line)
        except BadLine as error:
            await self._write(run, run.failures, unanswered_line(line.custom_id, error.code, str(error)))
            return
        request_id = fresh_id("")
        try:
            answer = await self._ask(app, run, line.url, body, request_id)
        except Exception:
            log_failure(_log, f"a call of batch {run.record.id} failed")
            answer = Answer(500, b"")
        if answer is not None:
            file = run.answers if answer.status in _FINE else run.failures
            await self._write(run, file, _line_of(line, answer, request_id))

    async def _ask(self, app: ASGIApp, run: _Run, path: str, body: bytes, request_id: str) -> Answer | None:
        """Returns the answer to a call, which is sent again for as long as the server has no room or no worker for it;
        None where this frontend is about to end before that."""
        caller = Caller(run.record.tenant, run.record.trusted)
        pause_s = _LEAST_PAUSE_S
        while (answer := await call(app, path, body, request_id, caller)).status in _LATER:
            if self._stopping:
                return None
            await asyncio.sleep(max(answer.retry_after_s or 0.0, pause_s))
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)
        return answer

    async def _write(self, run: _Run, file: AnswerFile, line: bytes) -> None:
        """Writes a line, however long the disk is full for, and counts it."""
        append = partial(asyncio.to_thread, file.append, line)
        writing = asyncio.create_task(_in_the_end(append, f"an answer of batch {run.record.id}"))
        run.writing.add(writing)
        writing.add_done_callback(run.writing.discard)
        await asyncio.shield(writing)
        counts, is_fine = run.record.counts, file is run.answers
        counts = Counts(counts.total, counts.completed + is_fine, counts.failed + (not is_fine))
        run.record = msgspec.structs.replace(run.record, counts=counts)
        now = asyncio.get_running_loop().time()
        if now - run.noted_at >= _NOTE_S:
            run.noted_at = now
            with suppress(OSError):
                await self._note(run.record)

    async def _give_up(self, run: _Run, done: set[str]) -> None:
        """Writes of each call without an answer why it has none."""
        assert run.ending is not None
        async with aclosing(_lines(run, done)) as lines:
            async for line in lines:
                told = unanswered_line(line.custom_id, f"batch_{run.ending.value}", _WORDS[run.ending])
                await self._write(run, run.failures, told)

    async def _finalize(self, run: _Run) -> None:
        run.record = run.record.at("finalizing", self._clock())
        await self._note(run.record)
        await _in_the_end(lambda: asyncio.to_thread(self._publish, run), f"the answers of batch {run.record.id}")

    def _publish(self, run: _Run) -> None:
        for file in (run.answers, run.failures):
            file.sync()
        record = run.record
        there = {}
        for kind, file_id in (("output", record.output_file_id), ("error", record.error_file_id)):
            path = self._files.content_path(record.tenant, file_id)
            there[kind] = path.exists() and path.stat().st_size > 0
            if there[kind]:
                expires_at = self._clock() + record.files_expire_after_s
                self._files.publish(record.tenant, file_id, f"{record.id}_{kind}.jsonl", expires_at)
            else:
                path.unlink(missing_ok=True)
        status = run.ending.value if run.ending else "completed"
        run.record = record.at(status, self._clock(), has_output=there["output"], has_errors=there["error"])
        self._records.note(run.record)

    def _sweep(self) -> None:
        self._files.sweep()
        self._records.sweep(self._files.bounds.expiry_s)


def _answered(counts: Counts) -> int:
    return counts.completed + counts.failed


def _line_of(line: Line, answer: Answer, request_id: str) -> bytes:
    if not answer.body:
        return unanswered_line(line.custom_id, "server_error", "the server failed on this call; its log says why")
    return answered_line(line.custom_id, answer.status, request_id, answer.body, answer.ignored)


async def _lines(run: _Run, done: set[str]) -> AsyncGenerator[Line]:
    """Yields the calls that are not `done`. The input has been checked."""
    with (run.folder / INPUT).open("rb") as file:
        found = numbered_lines(file)
        while some := await asyncio.to_thread(_some_lines, found, run.record.endpoint, done):
            for line in some:
                if line is not None:
                    yield line


def _some_lines(found: Iterator[tuple[int, bytes | None]], endpoint: str, done: set[str]) -> list[Line | None]:
    """Returns the next lines, None for one that is done; an empty list at the end."""
    lines = [read_line(text, endpoint) for _, text in islice(found, _AT_ONCE) if text is not None]
    return [None if line.custom_id in done else line for line in lines]


async def _in_the_end(write: Callable[[], Awaitable[T]], what: str) -> T:
    """Returns what `write` does, as soon as the disk lets it."""
    pause_s = _LEAST_PAUSE_S
    while True:
        try:
            return await write()
        except OSError as error:
            _log.error("%s cannot be written, and is kept in memory until it can: %s", what, error)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _MOST_PAUSE_S)
