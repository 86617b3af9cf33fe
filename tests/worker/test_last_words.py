"""What the next worker of a name learns of the one before: how it ended, as that or its supervisor says."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.runtime.process.ends import ENDS_VARIABLE, End, write_ends
from octavo.wire.steps import Ending, Predecessor
from octavo.worker.process import LastWords

_LIFE = """
import ctypes, os, signal, sys
from pathlib import Path
from octavo.worker.process import LastWords
words = LastWords(Path(sys.argv[1]), {{}})
print(os.getpid(), flush=True)
words.begin(77)
with words.kept():
    {end}
"""


def live(path: Path, end: str) -> int:
    """A process that serves as 77 and ends so; its process id."""
    code = _LIFE.format(end=end)
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    return int(done.stdout)


def known(path: Path, *ends: End) -> Predecessor | None:
    return LastWords(path, {ENDS_VARIABLE: write_ends(ends)}).predecessor


@pytest.mark.parametrize(
    ("end", "ending", "detail"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", Ending.CRASHED, "Fatal Python error: Segmentation fault"),
        ("os.abort()", Ending.CRASHED, "Fatal Python error: Aborted"),
        ("os.kill(os.getpid(), signal.SIGBUS)", Ending.CRASHED, "Fatal Python error: Bus error"),
        ("os.kill(os.getpid(), signal.SIGILL)", Ending.CRASHED, "Fatal Python error: Illegal instruction"),
        ("raise RuntimeError('the device is\\n lost')", Ending.CRASHED, "RuntimeError: the device is lost"),
        ("os.kill(os.getpid(), signal.SIGKILL)", Ending.UNKNOWN, "it ended without a word"),
        ("os.kill(os.getpid(), signal.SIGTERM)", Ending.UNKNOWN, "it ended without a word"),
    ],
)
def test_it_says_itself_that_it_crashed_and_nothing_if_it_was_killed(
    tmp_path: Path, end: str, ending: Ending, detail: str
) -> None:
    live(tmp_path / "words", end)
    assert known(tmp_path / "words") == Predecessor(77, ending, detail)


@pytest.mark.parametrize(
    ("status", "is_out_of_memory", "ending", "detail"),
    [
        (-signal.SIGKILL, False, Ending.KILLED, "signal SIGKILL"),
        (-signal.SIGKILL, True, Ending.CRASHED, "killed by the kernel for want of memory"),
        (-signal.SIGTERM, False, Ending.KILLED, "signal SIGTERM"),
        (-signal.SIGSEGV, False, Ending.CRASHED, "signal SIGSEGV"),
        (1, False, Ending.CRASHED, "exit status 1"),
        (0, False, Ending.KILLED, "exit status 0"),
    ],
)
def test_who_started_it_may_know_more(
    tmp_path: Path, status: int, is_out_of_memory: bool, ending: Ending, detail: str
) -> None:
    pid = live(tmp_path / "words", "os.kill(os.getpid(), signal.SIGKILL)")
    ends = End(pid + 1, 1), End(pid, status, is_out_of_memory)
    assert known(tmp_path / "words", *ends) == Predecessor(77, ending, detail)
    assert known(tmp_path / "words", End(pid + 1, 1)) == Predecessor(77, Ending.UNKNOWN, "it ended without a word")


def test_its_own_word_and_its_supervisors_are_both_told(tmp_path: Path) -> None:
    pid = live(tmp_path / "words", "raise RuntimeError('why')")
    assert known(tmp_path / "words", End(pid, 1)) == Predecessor(77, Ending.CRASHED, "exit status 1, RuntimeError: why")


def test_one_that_leaves_in_order_leaves_nothing(tmp_path: Path) -> None:
    live(tmp_path / "words", "pass")
    assert known(tmp_path / "words") is None
    assert list(tmp_path.iterdir()) == []


def test_one_that_is_never_welcomed_leaves_what_it_found(tmp_path: Path) -> None:
    live(tmp_path / "words", "os.abort()")
    found = known(tmp_path / "words")
    for _ in range(2):
        with LastWords(tmp_path / "words", {}).kept():
            pass
        with pytest.raises(RuntimeError), LastWords(tmp_path / "words", {}).kept():
            raise RuntimeError("before it served")
        assert known(tmp_path / "words") == found


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"one two\n", b"-1 7\nwords", b"99999999999999999999999 7\nx"])
def test_a_file_that_says_nothing_is_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "words").write_bytes(content)
    assert known(tmp_path / "words") is None


def test_a_place_that_cannot_be_written_to_keeps_nobody_from_serving(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = LastWords(tmp_path / "missing" / "words", {})
    words.begin(1)
    with words.kept():
        served = os.getpid()
    assert served
    assert "how this process ends can be told to nobody" in caplog.text
