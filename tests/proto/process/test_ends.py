"""How processes ended, told from one to the next; and whom the kernel killed for want of memory."""

import signal
from pathlib import Path

import pytest

from octavo.runtime.process.ends import ENDS_VARIABLE, End, OutOfMemoryCount, describe_status, read_ends, write_ends


def test_ends_are_read_as_they_were_written() -> None:
    ends = [End(7, -9, is_out_of_memory=True), End(8, 1), End(9, -11)]
    assert read_ends({ENDS_VARIABLE: write_ends(ends)}) == {end.pid: end for end in ends}
    assert read_ends({}) == {}


@pytest.mark.parametrize("text", ["", ",", "7", "7:8", "a:b:c", "7:8:9:10"])
def test_what_is_no_end_is_passed_over(text: str) -> None:
    assert read_ends({ENDS_VARIABLE: f"{text},5:-9:0"}) == {5: End(5, -9)}


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE])
def test_a_crash_is_its_own_doing(number: signal.Signals) -> None:
    assert End(1, -number).is_crash
    assert End(1, 1).is_crash


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, 64])
def test_a_kill_is_not(number: int) -> None:
    assert not End(1, -number).is_crash
    assert not End(1, 0).is_crash


def test_a_status_is_described() -> None:
    assert [describe_status(status) for status in (3, -11, -64, -200)] == [
        *("exit status 3", "signal SIGSEGV", f"signal {signal.Signals(64).name}", "signal 200")
    ]


@pytest.mark.parametrize(
    ("groups", "counter"),
    [
        ("0::/user/app\n", "sys/fs/cgroup/user/app/memory.events"),
        ("0::/../elsewhere\n", "sys/fs/cgroup/memory.events"),
        ("5:cpu,memory:/app\n0::/\n", "sys/fs/cgroup/memory/app/memory.oom_control"),
        ("", "proc/vmstat"),
    ],
    ids=["group", "group of a container", "group of version 1", "machine"],
)
def test_the_kernels_kills_are_counted(tmp_path: Path, groups: str, counter: str) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    path = tmp_path / counter
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("oom 3\noom_kill 2\n")
    count = OutOfMemoryCount(tmp_path)
    assert not count.has_risen()
    path.write_text("oom 4\noom_kill 3\n")
    assert [count.has_risen(), count.has_risen()] == [True, False]


def test_where_nothing_is_counted_nothing_rises(tmp_path: Path) -> None:
    assert not OutOfMemoryCount(tmp_path).has_risen()
