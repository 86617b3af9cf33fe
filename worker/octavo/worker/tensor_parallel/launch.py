"""The other ranks of a replica on one machine: child processes that live and die with this one."""

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from octavo.runtime.process.ends import End, describe_status
from octavo.runtime.process.orphans import end_with_parent, inherited_locks
from octavo.runtime.transport.endpoints import EndpointError
from octavo.worker.config import LOCAL_SCHEME

logger = logging.getLogger(__name__)

# By it a process knows from its first instruction on that it must not outlive its parent.
_PARENT_VARIABLE = "OCTAVO_SUPERVISOR_PID"
# How long ranks that were told to end may take.
_END_S = 10.0
# How long one that fails may take from its last word with the others to its end.
_FAILING_S = 5.0
# How long a signal that ends this process may take.
_DYING_S = 1.0


def end_as(status: int) -> None:
    """Ends this process at once with the status of another, as it crashed or was killed."""
    if status < 0:
        # Others may be handled here.
        number = -status if End(0, status).is_crash else signal.SIGKILL
        os.kill(os.getpid(), number)
        time.sleep(_DYING_S)
    os._exit(max(1, status))


class LocalRanks:
    """Ranks 1 to `size` - 1, each this process's own command once more. If one ends before `expect_end`, this process
    ends too, at once: in a collective it would wait for it. On the way out those that still run are killed, after a
    while if nothing was raised. Raises `EndpointError` if nothing can be made in `directory`."""

    def __init__(
        self,
        size: int,
        directory: Path,
        *,
        command: Iterable[str] = (),
        end_process: Callable[[int], object] = end_as,
    ) -> None:
        try:
            self._directory = Path(tempfile.mkdtemp(prefix="tp-", dir=directory))
        except OSError as error:
            what = f"ranks cannot meet in {directory}: {error}; set OCTAVO_RUNTIME_DIR to another place"
            raise EndpointError(what) from error
        self.rendezvous = f"{LOCAL_SCHEME}{self._directory}"
        self._size = size
        self._command = list(command) or [sys.executable, *sys.orig_argv[1:]]
        self._end_process = end_process
        self._expected = False
        self._unexpected = threading.Event()
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        try:
            for rank in range(1, self._size):
                self._start(rank)
        except BaseException:
            self._end_all(patience_s=0)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_all(patience_s=0 if error else _END_S)

    def expect_end(self) -> None:
        """The ranks are about to learn that they may end."""
        self._expected = True

    def await_failure(self) -> None:
        """A rank is gone. If its process ends, and so does not hang, this one ends with its status: that one has said
        why."""
        self._unexpected.wait(_FAILING_S)

    def _end_all(self, *, patience_s: float) -> None:
        self.expect_end()
        for process in self._processes:
            _end(process, patience_s=patience_s)
        self.forget_meeting()

    def forget_meeting(self) -> None:
        """Nothing need be left of where the ranks have met."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self, rank: int) -> None:
        settings = {
            "OCTAVO_TP_RANK": str(rank),
            "OCTAVO_TP_RENDEZVOUS": self.rendezvous,
            _PARENT_VARIABLE: str(os.getpid()),
        }
        # A session of its own: Ctrl-C reaches the first rank alone, which ends the others in order.
        process = subprocess.Popen(
            self._command,
            env={**os.environ, **settings},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=inherited_locks(),
        )
        self._processes.append(process)
        threading.Thread(target=self._watch, args=(rank, process), name=f"rank-{rank}", daemon=True).start()

    def _watch(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        status = process.wait()
        if not self._expected:
            logger.error("rank %d has ended with %s, and this replica with it", rank, describe_status(status))
            self.forget_meeting()
            # A status of its own says that starting it anew cannot help; a signal, whose doing it was.
            self._end_process(status if status < 0 else max(1, status))
            self._unexpected.set()


@contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """Within it Ctrl-C ends this process even while it waits in native code, where Python would not hear of it."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def leave_signals_to_first_rank() -> None:
    """Called by every other rank that has met it: it ends when the first one says so, not at a signal."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def die_with_first_rank() -> None:
    """Called by the first rank's children: each ends when that dies, however it dies."""
    if not end_with_parent(int(os.environ.get(_PARENT_VARIABLE, "0"))):
        raise SystemExit("the first rank is gone")


def _end(process: "subprocess.Popen[bytes]", *, patience_s: float) -> None:
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
