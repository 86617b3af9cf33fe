"""`octavo serve`: everything starts together, what dies comes back, and everything ends together."""

import fcntl
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from octavo.testbed.stack import Stack, token_request
from octavo.testing.depth import deep
from octavo.v1 import generation_pb2

pytestmark = pytest.mark.system


@contextmanager
def serving(model: Path, *arguments: str, **environment: str) -> Iterator[Stack]:
    """A stack whose only process is the supervisor."""
    with (
        tempfile.TemporaryDirectory(prefix="octavo-") as directory,
        Stack(model, Path(directory), {"OCTAVO_DEVICE": "fake", **environment}) as stack,
    ):
        supervisor = stack.start("serve", arguments=arguments)
        try:
            yield stack
        finally:
            # What it started must end with it, whatever the test did.
            supervisor.terminate()
            supervisor.wait(60)


def children_of(pid: int) -> dict[str, int]:
    """The supervised processes, pid by command."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
            command = (status.parent / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if int(fields["PPid"]) == pid and b"octavo.cli.main" in command:
            found[command[command.index(b"octavo.cli.main") + 1].decode()] = int(fields["Pid"])
    return found


def wait_until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the awaited state did not come"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_serve_announces_itself_and_ends_all_processes_on_sigterm(byte_model: Path) -> None:
    with serving(byte_model, "--workers", "2") as stack:
        stack.wait_ready()
        wait_until(lambda: "Octavo is ready after" in stack.log("serve"))
        stack.wait_for(lambda: len(stack.load().workers) == 2)
        assert len(stack.generate(token_request([1, 2, 3], 5)).token_ids) == 5
        pids = children_of(stack.processes["serve"].pid).values()
        assert len(pids) >= 3
        assert stack.kill("serve", signal.SIGTERM) == 0
        assert not [pid for pid in pids if alive(pid)]


@pytest.mark.parametrize("victim", ["worker", *deep("scheduler", "frontend")])
def test_a_process_that_is_killed_comes_back(byte_model: Path, victim: str) -> None:
    with serving(byte_model) as stack:
        stack.wait_ready()
        before = children_of(stack.processes["serve"].pid)
        os.kill(before[victim], signal.SIGKILL)
        wait_until(lambda: children_of(stack.processes["serve"].pid).get(victim, before[victim]) != before[victim])
        stack.wait_ready()
        stack.wait_for(lambda: len(stack.generate(token_request([1, 2, 3], 5)).token_ids) == 5)
        assert "ended with signal SIGKILL; starting it again" in stack.log("serve")


def test_the_processes_end_with_a_supervisor_that_is_killed(byte_model: Path) -> None:
    with serving(byte_model) as stack:
        stack.wait_ready()
        pids = children_of(stack.processes["serve"].pid)
        stack.kill("serve")
        wait_until(lambda: not [pid for pid in pids.values() if alive(pid)])


def descendants_of(pid: int) -> set[int]:
    """All processes that it has started, and those that these have."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found: set[int] = set()
    while more := {child for child, parent in parents.items() if parent in found | {pid}} - found:
        found |= more
    return found


def test_a_new_serve_follows_one_that_is_killed_amid_a_stream_at_once(byte_model: Path) -> None:
    # Its frontend, asked to end, would have let the stream go on for as long as it lasts.
    with serving(byte_model, OCTAVO_FAKE_STEP_MS="100") as stack:
        stack.wait_ready()
        stream = stack.stream(token_request([1, 2, 3], 500))
        next(stream)
        # Scheduler, frontend, worker, and a process of the frontend that works on texts.
        text = generation_pb2.TokenizeRequest(text="a" * 5000)
        assert len(stack.generation.Tokenize(text).ids) > 1000
        pids = descendants_of(stack.processes["serve"].pid)
        assert len(pids) >= 4
        # Stopped, the worker would not notice a signal that it must take.
        os.kill(children_of(stack.processes["serve"].pid)["worker"], signal.SIGSTOP)
        stack.kill("serve")
        second = stack.start("serve", "second", OCTAVO_FAKE_STEP_MS="1")
        try:
            stack.wait_ready()
            assert not [pid for pid in pids if alive(pid)]
            assert len(stack.generate(token_request([1, 2, 3], 5)).token_ids) == 5
            said = stack.log("second")
            assert not [word for word in ("starting it again", "another", "Error") if word in said]
        finally:
            stream.cancel()
            second.terminate()
            second.wait(60)


def test_a_new_serve_waits_for_what_is_left_of_the_one_before(byte_model: Path) -> None:
    with serving(byte_model) as stack:
        stack.wait_ready()
        pids = descendants_of(stack.processes["serve"].pid)
        stack.kill("serve")
        wait_until(lambda: not [pid for pid in pids if alive(pid)])
        with (stack.directory / "serve-children.lock").open() as lock:
            # As a process does that takes its time to end.
            fcntl.flock(lock, fcntl.LOCK_EX)
            second = stack.start("serve", "second")
            wait_until(lambda: "waiting for processes of" in stack.log("second"))
            assert not children_of(second.pid)
        try:
            stack.wait_ready()
        finally:
            second.terminate()
            second.wait(60)


def test_settings_that_cannot_work_end_serve_with_the_reason(byte_model: Path) -> None:
    with serving(byte_model, OCTAVO_NUM_BLOCKS="none") as stack:
        assert stack.processes["serve"].wait(120) == 1
        assert "Invalid value for '--num-blocks'" in stack.log("serve")
        assert "worker 0 refuses its settings" in stack.log("serve")


def test_random_weights_serve_without_a_weight_file(byte_model: Path) -> None:
    arguments = ("--load-format", "dummy")
    with serving(byte_model, *arguments, OCTAVO_DEVICE="cpu", OCTAVO_NUM_BLOCKS="128", OCTAVO_THREADS="1") as stack:
        stack.wait_ready()
        first, second = (stack.generate(token_request([1, 2, 3], 8)).token_ids for _ in range(2))
        assert first == second
        assert len(first) == 8


def test_a_model_that_cannot_be_served_ends_serve_at_once_with_the_reason(byte_model: Path) -> None:
    with serving(byte_model, OCTAVO_DEVICE="cpu") as stack:
        assert stack.processes["serve"].wait(120) == 1
        assert stack.log("serve").count("holds neither model.safetensors nor model.safetensors.index.json") == 1
        assert "worker 0 refuses its settings" in stack.log("serve")


# Four deaths count if they come within a minute, which on a busy machine the starts alone may take.
PATIENT_SUPERVISOR = """
import sys

if "serve" in sys.orig_argv:
    from octavo.cli import supervision

    supervision._WINDOW_S = 3600.0
"""


def test_a_process_that_keeps_dying_ends_serve(byte_model: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(PATIENT_SUPERVISOR, encoding="utf-8")
    environment = {"PYTHONPATH": str(tmp_path), "OCTAVO_WORKER_ENDPOINT": "tcp://127.0.0.1:70000"}
    with serving(byte_model, **environment) as stack:
        assert stack.processes["serve"].wait(280) == 1
        assert "died 4 times within" in stack.log("serve")


@pytest.mark.parametrize("command", ["serve", *deep("scheduler")])
def test_a_second_service_in_the_same_place_is_refused_and_harms_nothing(byte_model: Path, command: str) -> None:
    with serving(byte_model) as stack:
        stack.wait_ready()
        second = stack.start(command, "second")
        assert second.wait(60) == 1
        assert "another process is bound" in stack.log("second")
        assert len(stack.generate(token_request([1, 2, 3], 5)).token_ids) == 5


@pytest.mark.deep
def test_a_second_serve_on_the_same_address_is_refused_and_harms_nothing(byte_model: Path) -> None:
    with serving(byte_model) as stack, tempfile.TemporaryDirectory(prefix="octavo-") as elsewhere:
        stack.wait_ready()
        second = stack.start("serve", "second", OCTAVO_RUNTIME_DIR=elsewhere)
        assert second.wait(60) == 1
        assert "another server answers on" in stack.log("second")
        assert len(stack.generate(token_request([1, 2, 3], 5)).token_ids) == 5


def test_a_second_signal_ends_everything_at_once(byte_model: Path) -> None:
    with serving(byte_model, OCTAVO_FAKE_STEP_MS="100") as stack:
        stack.wait_ready()
        stream = stack.stream(token_request([1, 2, 3], 500))
        next(stream)
        pids = children_of(stack.processes["serve"].pid).values()
        stack.processes["serve"].send_signal(signal.SIGINT)
        wait_until(lambda: "once more to stop at once" in stack.log("serve"))
        assert all(alive(pid) for pid in pids)
        assert stack.kill("serve", signal.SIGINT) == 0
        assert not [pid for pid in pids if alive(pid)]
        stream.cancel()
