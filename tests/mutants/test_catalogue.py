"""The mutants fit the code as it is; one that does not is named."""

from pathlib import Path

import msgspec
import pytest

from .catalogue import CatalogueError, Mutant, check_fit, load
from .tree import REPOSITORY
from .verdicts import OTHER_TESTS, SLOW_TESTS

MUTANTS = load()
MUTANT = Mutant(name="minus", what="subtracts", file="sums.py", old="a + b", new="a - b", tests=[])


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutants_text_stands_once_in_its_file(mutant: Mutant) -> None:
    compile(mutant.mutated(REPOSITORY), mutant.file, "exec")


def test_all_tests_that_are_named_are_there() -> None:
    named = {test for mutant in MUTANTS for test in mutant.tests} | SLOW_TESTS | OTHER_TESTS
    assert [test for test in sorted(named) if not (REPOSITORY / "tests" / test).is_file()] == []


def test_planting_changes_the_text_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text("def plus(a, b):\n    return a + b\n")
    MUTANT.plant(tmp_path)
    assert (tmp_path / "sums.py").read_text() == "def plus(a, b):\n    return a - b\n"


@pytest.mark.parametrize(
    ("text", "count"), [("return a", 0), ("a + b + a + b", 2), (None, 0)], ids=["gone", "ambiguous", "no-such-file"]
)
def test_what_no_longer_fits_is_named(tmp_path: Path, text: str | None, count: int) -> None:
    if text is not None:
        (tmp_path / "sums.py").write_text(text)
    with pytest.raises(CatalogueError, match=f"minus: its text stands {count} times in sums.py, not once"):
        check_fit([MUTANT], tmp_path)


def _write(directory: Path, *mutants: Mutant) -> Path:
    path = directory / "catalogue.toml"
    entries = (
        "[[mutant]]\n" + "".join(f"{key} = {value!r}\n" for key, value in msgspec.to_builtins(m).items())
        for m in mutants
    )
    path.write_text("\n".join(entries))
    return path


def test_two_mutants_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CatalogueError, match="two mutants are called minus"):
        load(_write(tmp_path, MUTANT, MUTANT))


def test_a_mutant_that_changes_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CatalogueError, match="nothing is changed by minus"):
        load(_write(tmp_path, msgspec.structs.replace(MUTANT, new=MUTANT.old)))
