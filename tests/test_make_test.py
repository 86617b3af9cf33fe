"""`make test` runs all of its groups whatever one of them says, and tells in the end which failed."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GROUPS = ["test-doors", "test-most", "test-failures", "test-kernels", "test-studies", "test-checks"]
# In the places of the tools: they fail where a file says so, and print as pytest does, and more behind it.
_PYTEST = """#!/bin/sh
case "$*" in
  *octavo.v1.generate*) exit 0;;
  *"$(cat failing)"*) echo "===== 1 failed, 2 passed in 0.10s ====="; exit 1;;
esac
echo "===== 3 passed in 0.10s ====="
echo "a library's last words"
"""
_CHECK = """#!/bin/sh
! grep -q "$(basename $0)" failing
"""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What the target needs, and an environment of which make thinks that it is complete."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "tests").mkdir()
    for script in (ROOT / "tests").glob("*.sh"):
        shutil.copy(script, tmp_path / "tests")
    native = tmp_path / "kernels/octavo/kernels/native"
    files: list[Path | str] = [
        "pyproject.toml",
        "constraints.txt",
        native / "build.py",
        native / "lib/liboctavo_kernels.so",
        ".venv/.ready",
    ]
    for path in (tmp_path / file for file in files):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    tools = tmp_path / ".venv/bin"
    tools.mkdir()
    for name, text in {"python": _PYTEST, "ruff": _CHECK, "mypy": _CHECK, "buf": _CHECK}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    return tmp_path


def make_test(clone: Path, failing: str) -> tuple[int, dict[str, str]]:
    """Exit status, and each group's line of the table."""
    (clone / "failing").write_text(failing)
    outer = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES")
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    run = subprocess.run(["make", "test"], cwd=clone, env=environment, capture_output=True, text=True, timeout=60)
    table = run.stdout.rpartition("\n\n")[2].splitlines()
    lines = {group: verdict for group, _, verdict in (line.partition(" ") for line in table)}
    assert list(lines) == GROUPS, run.stdout + run.stderr
    assert run.stdout.count(" in 0.10s") == 2 * (len(GROUPS) - 1), "each closing line is shown where it came, and again"
    return run.returncode, {group: " ".join(line.split()) for group, line in lines.items()}


PASSED = "passed 3 passed in 0.10s"


def test_all_pass(clone: Path) -> None:
    status, table = make_test(clone, "nothing")
    assert status == 0
    assert table == {**dict.fromkeys(GROUPS, PASSED), "test-checks": "passed checks: all passed"}


@pytest.mark.parametrize(
    ("group", "arguments"),
    [
        ("test-most", "--ignore="),
        ("test-doors", "cacheprovider tests/frontend"),
        ("test-failures", "cacheprovider tests/chaos"),
        ("test-studies", "cacheprovider tests/simulation"),
    ],
)
def test_one_group_fails_and_all_others_run(clone: Path, group: str, arguments: str) -> None:
    status, table = make_test(clone, arguments)
    assert status != 0
    failed = "FAILED (1) 1 failed, 2 passed in 0.10s"
    assert table == {**dict.fromkeys(GROUPS, PASSED), "test-checks": "passed checks: all passed", group: failed}


def test_all_checks_are_looked_at(clone: Path) -> None:
    status, table = make_test(clone, "mypy buf")
    assert status != 0
    assert table == {**dict.fromkeys(GROUPS, PASSED), "test-checks": "FAILED (1) checks: FAILED: types, proto"}
