"""Every pain that docs/known_pains.md tells of has a test that is there to be run."""

import ast
import re
from collections.abc import Iterator

import pytest
from tests.known_pains import PAGE, ROOT, commands, main, named, run

NUM_LINKS_AT_LEAST = 1


def test_every_row_has_a_test_and_no_test_is_without_a_row() -> None:
    assert named() == list(commands())
    assert len(named()) == len(set(named())) > 5


def test_every_row_links_the_issues_that_it_tells_of() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `") and "](" in line]
    for row in rows:
        links = re.findall(r"\[[^\]]*#(\d+)\]\(https://github\.com/[\w.-]+/[\w.-]+/issues/(\d+)\)", row)
        assert len(links) >= NUM_LINKS_AT_LEAST, row
        assert all(shown == linked for shown, linked in links), row


@pytest.mark.deep
def test_every_test_that_is_named_is_collected() -> None:
    """All in one go; and then each file's or test's part of what was found."""
    found = run(sorted({arguments[0] for arguments in commands().values()}), "--collect-only")
    assert found.returncode == 0, found.stdout[-2000:]
    check_named([line for line in found.stdout.splitlines() if "::" in line])


def test_every_test_that_is_named_is_there() -> None:
    """By what its file says."""
    files = {arguments[0].partition("::")[0] for arguments in commands().values()}
    check_named([test for file in files for test in named_in(file)])


def named_in(file: str) -> Iterator[str]:
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield f"{file}::{node.name}"


def check_named(tests: list[str]) -> None:
    for name, arguments in commands().items():
        wanted = [test for test in tests if test.startswith(arguments[0])]
        if "-k" in arguments:
            wanted = [test for test in wanted if arguments[arguments.index("-k") + 1] in test]
        assert wanted, f"{name} names a test that is not there: {arguments}"


def test_a_name_that_the_page_has_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nothing"]) == 2
    assert "no pain is called 'nothing'; there are same-answer-cached" in capsys.readouterr().err
