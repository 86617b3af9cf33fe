"""A mutant is killed only by a test that passes without it, in a tree whose modules are the tree's own."""

import shutil
from pathlib import Path

import msgspec
import pytest

from .catalogue import Mutant
from .tree import REPOSITORY, TestRunError
from .verdicts import BaselineError, Verdict, judge

MODULE = "SUMS = 0\n\n\ndef plus(a, b):\n    return a + b\n"
_TEST = """
from octavo.scheduler.sums import plus

def test_two_and_two():
    assert plus(2, 2) == 4
"""
_SETTINGS = """
[tool.pytest.ini_options]
addopts = "--import-mode=importlib"
asyncio_default_fixture_loop_scope = "function"
"""
_LATER_TEST = """
from octavo.scheduler.sums import plus

def test_one_and_three():
    assert plus(1, 3) == 4
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """One module with a sum, and two tests of it."""
    root = tmp_path / "repository"
    parts = ("proto", "kernels", "frontend", "scheduler/octavo/scheduler", "worker", "evaluation", "tests/scheduler")
    for part in parts:
        (root / part).mkdir(parents=True)
    (root / "pyproject.toml").write_text(_SETTINGS)
    (root / "scheduler/octavo/scheduler/__init__.py").touch()
    (root / "scheduler/octavo/scheduler/sums.py").write_text(MODULE)
    (root / "tests/scheduler/test_first.py").write_text(_TEST)
    (root / "tests/scheduler/test_later.py").write_text(_LATER_TEST)
    (root / "tests/mutants").mkdir()
    shutil.copy(REPOSITORY / "tests/mutants/under_test.py", root / "tests/mutants")
    return root


def _mutant(new: str, name: str = "other") -> Mutant:
    file = "scheduler/octavo/scheduler/sums.py"
    return Mutant(
        name=name, what="sums", file=file, within="plus", old="a + b", new=new, tests=["scheduler/test_first.py"]
    )


def _judge(repository: Path, *mutants: Mutant) -> list[Verdict]:
    return list(judge(mutants, repository, processes=2))


def test_tells_who_killed_which_and_leaves_the_repository_as_it_is(repository: Path) -> None:
    mutants = [_mutant("a - b", "at-once"), _mutant("a * b", "later"), _mutant("b + a", "never")]
    verdicts = _judge(repository, *mutants)
    assert [verdict.mutant.name for verdict in verdicts] == ["at-once", "later", "never"]
    assert [verdict.killed_by for verdict in verdicts] == [
        "tests/scheduler/test_first.py::test_two_and_two",
        "tests/scheduler/test_later.py::test_one_and_three",
        None,
    ]
    assert (repository / "scheduler/octavo/scheduler/sums.py").read_text() == MODULE


def test_a_test_that_fails_anyway_ends_the_run(repository: Path) -> None:
    (repository / "scheduler/octavo/scheduler/sums.py").write_text(MODULE.replace("a + b", "a + b + 1"))
    with pytest.raises(BaselineError, match="test_two_and_two fails without any mutant"):
        _judge(repository, _mutant("a - b"))


def test_no_path_is_longer_for_a_mutant(repository: Path) -> None:
    """The path of a socket may have about a hundred bytes: what binds one would fail for the name of a mutant."""
    long = "from pathlib import Path\n\ndef test_path():\n    assert len(Path.cwd().name) <= len('baseline')\n"
    (repository / "tests/scheduler/test_paths.py").write_text(long)
    (verdict,) = _judge(repository, _mutant("b + a", "a-mutant-of-a-name-that-is-rather-long"))
    assert verdict.killed_by is None


def test_a_mutant_that_cannot_be_imported_is_not_killed(repository: Path) -> None:
    with pytest.raises(TestRunError, match="ZeroDivisionError"):
        _judge(repository, msgspec.structs.replace(_mutant("1 / 0"), within="", old="SUMS = 0", new="SUMS = 1 / 0"))


def test_nothing_installed_is_tested_in_its_place(repository: Path) -> None:
    (repository / "tests/scheduler/test_first.py").write_text("import octavo.wire.history\n" + _TEST)
    with pytest.raises(TestRunError, match=r"not of the tree under .*: octavo\.wire"):
        _judge(repository, _mutant("a - b"))
