"""Copies of the repository, as much of it as the tests need, and tests run in them."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
_IMPORT_ROOTS = ("proto", "kernels", "frontend", "scheduler", "worker", "evaluation", "tests/support")
_PARTS = ("proto", "kernels", "frontend", "scheduler", "worker", "evaluation", "tests")
# A mutant may loop for ever. The long searches take minutes where others compute on the same cores.
_TEST_TIMEOUT_S = 300
_FAILURE = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - (.*))?$", re.MULTILINE)


class TestRunError(Exception):
    """pytest came to no verdict: nothing could be imported or collected, or something outside the tree was."""

    __test__ = False


def copy_tree(source: Path, target: Path) -> None:
    for part in _PARTS:
        shutil.copytree(source / part, target / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(source / "pyproject.toml", target)


def first_failure(tree: Path, tests: Sequence[str]) -> str | None:
    """Runs files under tests/ of a tree with the modules of that tree up to the first failure, and names that test.

    Raises `TestRunError` without a verdict.
    """
    run = subprocess.run(_command(tests), cwd=tree, env=_environment(tree), capture_output=True, text=True)
    failure = _FAILURE.search(run.stdout)
    if run.returncode == 0:
        return None
    if run.returncode == 1 and failure:
        return failure[1] + (" (it took too long)" if "Timeout (>" in (failure[2] or "") else "")
    raise TestRunError(f"pytest ended with {run.returncode} in {tree}\n{run.stdout[-4000:]}{run.stderr[-4000:]}")


def _command(tests: Sequence[str]) -> list[str]:
    files = [f"tests/{test}" for test in tests]
    plugins = ["-p", "no:cacheprovider", "-p", "under_test", "--hypothesis-profile=mutants"]
    # A temporary directory of its own: runs that clear one common place get into each other's way.
    options = ["-x", "-q", "--tb=short", f"--timeout={_TEST_TIMEOUT_S}", "--basetemp=temporary"]
    return [sys.executable, "-m", "pytest", *plugins, *options, *files]


def _environment(tree: Path) -> dict[str, str]:
    roots = [str(tree / root) for root in (*_IMPORT_ROOTS, "tests/mutants")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(roots),
        "PYTHONHASHSEED": "0",
        # A mutant of equal length, written in the same second, would be taken for what was compiled before.
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        # Wide enough for the longest name of a test and its reason.
        "COLUMNS": "400",
    }
