"""What `make test-pythons` tries and how it tells of it."""

import platform
import re
import sys
from pathlib import Path

import pytest

from octavo.testing.pythons import Verdict, closing_line, interpreter, status, supported, table

ROOT = Path(__file__).parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_every_version_from_the_oldest_on_is_named_and_this_one_is_not_older() -> None:
    named = supported(PYPROJECT)
    assert named == list(range(named[0], named[-1] + 1))
    assert f'requires-python = ">=3.{named[0]}"' in PYPROJECT
    assert sys.version_info[:2] >= (3, named[0])


def test_the_readme_and_the_environment_ask_for_the_oldest() -> None:
    oldest = supported(PYPROJECT)[0]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"sys.version_info < (3, {oldest})" in makefile
    assert f"Python 3.{oldest}" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_an_interpreter_that_runs_is_found_on_the_path_or_among_pyenvs(tmp_path: Path) -> None:
    minor = sys.version_info.minor
    name = f"python3.{minor}"
    broken, home = tmp_path / "bin", tmp_path / "home"
    pyenv = home / ".pyenv" / "versions" / platform.python_version() / "bin"
    for directory in (broken, pyenv):
        directory.mkdir(parents=True)
    assert interpreter(minor, str(broken), home) is None
    (broken / name).write_text("#!/bin/sh\nexit 127\n")
    (broken / name).chmod(0o755)
    assert interpreter(minor, str(broken), home) is None
    (pyenv / name).symlink_to(sys.executable)
    assert interpreter(minor, str(broken), home) == pyenv / name
    assert interpreter(minor + 1, str(broken), home) is None


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("...\n===== 3 failed, 12 passed in 1.50s =====\nlast words of a library\n", "3 failed, 12 passed in 1.50s"),
        ("12 passed in 120.00s (0:02:00)\n", "12 passed in 120.00s (0:02:00)"),
        ("Segmentation fault\n", "no closing line"),
    ],
)
def test_the_closing_line_is_pytests(output: str, line: str) -> None:
    assert closing_line(output) == line


def test_what_was_left_out_counts_neither_way_but_something_must_be_tried() -> None:
    good, bad = Verdict(11, True, "5 passed in 1s"), Verdict(12, False, "1 failed in 1s")
    out = Verdict(13, None, "no such interpreter on this machine")
    assert [status(each) for each in ([good, out], [good, bad, out], [out], [])] == [0, 1, 1, 1]
    assert re.sub(" +", " ", table([good, bad, out])).splitlines() == [
        "Python 3.11 passed 5 passed in 1s",
        "Python 3.12 FAILED 1 failed in 1s",
        "Python 3.13 left out no such interpreter on this machine",
    ]
