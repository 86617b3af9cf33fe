"""Prompts bring about on the fake device what they are said to, in the steps that they are said to."""

import signal
import subprocess
import sys

import pytest

from octavo.testing.oracles.worker_plans import sampling
from octavo.worker.fake.faults import FakeFault, FakeFaults, parse_faults
from octavo.worker.sequences import WorkerSequence, WorkItem


def item(prompt: list[int], generated: int = 0, followers: int = 0) -> WorkItem:
    tokens = [*prompt, *[1] * generated]
    members = tuple(
        WorkerSequence(index, index, sampling(), len(prompt), tokens, 0, []) for index in range(1 + followers)
    )
    return WorkItem(members[0], 0, len(tokens), members)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("die=500", FakeFault("die", (500,))),
        ("hang=7+8@3", FakeFault("hang", (7, 8), generated=3)),
        ("oom=*>4", FakeFault("oom", (), more_than=4)),
        (" raise=1@2>3 ", FakeFault("raise", (1,), 2, 3)),
    ],
)
def test_a_fault_is_read(text: str, fault: FakeFault) -> None:
    assert parse_faults(text) == (fault,)


def test_several_faults_or_none_are_read() -> None:
    assert [fault.kind for fault in parse_faults("nan=1,die=2")] == ["nan", "die"]
    assert parse_faults("") == ()


@pytest.mark.parametrize("text", ["die", "die=", "die=x", "explode=1", "die=1+", "die=1>2@3", "die=1,"])
def test_what_is_no_fault_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"write die, vanish, hang, raise, oom or nan"):
        parse_faults(text)


@pytest.mark.parametrize(
    ("fault", "items", "num_struck"),
    [
        ("nan=5", [item([1, 5]), item([1, 2])], 1),
        ("nan=5+6", [item([5, 1, 6]), item([4, 5, 6])], 1),
        ("nan=5", [item([1], generated=9)], 0),
        ("nan=1@3", [item([1], generated=2), item([1], generated=3)], 1),
        ("nan=*", [item([1]), item([2])], 2),
        ("nan=*>2", [item([1]), item([2])], 0),
        ("nan=*>2", [item([1]), item([2], followers=1)], 3),
    ],
)
def test_a_fault_strikes_the_sequences_that_it_fits(fault: str, items: list[WorkItem], num_struck: int) -> None:
    assert len(FakeFaults(parse_faults(fault)).strike(items)) == num_struck


@pytest.mark.parametrize(("kind", "error"), [("raise", RuntimeError), ("oom", MemoryError)])
def test_a_step_raises(kind: str, error: type[Exception]) -> None:
    faults = FakeFaults(parse_faults(f"{kind}=5"))
    assert faults.strike([item([1])]) == []
    with pytest.raises(error, match="was told to"):
        faults.strike([item([5])])


_STRIKE = """
import faulthandler, os, sys, threading
from octavo.wire.sampling import SamplingParams
from octavo.worker.fake.faults import FakeFaults, parse_faults
from octavo.worker.sequences import WorkerSequence, WorkItem
sequence = WorkerSequence(1, 0, SamplingParams(max_tokens=1), 1, [5], 0, [])
kind = sys.argv[1]
if kind == "hang":
    # The watchdog takes no lock of the interpreter; the timer does, and gets it only from who gives it up.
    sys.setswitchinterval(1000.0)
    faulthandler.dump_traceback_later(0.5, exit=True)
    timer = threading.Timer(0.1, os._exit, [3])
    timer.daemon = True
    timer.start()
FakeFaults(parse_faults(kind + "=5")).strike([WorkItem(sequence, 0, 1, (sequence,))])
"""


@pytest.mark.parametrize(("kind", "status"), [("die", -signal.SIGSEGV), ("vanish", -signal.SIGKILL), ("hang", 1)])
def test_a_process_dies_or_hangs_with_all_its_threads(kind: str, status: int) -> None:
    done = subprocess.run([sys.executable, "-c", _STRIKE, kind], capture_output=True, timeout=60, check=False)
    assert done.returncode == status, done.stderr.decode()
