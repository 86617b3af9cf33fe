"""Tokenizing, chat templates and grammars, off the event loop and under a time limit."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from octavo.frontend.errors import Broken, InvalidRequest, Reason, Unavailable
from octavo.frontend.request.chat import Chat
from octavo.frontend.request.request import Constraint, Prompt
from octavo.frontend.text.tasks import (
    Answer,
    Compile,
    EncodeChat,
    EncodeText,
    Fault,
    Grammar,
    Refusal,
    Setup,
    Task,
    TokenIds,
    perform,
)
from octavo.frontend.text.tokenizer import ModelTokenizer
from octavo.frontend.text.worker import TextProcessLost, TextWorker

# A text of so many characters takes less time than to hand it to a thread and back.
AT_ONCE_CHARACTERS: Final = 128
# A text or a chat of fewer bytes takes about a millisecond, whatever it says: a thread will do.
SHORT_BYTES: Final = 4096
# Clients ask for the same few grammars again and again: so many are kept, of so many characters each.
_MAX_GRAMMARS: Final = 128
_MAX_KEPT_GRAMMAR: Final = 1 << 15
# What has ended two processes would end a third.
_ATTEMPTS: Final = 2


class TextPool:
    """Whatever a client's text may make slow. Belongs to one event loop.

    What is very short is done at once, what is short in a thread, the rest by `processes` in the order of arrival. A
    task that takes more than `timeout_s` seconds is ended with its process, and nothing else is. A process is started
    when there is no idle one.
    """

    def __init__(self, tokenizer: ModelTokenizer, processes: int, timeout_s: float) -> None:
        self._tokenizer = tokenizer
        self._setup = Setup(tokenizer.files, timeout_s)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="text")
        self._free = asyncio.Semaphore(processes)
        self._idle: list[TextWorker] = []
        self._busy: set[TextWorker] = set()
        self._work: set[asyncio.Task[Answer]] = set()
        self._grammars: dict[Constraint, str] = {}
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Of the processes that there are now."""
        return [worker.pid for worker in (*self._idle, *self._busy)]

    async def start(self) -> None:
        """Has one process ready, which the first task need not wait for then."""
        async with self._free, self._worker():
            pass

    async def encode(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """The prompt's token ids. Raises `InvalidRequest` for a chat that the model's template does not take, and for
        a text that takes too long."""
        match prompt:
            case str():
                task: Task = EncodeText(prompt, continues=not add_special_tokens)
                if len(prompt) <= AT_ONCE_CHARACTERS:
                    return _token_ids(perform(self._tokenizer, task))
                is_short = 4 * len(prompt) < SHORT_BYTES
            case Chat():
                task = EncodeChat(prompt)
                # A variable may be a number to count up to.
                is_short = not prompt.template_variables and prompt.num_bytes < SHORT_BYTES
            case _:
                return list(prompt)
        return _token_ids(await (self._in_thread(task) if is_short else self._in_process(task)))

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of the ids."""
        decode = functools.partial(self._tokenizer.decode, token_ids, skip_special_tokens=skip_special_tokens)
        return await asyncio.get_running_loop().run_in_executor(self._thread, decode)

    async def compile(self, constraint: Constraint) -> str:
        """The constraint as a grammar of llguidance, which a worker compiles without fail. Raises `InvalidRequest` for
        one that is wrong, too large, or takes too long."""
        grammar = self._grammars.pop(constraint, None)
        if grammar is None:
            answer = _checked(await self._in_process(Compile(constraint)))
            assert isinstance(answer, Grammar)
            grammar = answer.text
        if len(grammar) <= _MAX_KEPT_GRAMMAR:
            # The latest are at the end.
            self._grammars[constraint] = grammar
            if len(self._grammars) > _MAX_GRAMMARS:
                del self._grammars[next(iter(self._grammars))]
        return grammar

    def close(self) -> None:
        """Ends what runs, and leaves no process."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        while self._idle:
            self._idle.pop().close()
        for worker in self._busy:
            worker.kill()

    async def _in_thread(self, task: Task) -> Answer:
        return await asyncio.get_running_loop().run_in_executor(self._thread, perform, self._tokenizer, task)

    async def _in_process(self, task: Task) -> Answer:
        await self._free.acquire()
        # What a client no longer waits for still ends in time, and its process is whole then.
        work = asyncio.create_task(self._attempted(task))
        self._work.add(work)
        work.add_done_callback(self._ended)
        return await asyncio.shield(work)

    def _ended(self, work: "asyncio.Task[Answer]") -> None:
        self._work.discard(work)
        self._free.release()
        if not work.cancelled():
            # Seen, should nobody wait for it.
            work.exception()

    async def _attempted(self, task: Task) -> Answer:
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(TextProcessLost):
                async with self._worker() as worker:
                    return await self._in_time(worker, task)
        raise Broken(Reason.INTERNAL, "the processes that work on texts failed on this one, and on it alone")

    async def _in_time(self, worker: TextWorker, task: Task) -> Answer:
        limit = self._setup.timeout_s
        try:
            async with asyncio.timeout(limit):
                return await worker.ask(task)
        except TimeoutError:
            raise InvalidRequest(
                Reason.TEXT_TIMEOUT,
                f"it took more than {limit:g} s to make tokens or a grammar of the request; shorten or simplify it",
            ) from None

    @contextlib.asynccontextmanager
    async def _worker(self) -> AsyncIterator[TextWorker]:
        """A process for one task. One that has failed on it is ended."""
        worker = self._living() or await self._started()
        self._busy.add(worker)
        try:
            yield worker
        except BaseException:
            worker.close()
            raise
        else:
            self._idle.append(worker)
        finally:
            self._busy.discard(worker)

    def _living(self) -> TextWorker | None:
        """One of the idle; those that something has ended meanwhile are no task's fault."""
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
            worker.close()
        return None

    async def _started(self) -> TextWorker:
        if self._closed:
            raise Unavailable(Reason.DRAINING, "this frontend is shutting down; send the request to another one")
        return await TextWorker.start(self._setup)


def _token_ids(answer: Answer) -> list[int]:
    answer = _checked(answer)
    assert isinstance(answer, TokenIds)
    return answer.token_ids


def _checked(answer: Answer) -> Answer:
    match answer:
        case Refusal(reason, message, metadata):
            error = InvalidRequest(reason, message)
            error.metadata = metadata
            raise error
        case Fault(kind):
            raise Broken(Reason.INTERNAL, f"the server failed on this text: {kind}")
    return answer
