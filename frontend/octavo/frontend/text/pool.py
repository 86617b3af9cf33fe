"""Runs tasks on clients' texts off the event loop, in processes of their own, each under a time limit."""

import asyncio
import contextlib
import functools
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec

from octavo.frontend.errors import Broken, InvalidRequest, Reason, Unavailable
from octavo.frontend.request.chat import Chat
from octavo.frontend.request.infill import Infill
from octavo.frontend.request.request import Constraint, Prompt
from octavo.frontend.text.tasks import (
    PREFIX_BYTES,
    VOCABULARY_S,
    Answer,
    Compile,
    EncodeChat,
    EncodeInfill,
    EncodeText,
    EncodeWhole,
    Grammar,
    LoadVocabulary,
    Refusal,
    Task,
    TaskFault,
    TextSetup,
    TokenIds,
    perform,
)
from octavo.frontend.text.tokenizer import ModelTokenizer
from octavo.runtime.process.orphans import inherited_locks

# Seconds that a machine under load may take to read a large vocabulary.
_START_S: Final = 60.0
_VARIABLES: Final = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ")


class TextProcessLost(Exception):
    """The process ended before it answered."""


class TextWorker:
    """Holds one process and the socket to it. The process takes one task at a time."""

    def __init__(self, process: "subprocess.Popen[bytes]", connection: socket.socket) -> None:
        self._process = process
        self._connection = connection
        self._has_vocabulary = False

    @classmethod
    async def start(cls, setup: TextSetup) -> "TextWorker":
        """Starts a process, and returns once it is ready for tasks. Raises `TextProcessLost`."""
        worker = cls(*_spawn())
        try:
            async with asyncio.timeout(_START_S):
                await worker._exchange(msgspec.msgpack.encode(setup))
        except TimeoutError as error:
            worker.close()
            raise TextProcessLost("it did not start in time") from error
        except BaseException:
            worker.close()
            raise
        return worker

    @property
    def pid(self) -> int:
        """Returns the id of the process."""
        return self._process.pid

    async def ask(self, task: Task) -> Answer:
        """Sends a task and returns its answer. Raises `TextProcessLost`. After a failure the worker must be closed."""
        message = await self._exchange(msgspec.msgpack.encode(task))
        answer: Answer = msgspec.msgpack.decode(message, type=Answer)
        return answer

    async def load_vocabulary(self) -> None:
        """Lets the process load what grammars need, once, whatever that takes; a vocabulary that cannot be loaded fails
        the grammars that come. Raises `TextProcessLost`."""
        if self._has_vocabulary:
            return
        try:
            async with asyncio.timeout(VOCABULARY_S):
                await self.ask(LoadVocabulary())
        except TimeoutError as error:
            raise TextProcessLost("it did not load the vocabulary in time") from error
        self._has_vocabulary = True

    @property
    def alive(self) -> bool:
        """Tells whether the process still runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Ends the process; a call of `ask` that waits for its answer raises `TextProcessLost`."""
        self._process.kill()

    def close(self) -> None:
        """Ends the process, and closes its socket. No call of `ask` may be waiting."""
        self._process.kill()
        self._process.wait()
        self._connection.close()

    async def _exchange(self, message: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self._connection, len(message).to_bytes(PREFIX_BYTES, "big") + message)
            return await self._exactly(int.from_bytes(await self._exactly(PREFIX_BYTES), "big"))
        except OSError as error:
            raise TextProcessLost(str(error)) from error

    async def _exactly(self, size: int) -> bytes:
        loop, data = asyncio.get_running_loop(), bytearray()
        while len(data) < size:
            chunk = await loop.sock_recv(self._connection, min(size - len(data), 1 << 20))
            if not chunk:
                raise TextProcessLost("it ended")
            data += chunk
        return bytes(data)


def _environment() -> dict[str, str]:
    """Returns the environment variables of a text process: none of them may hold a secret of the operator."""
    return {name: value for name, value in os.environ.items() if name in _VARIABLES or name.startswith("PYTHON")}


def _spawn() -> "tuple[subprocess.Popen[bytes], socket.socket]":
    ours, theirs = socket.socketpair()
    with contextlib.ExitStack() as undo:
        undo.callback(ours.close)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "octavo.frontend.text.process", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno(), *inherited_locks()],
                # The words of a library that fails may quote a client's text.
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # One task at a time, in one thread.
                env={**_environment(), "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"},
            )
        ours.setblocking(False)
        undo.pop_all()
    return process, ours


# A text of so many characters takes less time than handing it to a thread and back.
AT_ONCE_CHARACTERS: Final = 128
# A text or a chat of fewer bytes takes about a millisecond, whatever it holds: a thread will do.
SHORT_BYTES: Final = 4096
# Clients ask for the same few grammars again and again: so many are kept, of so many characters each.
_MAX_GRAMMARS: Final = 128
_MAX_KEPT_GRAMMAR: Final = 1 << 15
# A task that has ended two processes would end a third.
_ATTEMPTS: Final = 2


class TextPool:
    """Does the work that a client's text may make slow. A pool belongs to one event loop.

    A very short text is handled at once, a short one in a thread, all others by `processes` processes in the order of
    arrival. A task that takes more than `timeout_s` seconds is ended together with its process, and nothing else is. A
    process is started when there is no idle one.
    """

    def __init__(self, tokenizer: ModelTokenizer, processes: int, timeout_s: float) -> None:
        self._tokenizer = tokenizer
        self._setup = TextSetup(tokenizer.files, timeout_s)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="text")
        self._free = asyncio.Semaphore(processes)
        self._idle: list[TextWorker] = []
        self._busy: set[TextWorker] = set()
        self._work: set[asyncio.Task[Answer]] = set()
        self._grammars: dict[tuple[Constraint | None, str], str] = {}
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Returns the ids of the processes that there are now."""
        return [worker.pid for worker in (*self._idle, *self._busy)]

    async def encode(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the prompt's token ids.

        Raises `InvalidRequest` for a chat that the model's template does not take, and for a text that takes too long.
        """
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
            case Infill():
                task, is_short = EncodeInfill(prompt), prompt.num_bytes < SHORT_BYTES
            case _:
                return list(prompt)
        return _token_ids(await (self._in_thread(task) if is_short else self._in_process(task)))

    async def encode_whole(
        self, text: str, second: str | None, longest: int | None, *, add_special_tokens: bool = True
    ) -> tuple[list[int], int]:
        """Returns what `ModelTokenizer.encode_whole` does.

        Raises `InvalidRequest` for a text that takes too long.
        """
        task = EncodeWhole(text, second, longest, continues=not add_special_tokens)
        size = len(text) + len(second or "")
        if size <= AT_ONCE_CHARACTERS:
            answer = perform(self._tokenizer, task)
        else:
            answer = await (self._in_thread(task) if 4 * size < SHORT_BYTES else self._in_process(task))
        answer = _checked(answer)
        assert isinstance(answer, TokenIds)
        return answer.token_ids, answer.pair_start

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Returns the text of the ids, decoded in a thread."""
        decode = functools.partial(self._tokenizer.decode, token_ids, skip_special_tokens=skip_special_tokens)
        return await asyncio.get_running_loop().run_in_executor(self._thread, decode)

    async def compile(self, constraint: Constraint | None, around: str = "") -> str:
        """Returns the constraint, or any answer, within `around` as a grammar of llguidance, which a worker compiles
        without fail.

        Raises `InvalidRequest` for a constraint that is wrong, too large, or takes too long.
        """
        grammar = self._grammars.pop((constraint, around), None)
        if grammar is None:
            answer = _checked(await self._in_process(Compile(constraint, around)))
            assert isinstance(answer, Grammar)
            grammar = answer.text
        if len(grammar) <= _MAX_KEPT_GRAMMAR:
            # The latest are at the end.
            self._grammars[constraint, around] = grammar
            if len(self._grammars) > _MAX_GRAMMARS:
                del self._grammars[next(iter(self._grammars))]
        return grammar

    def close(self) -> None:
        """Ends all tasks and processes."""
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
        # A task that its client no longer waits for still ends in time, and its process is usable then.
        work = asyncio.create_task(self._attempted(task))
        self._work.add(work)
        work.add_done_callback(self._ended)
        return await asyncio.shield(work)

    def _ended(self, work: "asyncio.Task[Answer]") -> None:
        self._work.discard(work)
        self._free.release()
        if not work.cancelled():
            # Retrieves the exception, should nobody wait for the task.
            work.exception()

    async def _attempted(self, task: Task) -> Answer:
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(TextProcessLost):
                async with self._worker() as worker:
                    if isinstance(task, Compile):
                        await worker.load_vocabulary()
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
        """Lends a process for one task. A process that failed on its task is ended."""
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
        """Returns an idle process that still runs, if any, and closes those that have ended meanwhile."""
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
        case TaskFault(kind):
            raise Broken(Reason.INTERNAL, f"the server failed on this text: {kind}")
    return answer
