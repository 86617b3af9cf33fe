"""The frontend's end of a text process: starts it, hands it a task, ends it."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from typing import Final

import msgspec

from octavo.frontend.text.tasks import PREFIX_BYTES, Answer, Setup, Task
from octavo.runtime.process.orphans import inherited_locks

# What a machine under load may take to read a large vocabulary.
_START_S: Final = 60.0
_VARIABLES: Final = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ")


class TextProcessLost(Exception):
    """The process ended before it had answered."""


class TextWorker:
    """One process and the socket to it. Takes one task at a time."""

    def __init__(self, process: "subprocess.Popen[bytes]", connection: socket.socket) -> None:
        self._process = process
        self._connection = connection

    @classmethod
    async def start(cls, setup: Setup) -> "TextWorker":
        """A process that is ready for tasks. Raises `TextProcessLost`."""
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
        """The process's id."""
        return self._process.pid

    async def ask(self, task: Task) -> Answer:
        """The answer to a task. Raises `TextProcessLost`. After any failure the worker must be closed."""
        message = await self._exchange(msgspec.msgpack.encode(task))
        answer: Answer = msgspec.msgpack.decode(message, type=Answer)
        return answer

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Ends the process; who waits for it is told that it is lost."""
        self._process.kill()

    def close(self) -> None:
        """Ends the process, where nobody waits for it."""
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
    """What it takes to start. The process works on what clients write, and needs none of the operator's secrets."""
    return {name: value for name, value in os.environ.items() if name in _VARIABLES or name.startswith("PYTHON")}


def _spawn() -> "tuple[subprocess.Popen[bytes], socket.socket]":
    ours, theirs = socket.socketpair()
    with contextlib.ExitStack() as undo:
        undo.callback(ours.close)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "octavo.frontend.text.process", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno(), *inherited_locks()],
                # What a library says when it fails may quote a client's text.
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # One task at a time, in one thread.
                env={**_environment(), "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"},
            )
        ours.setblocking(False)
        undo.pop_all()
    return process, ours
