"""Which values of a parameter `make test` tries, and which are left to `make test-deep`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.testing.depth import deep, deep_unless, every, every_row

SUITE = """
import pytest
from octavo.testing.depth import deep, deep_unless, every

@pytest.mark.parametrize("number", every(3, range(6), first=1))
def test_every(number): pass

@pytest.mark.parametrize("word", deep_unless(lambda word: word < "b", "abc"))
@pytest.mark.parametrize("size", [1, *deep(2)])
def test_pairs(word, size): pass
"""


def names(values: list[object]) -> list[object]:
    return [getattr(value, "values", value) for value in values]


def test_no_value_is_lost() -> None:
    assert names(every(2, "abc")) == ["a", ("b",), "c"]
    assert names(every_row(2, [(1, 2), (3, 4)])) == [(1, 2), (3, 4)]
    assert names(deep_unless("b".__eq__, "abc")) == [("a",), "b", ("c",)]
    assert names(deep(1, 2)) == [(1,), (2,)]


@pytest.mark.parametrize(
    ("mark", "chosen"),
    [
        ("not deep", {"every[1]", "every[4]", "pairs[1-a]"}),
        (
            "deep",
            {"every[0]", "every[2]", "every[3]", "every[5]"}
            | {f"pairs[{n}-{w}]" for n in "12" for w in "abc"} - {"pairs[1-a]"},
        ),
    ],
)
def test_a_combination_with_a_deep_value_is_deep(mark: str, chosen: set[str], tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = deep: x\n")
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", mark]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    told = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    found = {line.partition("::test_")[2] for line in told.splitlines() if line.startswith("test_suite.py::")}
    assert found == chosen
