"""The values that make the field of a configuration an option: `Annotated[int, Option("--max-waiting", "...")]`.

They are plain, so that a configuration that is pure stays pure; `octavo.runtime.options.flags` makes click's options.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal


class _Default(enum.Enum):
    OF_FIELD = enum.auto()


OF_FIELD: Final = _Default.OF_FIELD


@dataclass(frozen=True, slots=True)
class Whole:
    """Accepts a whole number, bounds included."""

    at_least: int | None = None
    at_most: int | None = None


@dataclass(frozen=True, slots=True)
class Real:
    """Accepts a number: `at_least` and `at_most` are included, `above` and `below` are not; `finite` refuses infinity
    and NaN."""

    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    finite: bool = False


@dataclass(frozen=True, slots=True)
class OneOf:
    """Accepts one of these words."""

    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Parsed:
    """Accepts a text that `read` turns into the field's value; a `ValueError` of it is the user's."""

    read: Callable[[str], object]
    metavar: str


@dataclass(frozen=True, slots=True)
class Several:
    """Accepts the option more than once. A variable holds the texts with spaces between them, and commas too where
    `commas`; `read` turns them all into the field's value, and a `ValueError` of it is the user's."""

    metavar: str | None = None
    commas: bool = False
    read: Callable[[tuple[str, ...]], object] | None = None


@dataclass(frozen=True, slots=True)
class FilePath:
    """Accepts the path of a file, which must be there unless `exists` is false; `absolute` makes it absolute, with
    links followed, for processes elsewhere."""

    exists: bool = True
    absolute: bool = False


@dataclass(frozen=True, slots=True)
class DirectoryPath:
    """Accepts the path of a directory that is there."""


Values = Whole | Real | OneOf | Parsed | Several | FilePath | DirectoryPath


@dataclass(frozen=True, slots=True)
class Option:
    """Describes the option that a field is. `flag` is `--name`, or `--name/--no-name` for a switch that is on.

    Without `values` the field's type says what is accepted: a switch for `bool`, a word for an enum or a `Literal`,
    any `int`, `float` or `str`. The default is the field's own, or None where it has none; `default` stands in for it:
    None, a text as it would be typed, or a function that makes it when the command runs, whose `ValueError` is the
    user's. `shown_default` describes the default where help cannot show it. The variable is named after the flag unless
    `variable` names it; None: there is none.
    """

    flag: str
    help: str
    values: Values | None = None
    default: str | Callable[[], object] | Literal[_Default.OF_FIELD] | None = OF_FIELD
    shown_default: str | None = None
    variable: str | None = ""
    hidden: bool = False

    @property
    def envvar(self) -> str | None:
        """The environment variable that sets the option; None if none does."""
        if self.variable == "":
            return "OCTAVO_" + self.flag.partition("/")[0].lstrip("-").replace("-", "_").upper()
        return self.variable
