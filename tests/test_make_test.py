"""`make test` and `make test-deep` run all of their groups whatever one says, and tell which failed."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GROUPS = [
    "test-workers",
    "test-processes",
    "test-interfaces",
    "test-most",
    "test-studies",
    "test-checks",
]
DEEP_GROUPS = ["deep-mutants", "deep-tests", "deep-machines", "deep-simulation"]
# In the places of the tools: they note how they are called, fail where a file says so, and print as pytest, the mutants
# and the simulation do, and pytest more behind it.
_PYTEST = """#!/bin/sh
case "$*" in
  *octavo.v1.generate*) exit 0;;
esac
(IFS='|'; echo "$*") >>calls
case "$*" in
  *"$(cat failing)"*) failed=1;;
  *) failed=0;;
esac
case "$*" in
  *tests.mutants*) echo "$((10 - failed)) of 10 killed";;
  *testing.simulation*) echo "failed: $failed";;
  *) [ $failed = 1 ] && tally="1 failed, 2 passed" || tally="3 passed"
     echo "===== $tally in 0.10s ====="
     echo "a library's last words";;
esac
exit $failed
"""
_CHECK = """#!/bin/sh
! grep -q "$(basename $0)" failing
"""

PASSED = "passed 3 passed in 0.10s"

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


def make(clone: Path, target: str, failing: str) -> tuple[int, dict[str, str], str]:
    """Exit status, each group's line of the table, and all that was printed."""
    (clone / "failing").write_text(failing)
    outer = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES")
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    run = subprocess.run(["make", target], cwd=clone, env=environment, capture_output=True, text=True, timeout=60)
    table = run.stdout.rpartition("\n\n")[2].splitlines()
    *lines, total = [line.partition(" ") for line in table]
    told = {group: " ".join(verdict.split()).partition("; ") for group, _, verdict in lines}
    assert [total[0], *(cpu.partition(" ")[2] for _, _, cpu in told.values())] == ["all", *["s of CPU"] * len(told)]
    seconds = [int(cpu.split()[0]) for _, _, cpu in told.values()]
    assert total[2].split() == [str(sum(seconds)), "s", "of", "CPU"]
    return run.returncode, {group: verdict for group, (verdict, _, _) in told.items()}, run.stdout + run.stderr


def make_test(clone: Path, failing: str) -> tuple[int, dict[str, str]]:
    """Exit status, and each group's line of the table."""
    status, lines, printed = make(clone, "test", failing)
    assert list(lines) == GROUPS, printed
    assert printed.count(" in 0.10s") == 2 * (len(GROUPS) - 1), "each closing line is shown where it came, and again"
    return status, lines


def calls_of_pytest(clone: Path) -> list[list[str]]:
    """The arguments of each run of pytest, as they were given."""
    calls = [line.split("|") for line in (clone / "calls").read_text().splitlines()]
    return [call[2:] for call in calls if call[:2] == ["-m", "pytest"]]


def is_chosen(file: str, call: list[str]) -> bool:
    """Whether such a run collects this file."""
    paths = [word for word in call if word.startswith("tests/")]
    ignored = [word.removeprefix("--ignore=") for word in call if word.startswith("--ignore=")]
    below = [file, *map(str, Path(file).parents)]
    return (not paths or any(path in below for path in paths)) and not any(path in below for path in ignored)


FILES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py"))


def test_all_pass(clone: Path) -> None:
    status, table = make_test(clone, "nothing")
    assert status == 0
    assert table == {**dict.fromkeys(GROUPS, PASSED), "test-checks": "passed checks: all passed"}


@pytest.mark.parametrize(
    ("group", "arguments"),
    [
        ("test-most", "--ignore="),
        ("test-workers", "cacheprovider tests/kernels"),
        ("test-interfaces", "cacheprovider tests/frontend"),
        ("test-processes", "cacheprovider tests/system"),
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


def test_every_file_is_in_one_group_and_what_is_not_deep_is_run_there(clone: Path) -> None:
    make_test(clone, "nothing")
    calls = calls_of_pytest(clone)
    assert len(calls) == len(GROUPS) - 1
    assert all(call[:2] == ["-m", "not deep"] for call in calls)
    assert FILES
    groups = {file: sum(is_chosen(file, call) for call in calls) for file in FILES}
    assert [file for file, count in groups.items() if count != 1] == []


def test_what_is_deep_is_run_by_test_deep_wherever_it_is(clone: Path) -> None:
    status, table, printed = make(clone, "test-deep", "nothing")
    assert status == 0, printed
    assert table == {
        "deep-mutants": "passed 10 of 10 killed",
        "deep-tests": PASSED,
        "deep-machines": PASSED,
        "deep-simulation": "passed failed: 0",
    }
    [call] = [call for call in calls_of_pytest(clone) if call[:2] == ["-m", "deep"]]
    assert all(is_chosen(file, call) for file in FILES)


@pytest.mark.parametrize(
    ("group", "arguments", "line"),
    [
        ("deep-mutants", "tests.mutants", "FAILED (1) 9 of 10 killed"),
        ("deep-tests", "-m deep", "FAILED (1) 1 failed, 2 passed in 0.10s"),
        ("deep-machines", "tests/scheduler/machines", "FAILED (1) 1 failed, 2 passed in 0.10s"),
        ("deep-simulation", "--seeds", "FAILED (1) failed: 1"),
    ],
)
def test_one_deep_group_fails_and_all_others_run(clone: Path, group: str, arguments: str, line: str) -> None:
    status, table, printed = make(clone, "test-deep", arguments)
    assert status != 0
    assert list(table) == DEEP_GROUPS, printed
    assert table[group] == line
    assert all(verdict.startswith("passed ") for name, verdict in table.items() if name != group), table


def test_every_target_is_defined_once() -> None:
    """Of two recipes of one target make takes the last, with no more than a warning."""
    rules = [line for line in (ROOT / "Makefile").read_text().splitlines() if re.match(r"[a-z$(][^=\t]*:(?!=)", line)]
    targets = [target for line in rules if not line.startswith(".PHONY") for target in line.partition(":")[0].split()]
    assert {"test", "upgrade", "dist"} <= set(targets)
    assert sorted(set(targets)) == sorted(targets)
