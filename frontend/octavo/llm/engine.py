"""Octavo's processes, as a part of this one: started with it, reached by a unix socket, ended with it."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Final

from octavo.cli.supervision import PARENT_VARIABLE
from octavo.client import Client, OctavoError, RetryPolicy

_TOLD_LINES: Final = 30
_PROBE_INTERVAL_S: Final = 0.05
_PATIENCE_S: Final = 15.0
# Settings of a server that is somebody else's: where it listens, who may call it, what it writes.
_NOT_OURS: Final = ("_LISTEN", "_ENDPOINT", "_ADDRESS", "_API_KEYS", "_TLS_CERTIFICATE", "_TLS_KEY", "_TLS_CLIENT_CA")
_NOT_OURS_EITHER: Final = ("OCTAVO_RUNTIME_DIR", "OCTAVO_EVENT_LOG", "OCTAVO_SERVED_MODEL_NAME", "OCTAVO_API_KEY")


class EngineError(RuntimeError):
    """The processes cannot be started, or have ended; with the last that they said."""


class Engine:
    """`octavo serve` in a directory of its own."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        try:
            directory = tempfile.mkdtemp(prefix="octavo-")
        except OSError as error:
            what = f"no directory can be made for the engine's sockets: {error}; name another place in TMPDIR"
            raise EngineError(what) from error
        self.address = f"unix:{directory}/frontend.sock"
        self._lines: deque[str] = deque(maxlen=_TOLD_LINES)
        flags = ("--listen", self.address, "--http-listen", "", "--drain-timeout", "0", *arguments)
        command = [sys.executable, "-m", "octavo.cli.main", "serve", *flags]
        spawned: Future[subprocess.Popen[str]] = Future()
        # The processes are ended by the system with the thread that started them, so that has to live as long.
        thread = threading.Thread(
            target=_run, args=(command, _environment(environment, directory), self._lines, spawned), daemon=True
        )
        thread.start()
        try:
            self._process = spawned.result()
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        self._thread = thread
        self._finalizer = weakref.finalize(self, _end, self._process, directory, os.getpid())

    def wait_ready(self, timeout_s: float) -> None:
        """Until prompts are answered. Raises `EngineError` if they never will be."""
        until = time.monotonic() + timeout_s
        with Client(self.address, timeout=5.0, retries=RetryPolicy(max_retries=0)) as client:
            while not self._answers(client):
                self.check()
                if time.monotonic() > until:
                    raise EngineError(f"the engine was not ready within {timeout_s:g} s{self._last_words()}")
                time.sleep(_PROBE_INTERVAL_S)

    def check(self) -> None:
        """Raises `EngineError` if the processes have ended."""
        if (status := self._process.poll()) is not None:
            self._thread.join(_PATIENCE_S)
            raise EngineError(f"the engine has ended with exit status {status}{self._last_words()}")

    def close(self) -> None:
        """Ends all processes; what they compute is lost."""
        self._finalizer()

    def _answers(self, client: Client) -> bool:
        with contextlib.suppress(OctavoError):
            return any(model.ready for model in client.models())
        return False

    def _last_words(self) -> str:
        return ". Its last lines:\n" + "\n".join(self._lines) if self._lines else ""


def _environment(settings: Mapping[str, str], directory: str) -> dict[str, str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not (name.startswith("OCTAVO_") and name.endswith(_NOT_OURS)) and name not in _NOT_OURS_EITHER
    }
    return {**inherited, **settings, "OCTAVO_RUNTIME_DIR": directory, PARENT_VARIABLE: str(os.getpid())}


def _run(
    command: Sequence[str],
    environment: dict[str, str],
    lines: deque[str],
    spawned: "Future[subprocess.Popen[str]]",
) -> None:
    """Starts the supervisor, and reads what it says to the end."""
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # Ctrl-C is for this process, which may go on with another batch.
            start_new_session=True,
        )
    except BaseException as error:
        spawned.set_exception(error)
        return
    spawned.set_result(process)
    assert process.stdout is not None
    with process.stdout:
        lines.extend(line.rstrip() for line in process.stdout)


def _end(process: "subprocess.Popen[str]", directory: str, owner: int) -> None:
    if os.getpid() != owner:
        # A fork of the process that they belong to.
        return
    process.terminate()
    try:
        process.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        # Its children die with it.
        process.send_signal(signal.SIGKILL)
        process.wait()
    shutil.rmtree(directory, ignore_errors=True)
