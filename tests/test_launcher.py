"""Processes that are forked are as those that are executed, and are forked only where that makes no difference."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.testbed.stack import Stack
from octavo.testing.launcher import Launched, Launcher

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    launcher = Launcher()
    yield launcher
    launcher.close()


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    # It takes its directory from the environment, so a fault would be seen.
    with Stack(tmp_path, tmp_path) as stack:
        yield stack


def start(launcher: Launcher, stack: Stack, *arguments: str, **environment: str) -> Launched:
    with (stack.directory / f"{arguments[0]}.log").open("wb") as log:
        settings = {**os.environ, "OCTAVO_RUNTIME_DIR": str(stack.directory), **environment}
        process = launcher.start(arguments, settings, log)
    stack.processes[arguments[0]] = process
    return process


def executed(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "octavo.cli.main", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    return done.returncode, done.stdout


def wait_until_serving(stack: Stack) -> None:
    stack.wait_for(lambda: "workers at" in stack.log("scheduler"))


@pytest.mark.parametrize("arguments", [["--help"], ["scheduler", "--no-such-option"], ["worker", "--device", "no"]])
def test_it_says_and_returns_the_same(launcher: Launcher, stack: Stack, arguments: list[str]) -> None:
    assert (start(launcher, stack, *arguments).wait(60), stack.log(arguments[0])) == executed(*arguments)


def test_it_has_its_own_directory_environment_and_files(
    launcher: Launcher, stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = start(launcher, stack, "frontend")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    scheduler = start(launcher, stack, "scheduler", OCTAVO_EVENT_LOG="events")
    wait_until_serving(stack)
    assert os.readlink(f"/proc/{scheduler.pid}/cwd") == str(tmp_path / "here")
    assert (tmp_path / "here" / "events").exists()
    assert f"ipc://{tmp_path}/frontends.sock" in stack.log("scheduler")
    files = [os.readlink(file) for file in Path(f"/proc/{scheduler.pid}/fd").iterdir()]
    assert files.count(str(tmp_path / "scheduler.log")) == 2
    assert not [file for file in files if "pidfd" in file or "frontend.log" in file]
    assert others.pid != scheduler.pid != os.getpid()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGKILL, -9)])
def test_a_signal_ends_it_with_its_status(
    launcher: Launcher, stack: Stack, number: signal.Signals, status: int
) -> None:
    scheduler = start(launcher, stack, "scheduler")
    wait_until_serving(stack)
    assert scheduler.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        scheduler.wait(0.01)
    scheduler.send_signal(signal.SIGSTOP)
    stack.wait_for(lambda: " (stopped)" in Path(f"/proc/{scheduler.pid}/status").read_text())
    scheduler.send_signal(number)
    scheduler.send_signal(signal.SIGCONT)
    assert (scheduler.wait(60), scheduler.poll(), scheduler.returncode) == (status, status, status)
    assert not Path(f"/proc/{scheduler.pid}").exists()
    scheduler.kill()


def test_what_may_change_an_import_is_executed(launcher: Launcher) -> None:
    same = dict(os.environ)
    assert launcher.takes(same)
    assert launcher.takes({**same, "OCTAVO_LOG_LEVEL": "debug", "PYTEST_CURRENT_TEST": "another"})
    assert not launcher.takes({**same, "PYTHONPATH": "/somewhere"})
    assert not launcher.takes({**same, "OMP_NUM_THREADS": "7"})
    assert not launcher.takes({name: value for name, value in same.items() if name != "PATH"})


def test_a_launcher_that_has_ended_says_so(stack: Stack) -> None:
    launcher = Launcher()
    scheduler = start(launcher, stack, "scheduler")
    del stack.processes["scheduler"]
    launcher._process.kill()
    with pytest.raises(RuntimeError, match="the launcher of processes has ended"):
        scheduler.wait(60)
    os.kill(scheduler.pid, signal.SIGKILL)
    with pytest.raises(BrokenPipeError):
        start(launcher, stack, "scheduler")
    launcher.close()
