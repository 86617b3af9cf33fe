"""The ranks of a replica from start to end. Those on one machine are child processes that live and die with the
first."""

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
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from octavo.runtime.process.ends import End, describe_status
from octavo.runtime.process.orphans import end_with_parent, inherited_locks
from octavo.runtime.transport.endpoints import EndpointError, runtime_directory
from octavo.worker.config import WorkerConfig
from octavo.worker.health import Liveness
from octavo.worker.model_settings import LOCAL_SCHEME
from octavo.worker.step.forward import PagedModel
from octavo.worker.tensor_parallel.distributed import DistributedGroup, RankLostError
from octavo.worker.tensor_parallel.follower import Follower
from octavo.worker.tensor_parallel.leader import NO_FOLLOWERS, Followers, Leader
from octavo.worker.tensor_parallel.rendezvous import connect

logger = logging.getLogger(__name__)

# This variable tells a process from its first instruction on that it must not outlive its parent.
_PARENT_VARIABLE = "OCTAVO_SUPERVISOR_PID"
# The seconds that ranks may take to end in order.
_END_S = 10.0
# The seconds that a failing rank may take from its last message to its end.
_FAILING_S = 5.0
# The seconds that a signal may take to end this process.
_DYING_S = 1.0


# The seconds that a rank with its weights waits for those that still read.
_LOADING_PATIENCE_S = 1800.0
# The seconds that a rank may keep the others waiting: heartbeats come many times as often, and ranks compute the same
# at the same time.
PATIENCE_S = 60.0


def end_as(status: int) -> None:
    """Ends this process at once with the status of another, as it crashed or was killed."""
    if status < 0:
        # Other signals may be handled here.
        number = -status if End(0, status).is_crash else signal.SIGKILL
        os.kill(os.getpid(), number)
        time.sleep(_DYING_S)
    os._exit(max(1, status))


class LocalRanks:
    """Starts ranks 1 to `size` - 1, each this process's own command once more.

    If one ends before `expect_end`, this process ends too, at once: in a collective it would wait for that rank. At the
    end of the block, ranks that still run are killed: after a while, or at once after an error. Raises `EndpointError`
    if nothing can be made in `directory`.
    """

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
        """Notes that the ranks are about to learn that they may end."""
        self._expected = True

    def await_failure(self) -> None:
        """Waits a while for the end of a process whose rank is gone.

        If a process ends, and so does not hang, this one ends with its status: that process has logged why.
        """
        self._unexpected.wait(_FAILING_S)

    def _end_all(self, *, patience_s: float) -> None:
        self.expect_end()
        for process in self._processes:
            _end(process, patience_s=patience_s)
        self.forget_meeting()

    def forget_meeting(self) -> None:
        """Removes the directory where the ranks have met."""
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
            # An exit status says that a restart cannot help; a signal, who was at fault.
            self._end_process(status if status < 0 else max(1, status))
            self._unexpected.set()


@contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """Makes Ctrl-C end this process within the block even while it waits in native code, where Python does not
    notice."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def leave_signals_to_first_rank() -> None:
    """Ignores signals: every other rank that has met the first one ends when that one says so."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def die_with_first_rank() -> None:
    """Makes a child of the first rank end when that process dies, however it dies."""
    if not end_with_parent(int(os.environ.get(_PARENT_VARIABLE, "0"))):
        raise SystemExit("the first rank is gone")


def _end(process: "subprocess.Popen[bytes]", *, patience_s: float) -> None:
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Ranks:
    """The ranks of the replica, as seen by this one of them."""

    def __init__(self, group: DistributedGroup) -> None:
        self.group = group
        self._leader = None if group.rank else Leader(group)

    @property
    def followers(self) -> Followers:
        return self._leader or NO_FOLLOWERS

    def loaded(self) -> None:
        """Shortens the patience: from now on a rank that keeps the others waiting is lost."""
        self.group.exchange(0)
        self.group.set_patience(PATIENCE_S)

    def beat(self) -> None:
        """Sends the first rank's heartbeat to the others."""
        if self._leader:
            self._leader.beat()

    def follow(self, model: PagedModel, liveness: Liveness) -> None:
        """Carries out the first rank's frames, until that rank ends."""
        Follower(model, self.group).run(liveness)

    def end(self) -> None:
        """Sends the first rank's last frame."""
        if self._leader:
            self._leader.end()


@contextmanager
def joined(config: WorkerConfig) -> Iterator[Ranks]:
    """Joins the replica of which `config` makes this process a rank. Raises `RendezvousError`, `RankLostError`."""
    if config.tp_rank is None:
        with LocalRanks(config.tp, runtime_directory()) as local, _met(config, 0, local.rendezvous) as ranks:
            if config.device == "cpu":
                # GPUs meet later, over the same file.
                local.forget_meeting()
            try:
                yield ranks
            except RankLostError:
                local.await_failure()
                raise
            finally:
                # However this process ends, the others learn of it before it has ended.
                local.expect_end()
            ranks.end()
        return
    if config.is_local_follower:
        die_with_first_rank()
    assert config.tp_rendezvous is not None, "a rank is given with where it meets the others"
    with _met(config, config.tp_rank, config.tp_rendezvous) as ranks:
        if config.tp_rank:
            leave_signals_to_first_rank()
        yield ranks
        ranks.end()


@contextmanager
def _met(config: WorkerConfig, rank: int, rendezvous: str) -> Iterator[Ranks]:
    # Ranks that are started one by one may wait long for each other.
    with nullcontext() if rendezvous.startswith(LOCAL_SCHEME) else ended_by_ctrl_c():
        gpu = torch.device(config.own_device(rank)) if config.device == "cuda" else None
        group = connect(rendezvous, rank, config.tp, patience_s=_LOADING_PATIENCE_S, gpu=gpu)
    try:
        yield Ranks(group)
    finally:
        group.close()
