"""The mutants fit the code as it is; one that does not is named."""

from pathlib import Path

import msgspec
import pytest

from .catalogue import CatalogueError, Mutant, check_fit, load, renew
from .tree import REPOSITORY
from .verdicts import OTHER_TESTS, SLOW_TESTS

MUTANTS = load()
FILE = "scheduler/octavo/scheduler/sums.py"
SUMS = "class Sums:\n    def plus(self, a, b):\n        return a + b\n"
MUTANT = Mutant(
    name="minus", what="subtracts", file=FILE, within="Sums.plus", old="a + b", new="a - b", tests=["test_sums.py"]
)


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    """A tree of one module."""
    path = tmp_path / FILE
    path.parent.mkdir(parents=True)
    path.write_text(SUMS)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_sums.py").touch()
    return path


def test_all_mutants_and_their_tests_are_there() -> None:
    assert MUTANTS
    check_fit(MUTANTS, REPOSITORY)


def test_all_tests_that_are_sorted_out_are_there() -> None:
    assert [test for test in sorted(SLOW_TESTS | OTHER_TESTS) if not (REPOSITORY / "tests" / test).is_file()] == []


def test_planting_changes_the_text_and_nothing_else(sums: Path, tmp_path: Path) -> None:
    MUTANT.plant(tmp_path)
    assert sums.read_text() == SUMS.replace("a + b", "a - b")


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("a + b", "sum(\n    (a, b)\n)", SUMS.replace("a + b", "sum(\n            (a, b)\n        )")),
        ("return a + b", "c = a\nreturn c", SUMS.replace("return a + b", "c = a\n        return c")),
        ("+ b", "", SUMS.replace(" + b", " ")),
        ("return a + b", "", SUMS.replace("return a + b", "pass")),
    ],
    ids=["wrapped", "two-statements", "nothing-in-an-expression", "nothing-in-a-block"],
)
def test_what_is_planted_is_indented_and_filled(sums: Path, tmp_path: Path, old: str, new: str, text: str) -> None:
    msgspec.structs.replace(MUTANT, old=old, new=new).plant(tmp_path)
    assert sums.read_text() == text


def test_a_mutant_follows_its_snippet_into_another_file(sums: Path, tmp_path: Path) -> None:
    other = sums.rename(sums.with_name("totals.py"))
    other.write_text(SUMS.replace("Sums", "Totals"))
    assert MUTANT.mutated(tmp_path) == (other, SUMS.replace("Sums", "Totals").replace("a + b", "a - b"))
    # As it is in two files, nobody knows which is meant.
    sums.with_name("more.py").write_text(SUMS.replace("plus", "and_"))
    with pytest.raises(CatalogueError, match=r"is gone with its file, and 2 other files have one \(.*more\.py.*totals"):
        MUTANT.mutated(tmp_path)
    # It is exactly this one; where the file that it came from is still there, no other would do.
    other.write_text(SUMS)
    assert MUTANT.mutated(tmp_path)[0] == other
    sums.write_text(SUMS.replace("+", "*"))
    assert MUTANT.mutated(tmp_path)[0] == other
    other.write_text(SUMS.replace("Sums", "Totals"))
    with pytest.raises(CatalogueError, match=r"minus: its snippet in .*sums\.py, Sums\.plus, is gone"):
        MUTANT.mutated(tmp_path)


@pytest.mark.parametrize(
    ("text", "new", "why"),
    [
        ("a", "a - b", "Sums.plus, is gone"),
        ("a + b + (a + b)", "a - b", "Sums.plus, stands 2 times"),
        ("a + b", "a +", "with `new` in it .*sums.py is no Python"),
        ("a + b", "a - c", "nothing is called c any more, of which `new` speaks"),
        ("a + b", "a - a.size", "nothing is called size any more"),
    ],
    ids=["gone", "ambiguous", "no-python", "no-variable", "no-attribute"],
)
def test_what_no_longer_fits_is_named(sums: Path, tmp_path: Path, text: str, new: str, why: str) -> None:
    sums.write_text(SUMS.replace("a + b", text))
    with pytest.raises(CatalogueError, match=f"minus: .*{why}"):
        check_fit([msgspec.structs.replace(MUTANT, new=new)], tmp_path)


def test_its_tests_are_found_where_they_have_moved_to(sums: Path, tmp_path: Path) -> None:
    (tmp_path / "tests/core").mkdir()
    moved = (tmp_path / "tests/test_sums.py").rename(tmp_path / "tests/core/test_sums.py")
    check_fit([MUTANT], tmp_path)
    assert MUTANT.renewed(tmp_path).tests == ["core/test_sums.py"]
    moved.unlink()
    with pytest.raises(CatalogueError, match=r"minus: there is no test_sums\.py under tests/, .* of 0 files"):
        check_fit([MUTANT], tmp_path)


def _write(directory: Path, *mutants: Mutant) -> Path:
    path = directory / "catalogue.toml"
    entries = (
        "[[mutant]]\n" + "".join(f"{key} = {value!r}\n" for key, value in msgspec.to_builtins(m).items())
        for m in mutants
    )
    path.write_text("\n".join(entries).replace("'", '"'))
    return path


def test_two_mutants_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CatalogueError, match="two mutants are called minus"):
        load(_write(tmp_path, MUTANT, MUTANT))


def test_a_mutant_that_changes_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CatalogueError, match="nothing is changed by minus"):
        load(_write(tmp_path, msgspec.structs.replace(MUTANT, new=MUTANT.old)))


def test_the_list_is_renewed_in_place(sums: Path, tmp_path: Path) -> None:
    times = msgspec.structs.replace(MUTANT, name="times", file="scheduler/octavo/scheduler/gone.py", new="a * b")
    path = _write(tmp_path, MUTANT, times)
    path.write_text(f"# Sums.\n\n{path.read_text()}\n# The end.\n")
    former = path.read_text()
    assert renew(tmp_path, path) == 1, "one has moved"
    moved = former.replace("gone.py", "sums.py")
    assert path.read_text() == moved
    sums.write_text(SUMS.replace("plus", "total").replace("a + b", "x + b").replace("a,", "x,"))
    assert renew(tmp_path, path) == 2
    assert path.read_text() == moved.replace(".plus", ".total").replace("a + b", "x + b").replace(
        "a - b", "x - b"
    ).replace("a * b", "x * b")
    assert renew(tmp_path, path) == 0
