"""The fields of a configuration become options of a command, and what the command parses becomes the configuration."""

import ast
import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import click
import msgspec
import pytest
from click.testing import CliRunner

from octavo.runtime.options import option
from octavo.runtime.options.flags import config_of, fields_of, options_of
from octavo.runtime.options.memory import parse_memory
from octavo.runtime.options.option import DirectoryPath, FilePath, OneOf, Option, Parsed, Real, Several, Whole


class Colour(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


def halves(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{text!r} is no number of halves")
    return int(text) // 2


@dataclass(frozen=True, kw_only=True)
class Plain:
    name: Annotated[str, Option("--name", "A name.")]
    count: Annotated[int | None, Option("--count", "A count.", Whole(1, 9))] = None
    share: Annotated[float, Option("--share", "A share.", Real(at_least=0, below=1, finite=True))] = 0.5
    most: Annotated[float, Option("--most", "Any time.", Real(above=0))] = 1.0
    colour: Annotated[Colour, Option("--colour", "A colour.")] = Colour.RED
    size: Annotated[Literal["small", "large"], Option("--size", "A size.")] = "small"
    word: Annotated[str, Option("--word", "A word.", OneOf(("a", "b")))] = "a"
    on: Annotated[bool, Option("--on/--off", "A switch.")] = True
    quiet: Annotated[bool, Option("--quiet", "Another switch.")] = False
    halved: Annotated[int, Option("--twice", "Halves.", Parsed(halves, "N"), default="8")] = 4
    names: Annotated[tuple[str, ...], Option("--names", "Names.", Several("NAME", commas=True))] = ()
    sums: Annotated[int, Option("--sums", "Numbers.", Several(read=lambda texts: sum(map(int, texts))))] = 0
    file: Annotated[Path | None, Option("--file", "A file.", FilePath())] = None
    directory: Annotated[Path | None, Option("--directory", "A directory.", DirectoryPath(), variable=None)] = None
    absent: Annotated[str | None, Option("--absent", "Nothing.", default=None)] = "something"
    made: Annotated[str, Option("--made", "Made late.", default=lambda: "late", shown_default="late")] = "late"
    # No options: a command says nothing of them.
    seed: int = 7
    notes: list[str] = field(default_factory=list)


class Struct(msgspec.Struct, frozen=True, kw_only=True):
    weight: Annotated[float, Option("--weight", "A weight.")] = 1.5
    words: Annotated[tuple[str, ...], Option("--words", "Words.", Several())] = ()
    other: int = 3


def command(config: type, found: list[Any]) -> click.Command:
    @click.command()
    @options_of(config)
    def made(**parsed: Any) -> None:
        found.append(config_of(config, parsed))

    return made


def parsed(*arguments: str, config: type = Plain, **environment: str) -> Any:
    found: list[Any] = []
    result = CliRunner(env=environment).invoke(command(config, found), arguments)
    assert result.exit_code == 0, result.output
    return found[0]


def test_a_type_that_does_not_say_what_is_accepted_is_a_fault() -> None:
    @dataclass(frozen=True)
    class Vague:
        place: Annotated[Path | None, Option("--place", "A place.")] = None

    with pytest.raises(TypeError, match="give the option `values`"):
        options_of(Vague)


def test_a_number_is_one_where_nothing_was_given_before() -> None:
    @dataclass(frozen=True)
    class Counted:
        count: Annotated[int | None, Option("--count", "A count.")] = None
        time: Annotated[float | None, Option("--time", "A time.")] = None

    assert parsed("--count", "4", "--time", "1", config=Counted) == Counted(4, 1.0)


def test_a_default_that_cannot_be_made_is_refused() -> None:
    @dataclass(frozen=True)
    class Placed:
        place: Annotated[str, Option("--place", "A place.", default=lambda: str(halves("nowhere")))]

    result = CliRunner().invoke(command(Placed, []), [])
    assert (result.exit_code, "Error: 'nowhere' is no number of halves" in result.output) == (2, True)
    assert parsed("--place", "here", config=Placed) == Placed("here")


def test_without_options_each_field_has_its_own_default() -> None:
    assert parsed("--name", "n") == Plain(name="n", absent=None)
    assert parsed(config=Struct) == Struct()


def test_a_field_without_a_default_is_none_where_nothing_was_given() -> None:
    assert parsed().name is None


def test_each_kind_of_value_is_read_from_its_option(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    options = (
        "--name n --count 9 --share 0 --most 2 --colour blue --size large --word b --off --quiet --twice 10 --names a"
        f" --names b,c --sums 3 --sums 4 --file {file} --directory {tmp_path} --absent x --made now"
    )
    assert parsed(*options.split()) == Plain(
        name="n",
        count=9,
        share=0.0,
        most=2.0,
        colour=Colour.BLUE,
        size="large",
        word="b",
        on=False,
        quiet=True,
        halved=5,
        names=("a", "b,c"),
        sums=7,
        file=file,
        directory=tmp_path,
        absent="x",
        made="now",
    )


def test_the_colour_is_a_member_and_no_text() -> None:
    assert type(parsed().colour) is type(parsed("--colour", "blue").colour) is Colour


def test_each_option_has_a_variable_named_after_its_flag() -> None:
    config = parsed(OCTAVO_COUNT="3", OCTAVO_ON="false", OCTAVO_TWICE="6", OCTAVO_SUMS="1 2", OCTAVO_NAMES="a b,c")
    assert (config.count, config.on, config.halved, config.sums) == (3, False, 3, 3)
    assert config.names == ("a", "b", "c")


def test_an_option_without_a_variable_reads_none(tmp_path: Path) -> None:
    assert parsed(OCTAVO_DIRECTORY=str(tmp_path)).directory is None


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("--count 0", "'--count' (env var: 'OCTAVO_COUNT'): 0 is not in the range 1<=x<=9."),
        ("--share 1", "1.0 is not in the range 0<=x<1."),
        ("--share nan", "nan is not a finite number"),
        ("--most 0", "0.0 is not in the range x>0."),
        ("--colour green", "'green' is not one of 'red', 'blue'."),
        ("--size huge", "'huge' is not one of 'small', 'large'."),
        ("--word c", "'c' is not one of 'a', 'b'."),
        ("--twice x", "'--twice' (env var: 'OCTAVO_TWICE'): 'x' is no number of halves"),
        ("--sums x", "'--sums' (env var: 'OCTAVO_SUMS'): invalid literal for int()"),
        ("--file /nowhere", "File '/nowhere' does not exist."),
        ("--directory /nowhere", "Directory '/nowhere' does not exist."),
    ],
)
def test_a_value_that_is_not_accepted_is_refused_by_the_name_of_its_option(arguments: str, error: str) -> None:
    made = command(Plain, [])
    for option_ in made.params:
        assert isinstance(option_, click.Option)
        option_.show_envvar = True
    result = CliRunner().invoke(made, arguments.split())
    assert result.exit_code == 2
    assert error in " ".join(result.output.split())


def test_help_lists_the_options_in_the_order_of_the_fields() -> None:
    made = command(Plain, [])
    assert [parameter.name for parameter in made.params] == list(fields_of(Plain))
    assert "seed" not in fields_of(Plain)
    lines = CliRunner().invoke(made, ["--help"], terminal_width=120).output
    assert "--names NAME" in lines
    assert "--twice N" in lines
    assert "--on / --off" in lines


def test_a_file_is_made_absolute_for_processes_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Far:
        near: Annotated[Path, Option("--near", "A file.", FilePath())]
        far: Annotated[Path, Option("--far", "A file.", FilePath(absolute=True))]

    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert parsed("--near", "file", "--far", "file", config=Far) == Far(Path("file"), tmp_path / "file")


def test_other_fields_are_given_beside_what_was_parsed() -> None:
    given = {name: getattr(Plain(name="n"), name) for name in fields_of(Plain)}
    assert config_of(Plain, given, seed=8, name="m") == Plain(name="m", seed=8)


def test_what_marks_a_field_needs_no_parser() -> None:
    tree = ast.parse(Path(option.__file__).read_text(encoding="utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert imported <= {"collections.abc", "dataclasses", "enum", "typing"}


@pytest.mark.parametrize(
    ("text", "amount"),
    [("4096", 4096), ("512MiB", 512 << 20), ("2GiB", 2 << 30), ("1.5 gib", 3 << 29), ("7KiB", 7168), ("10B", 10)],
)
def test_memory_is_read_with_its_unit(text: str, amount: int) -> None:
    assert parse_memory(text) == amount


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2GB", "1e9", "nan"])
def test_other_amounts_of_memory_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no amount of memory"):
        parse_memory(text)
