"""Ranks as child processes: they live and die with the first one."""

import os
import queue
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from octavo.worker.tensor_parallel.ranks import LocalRanks

_WAIT = "import signal; signal.pause()"
_WAIT_S = 60.0


def stay(status: int) -> None:
    """Where a rank may end before it is expected to: without this, it would end the tests."""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_rank_knows_its_number_its_parent_and_where_to_meet(tmp_path: Path) -> None:
    code = "import os, pathlib; e = os.environ; pathlib.Path(e['TO'], e['OCTAVO_TP_RANK']).write_text(" + (
        "e['OCTAVO_TP_RENDEZVOUS'] + ' ' + e['OCTAVO_SUPERVISOR_PID'])"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TO", str(tmp_path))
        with LocalRanks(3, tmp_path, command=python(code), end_process=stay) as ranks:
            ranks.expect_end()
    told = f"{ranks.rendezvous} {os.getpid()}"
    assert [(tmp_path / rank).read_text() for rank in "12"] == [told, told]


def test_where_ranks_meet_is_private_and_gone_with_them(tmp_path: Path) -> None:
    ranks = LocalRanks(2, tmp_path, command=python("0"), end_process=stay)
    directory = Path(ranks.rendezvous.removeprefix("file:"))
    assert directory.stat().st_mode & 0o777 == 0o700
    with ranks:
        ranks.expect_end()
    assert not directory.exists()


@pytest.mark.parametrize(
    ("end", "status"), [("import sys; sys.exit(2)", 2), ("0", 1), ("import os; os.kill(os.getpid(), 9)", -9)]
)
def test_a_rank_that_ends_unasked_ends_this_process_with_its_status(tmp_path: Path, end: str, status: int) -> None:
    ended: queue.Queue[int] = queue.Queue()
    with LocalRanks(2, tmp_path, command=python(end), end_process=ended.put):
        assert ended.get(timeout=_WAIT_S) == status
        # Nothing of this process is cleared away after it.
        assert list(tmp_path.iterdir()) == []


def test_a_rank_that_fails_is_waited_for_and_one_that_hangs_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: queue.Queue[int] = queue.Queue()
    with LocalRanks(2, tmp_path, command=python("import sys; sys.exit(3)"), end_process=ended.put) as ranks:
        ranks.await_failure()
        assert ended.get_nowait() == 3
    monkeypatch.setattr("octavo.worker.tensor_parallel.ranks._FAILING_S", 0.01)
    with LocalRanks(2, tmp_path, command=python(_WAIT), end_process=ended.put) as ranks:
        ranks.await_failure()
        ranks._processes[0].kill()
        assert ended.get(timeout=_WAIT_S) == -9


@pytest.mark.parametrize("told", [False, True])
def test_ranks_are_killed_at_once_when_the_first_one_fails(tmp_path: Path, told: bool) -> None:
    ended: queue.Queue[int] = queue.Queue()
    with ExitStack() as failing:
        failing.enter_context(pytest.raises(ZeroDivisionError))
        ranks = failing.enter_context(LocalRanks(3, tmp_path, command=python(_WAIT), end_process=ended.put))
        processes = ranks._processes
        assert [process.poll() for process in processes] == [None, None]
        if told:
            ranks.expect_end()
        raise ZeroDivisionError
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 2
    assert ended.empty()


def test_ranks_that_cannot_be_started_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), LocalRanks(3, tmp_path, command=[str(tmp_path / "missing")]):
        pytest.fail("there are no ranks")
    assert list(tmp_path.iterdir()) == []


# The parent dies as soon as its child has said that it follows.
_FOLLOWER = """
import os, signal
from octavo.worker.tensor_parallel.ranks import die_with_first_rank, leave_signals_to_first_rank
die_with_first_rank()
leave_signals_to_first_rank()
print(os.getpid(), flush=True)
{then}
"""
_PARENT = """
import os, subprocess, sys
environment = {{**os.environ, "OCTAVO_SUPERVISOR_PID": str(os.getpid())}}
subprocess.Popen([sys.executable, "-c", {follower!r}], env=environment)
signal = __import__("signal")
signal.pause()
"""


@pytest.mark.parametrize(
    "then",
    [
        "signal.pause()",
        "os.kill(os.getpid(), signal.SIGSTOP)",
        "[signal.raise_signal(n) for n in (2, 15)]; signal.pause()",
    ],
    ids=["waiting", "stopped", "signalled"],
)
def test_a_child_dies_with_the_first_rank_and_not_at_a_signal(then: str) -> None:
    parent = subprocess.Popen(python(_PARENT.format(follower=_FOLLOWER.format(then=then))), stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout as output:
        child = int(output.readline())
        descriptor = os.pidfd_open(child)
        parent.kill()
        parent.wait(_WAIT_S)
        # The child holds the other end.
        assert output.read() == b""
    os.close(descriptor)


def test_a_child_of_somebody_else_does_not_begin() -> None:
    code = "from octavo.worker.tensor_parallel.ranks import die_with_first_rank; die_with_first_rank()"
    environment = {**os.environ, "OCTAVO_SUPERVISOR_PID": "1"}
    ended = subprocess.run(python(code), env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "the first rank is gone" in ended.stderr
