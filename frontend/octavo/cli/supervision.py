"""Supervises child processes: starts them, starts them again when they die, and stops them in order.

Children end with their supervisor, however it ends.
"""

import asyncio
import fcntl
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TextIO

from octavo.runtime.process.ends import ENDS_VARIABLE, End, OutOfMemoryCount, describe_status, write_ends
from octavo.runtime.process.orphans import LOCK_VARIABLE, end_with_parent, inherited_locks

_log = logging.getLogger(__name__)

PARENT_VARIABLE: Final = "OCTAVO_SUPERVISOR_PID"
# A process that dies this often within this time (seconds) will not get better by itself.
_MAX_DEATHS: Final = 4
_WINDOW_S: Final = 60.0
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0
# A usage or configuration error: restarting with the same flags cannot help.
_USAGE_ERROR: Final = 2
_LOCK_LOOK_S: Final = 0.02
# Each rise of the count belongs to one child.
_out_of_memory: Final = OutOfMemoryCount()


class SupervisionError(Exception):
    """A child keeps dying, or was started wrongly. The message names the child and its exit status."""


def follow_supervisor() -> None:
    """Makes a child of `octavo serve` end at once when that process dies, however it dies; every command calls this."""
    supervisor = os.environ.get(PARENT_VARIABLE)
    if supervisor is not None and not end_with_parent(int(supervisor)):
        raise SystemExit(f"the supervisor (pid {supervisor}) is gone")


@contextmanager
def alone_with_children(path: Path, patience_s: float) -> Iterator[dict[str, str]]:
    """Holds the lock at `path`, which children inherit that get the yielded environment.

    Children of an earlier supervisor that was killed may still be ending. Raises `SupervisionError` if they have not
    ended within `patience_s` seconds.
    """
    try:
        lock = path.open("w")
    except OSError as error:
        what = f"cannot hold {path}, without which children of an earlier service may still run: {error}"
        raise SupervisionError(f"{what}; set OCTAVO_RUNTIME_DIR to another directory") from error
    with lock:
        _await_lock(lock, patience_s)
        yield {LOCK_VARIABLE: str(lock.fileno())}


def _await_lock(lock: TextIO, patience_s: float) -> None:
    give_up_at, has_said = time.monotonic() + patience_s, False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= give_up_at:
                raise SupervisionError(
                    f"processes of an earlier `octavo serve` have not ended within {patience_s:.0f} s; find them with"
                    f" `fuser {lock.name}` and end them"
                ) from None
        if not has_said:
            _log.info("waiting for processes of an earlier `octavo serve` to end")
            has_said = True
        time.sleep(_LOCK_LOOK_S)


@dataclass
class Child:
    """Runs one command, `octavo` with `arguments`, again and again until `stop`."""

    name: str
    arguments: Sequence[str]
    environment: dict[str, str] = field(default_factory=dict)
    process: asyncio.subprocess.Process | None = None
    _stopping: bool = False
    _deaths: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_DEATHS))
    # The ends of earlier processes, which the next process gets to know.
    _ends: deque[End] = field(default_factory=lambda: deque(maxlen=_MAX_DEATHS))

    async def supervise(self) -> None:
        """Runs the command again and again. Returns after `stop`; raises `SupervisionError` if it keeps dying."""
        while not self._stopping:
            self.process = await self._spawn()
            status = await self.process.wait()
            is_out_of_memory = status == -signal.SIGKILL and _out_of_memory.has_risen()
            self._ends.append(End(self.process.pid, status, is_out_of_memory))
            if not self._stopping:
                await self._pause_after(status)

    async def run_once(self) -> None:
        """Runs the command to its end. Raises `SupervisionError` unless it ends well."""
        self.process = await self._spawn()
        if status := await self.process.wait():
            raise SupervisionError(f"{self.name} failed with {describe_status(status)}")

    async def stop(self, patience_s: float) -> None:
        """Sends SIGTERM, and SIGKILL after `patience_s` seconds."""
        self._stopping = True
        if self.process is None or self.process.returncode is not None:
            return
        self.process.terminate()
        try:
            await asyncio.wait_for(self.process.wait(), patience_s)
        except TimeoutError:
            _log.error("%s did not stop within %.0f s; killing it", self.name, patience_s)
            self.process.kill()
            await self.process.wait()

    def kill(self) -> None:
        """Sends SIGKILL, without waiting."""
        self._stopping = True
        if self.process is not None and self.process.returncode is None:
            self.process.kill()

    async def _spawn(self) -> asyncio.subprocess.Process:
        environment = {
            **os.environ,
            **self.environment,
            PARENT_VARIABLE: str(os.getpid()),
            ENDS_VARIABLE: write_ends(self._ends),
        }
        # A session of its own: Ctrl-C reaches the supervisor alone, which stops the children in order.
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "octavo.cli.main", *self.arguments),
            env=environment,
            start_new_session=True,
            pass_fds=inherited_locks(environment),
        )

    async def _pause_after(self, status: int) -> None:
        now = time.monotonic()
        self._deaths.append(now)
        if status == _USAGE_ERROR:
            raise SupervisionError(f"{self.name} refuses its settings ({describe_status(status)})")
        if len(self._deaths) == _MAX_DEATHS and now - self._deaths[0] < _WINDOW_S:
            raise SupervisionError(
                f"{self.name} died {_MAX_DEATHS} times within {_WINDOW_S:.0f} s, last with {describe_status(status)}"
            )
        recent = sum(now - death < _WINDOW_S for death in self._deaths)
        pause = min(_FIRST_PAUSE_S * 4 ** (recent - 1), _LONGEST_PAUSE_S)
        _log.error("%s ended with %s; starting it again in %.1f s", self.name, describe_status(status), pause)
        await asyncio.sleep(pause)
