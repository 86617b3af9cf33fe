"""Runs the process that works on clients' texts, one at a time, until the socket to its frontend closes.

The process may be killed at any time: whatever a text does to the process, no other process is hurt.
"""

import os
import resource
import signal
import socket
import sys
from typing import Final, NoReturn

import msgspec

from octavo.frontend.text.tasks import PREFIX_BYTES, VOCABULARY_S, LoadVocabulary, Task, TaskFault, TextSetup, perform
from octavo.frontend.text.tokenizer import ModelTokenizer
from octavo.runtime.process.orphans import end_with_parent

# Bytes of memory that tasks may take, above what the process has when it is ready.
_MEMORY: Final = 1 << 30
# Seconds by which the frontend's own time limit comes first.
_SLACK_S: Final = 2.0
_LOAD_VOCABULARY: Final = msgspec.msgpack.encode(LoadVocabulary())


def main(descriptor: int, parent: int) -> None:
    """Serves tasks from the socket `descriptor`, which was inherited from process `parent`."""
    # While the process works on a text it does not see that the socket has closed.
    if not end_with_parent(parent):
        _leave()
    # A terminal sends SIGINT to all processes; the frontend ends this one by closing the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as connection:
        setup = msgspec.msgpack.decode(_receive(connection), type=TextSetup)
        tokenizer = ModelTokenizer(setup.files)
        _limit_memory()
        _send(connection, b"")
        while True:
            task = _receive(connection)
            # Where a frontend fails to end a task that takes too long, the alarm does.
            limit_s = VOCABULARY_S if task == _LOAD_VOCABULARY else setup.timeout_s
            signal.setitimer(signal.ITIMER_REAL, limit_s + _SLACK_S)
            answer = _answer(tokenizer, task)
            signal.setitimer(signal.ITIMER_REAL, 0)
            _send(connection, answer)


def _answer(tokenizer: ModelTokenizer, task: bytes) -> bytes:
    try:
        return msgspec.msgpack.encode(perform(tokenizer, msgspec.msgpack.decode(task, type=Task)))
    except Exception as error:
        return msgspec.msgpack.encode(TaskFault(type(error).__name__))


def _limit_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as statm:
        pages = int(statm.read().split()[5])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + _MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _receive(connection: socket.socket) -> bytes:
    return _exactly(connection, int.from_bytes(_exactly(connection, PREFIX_BYTES), "big"))


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = connection.recv(min(size - len(data), 1 << 20))
        if not chunk:
            _leave()
        data += chunk
    return bytes(data)


def _send(connection: socket.socket, message: bytes) -> None:
    try:
        connection.sendall(len(message).to_bytes(PREFIX_BYTES, "big") + message)
    except ConnectionError:
        _leave()


def _leave() -> NoReturn:
    raise SystemExit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
