"""Starts `octavo` by a fork of a process that has its modules already: what is left of a start takes milliseconds.

What comes of it is a process like any other, with a pid, signals, files and an exit status of its own. It has only not
begun with an interpreter's start and its imports, so tests of these start it otherwise.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, BinaryIO, Final

if TYPE_CHECKING:
    import pytest

    from octavo.testbed.stack import Process, Stack

_COMMAND: Final = "octavo.cli.main"
# None of them imports torch: where that is installed, a frontend would not notice that it needs none.
_MODULES: Final = (
    "octavo.cli.supervision",
    "octavo.frontend.cli.frontend",
    "octavo.frontend.server",
    "octavo.frontend.text.tokenizer",
    "octavo.frontend.text.tokenizer_files",
    "octavo.scheduler.cli.serve",
    "octavo.worker.cli.worker",
    "octavo.worker.fake.runner",
)
_MAX_MESSAGE: Final = 1 << 17
# Of a pid or an exit status in decimal, padded.
_NUMBER_BYTES: Final = 16
# pytest writes it anew for each test, for its own use.
_IGNORED: Final = frozenset({"PYTEST_CURRENT_TEST"})


class Launcher:
    """Holds the process that forks. It ends with the process that holds this, or at `close`."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # Without -P, modules beside this file would hide those of libraries.
            command = [sys.executable, "-P", __file__, str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=self._environment)

    def takes(self, environment: Mapping[str, str]) -> bool:
        """Tells whether a process with these variables may be forked. Not if any but Octavo's own differ from when the
        modules were imported, for that they may have changed."""
        names = (self._environment.keys() | environment.keys()) - _IGNORED
        return all(name.startswith("OCTAVO_") or self._environment.get(name) == environment.get(name) for name in names)

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], log: BinaryIO) -> "Launched":
        """Starts `octavo` with these arguments, in this process's directory; its stdout and stderr go to `log`."""
        told, telling = os.pipe()
        message = json.dumps([os.getcwd(), dict(environment), list(arguments)]).encode()
        try:
            socket.send_fds(self._control, [message], [log.fileno(), telling])
        finally:
            os.close(telling)
        return Launched(told)

    def close(self) -> None:
        """Ends the process that forks. Those that it has started go on."""
        self._control.close()
        self._process.wait()


class Launched:
    """Stands for a started process as `subprocess.Popen` does. From the pipe `told` it reads pid and exit status."""

    def __init__(self, told: int) -> None:
        self._told = told
        self._closed = weakref.finalize(self, os.close, told)
        self._lock = threading.Lock()
        self.pid = self._number()
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit status. Raises `subprocess.TimeoutExpired`."""
        status = self._look(timeout)
        if status is None:
            raise subprocess.TimeoutExpired("octavo", timeout or 0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            # It may have ended meanwhile, and its parent has looked.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._told], [], [], timeout)[0]:
            with self._lock:
                if self.returncode is None:
                    self.returncode = self._number()
        return self.returncode

    def _number(self) -> int:
        """Reads the next number from the pipe. Raises `RuntimeError` if the launcher has ended."""
        if not (number := os.read(self._told, _NUMBER_BYTES)):
            raise RuntimeError("the launcher of processes has ended; its stderr says why")
        return int(number)


@functools.cache
def _launcher() -> Launcher:
    launcher = Launcher()
    atexit.register(launcher.close)
    return launcher


def fork_stacks(patch: "pytest.MonkeyPatch") -> None:
    """Lets every `Stack` start its processes with one launcher, as far as it takes them."""
    from octavo.testbed.stack import Stack

    execute = Stack.launch

    def launch(
        stack: "Stack", name: str, arguments: Sequence[str], environment: Mapping[str, str], log: BinaryIO
    ) -> "Process":
        if stack.on(name) or not _launcher().takes(environment):
            return execute(stack, name, arguments, environment, log)
        return _launcher().start(arguments, environment, log)

    patch.setattr(Stack, "launch", launch)


# -- the process that forks -----------------------------------------------------------------------------------------


def _launch(control: socket.socket) -> tuple[str, dict[str, str], list[str]]:
    """Forks at each message, and tells pids and exit statuses. Returns in the child alone, what its message says."""
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    # By the file descriptor that is readable when a child has ended: its pid, and the pipe to who asked for it.
    children: dict[int, tuple[int, int]] = {}
    while True:
        for key, _ in selector.select():
            if key.fd in children:
                selector.unregister(key.fd)
                pid, telling = children.pop(key.fd)
                _tell(telling, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                for fd in (key.fd, telling):
                    os.close(fd)
                continue
            message, fds, _, _ = socket.recv_fds(control, _MAX_MESSAGE, 2)
            if not message:
                sys.exit()
            log, telling = fds
            if (pid := os.fork()) == 0:
                os.dup2(log, 1)
                os.dup2(log, 2)
                selector.close()
                control.close()
                for fd in (log, telling, *children, *(telling for _, telling in children.values())):
                    os.close(fd)
                directory, environment, arguments = json.loads(message)
                return directory, environment, arguments
            _tell(telling, pid)
            os.close(log)
            children[pidfd := os.pidfd_open(pid)] = pid, telling
            selector.register(pidfd, selectors.EVENT_READ)


def _tell(telling: int, number: int) -> None:
    # Nobody may want to know any more.
    with contextlib.suppress(BrokenPipeError):
        os.write(telling, str(number).encode().ljust(_NUMBER_BYTES))


def _main() -> None:
    # Ctrl-C is for those who wait for the processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in _MODULES:
        importlib.import_module(module)
    assert "torch" not in sys.modules
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose a thread"
    gc.collect()
    gc.freeze()
    directory, environment, arguments = _launch(socket.socket(fileno=int(sys.argv[1])))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    # The first of several ranks starts the others as it was started itself.
    sys.orig_argv[1:] = ["-m", _COMMAND, *arguments]
    sys.argv[1:] = arguments
    runpy.run_module(_COMMAND, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
