"""The list of mutants: small bugs, each a replacement of text in one file, kept as data in catalogue.toml."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec

CATALOGUE = Path(__file__).with_name("catalogue.toml")


class CatalogueError(Exception):
    """A mutant that cannot be planted: the list no longer fits the code, and must be brought up to date."""


class Mutant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`file` (a path in the repository) with `old`, which stands in it exactly once, replaced by `new`.

    `tests`: the files under tests/ that are likeliest to find it, which are tried first.
    """

    name: str
    what: str
    file: str
    old: str
    new: str
    tests: list[str]

    def mutated(self, root: Path) -> str:
        """The file's text in the tree under `root`, with the bug.

        Raises `CatalogueError` if `old` does not stand in it exactly once.
        """
        path = root / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        count = text.count(self.old)
        if count != 1:
            raise CatalogueError(f"{self.name}: its text stands {count} times in {self.file}, not once")
        return text.replace(self.old, self.new)

    def plant(self, root: Path) -> None:
        """Rewrites the file in the tree under `root`."""
        (root / self.file).write_text(self.mutated(root), encoding="utf-8")


class _Catalogue(msgspec.Struct, forbid_unknown_fields=True):
    mutant: list[Mutant]


def load(path: Path = CATALOGUE) -> list[Mutant]:
    """All mutants. Raises `CatalogueError` if two have one name or one changes nothing, and `msgspec.ValidationError`
    on anything but mutants."""
    mutants = msgspec.toml.decode(path.read_bytes(), type=_Catalogue).mutant
    twice = [name for name, count in Counter(mutant.name for mutant in mutants).items() if count > 1]
    if twice:
        raise CatalogueError(f"two mutants are called {', '.join(twice)}")
    unchanged = [mutant.name for mutant in mutants if mutant.old == mutant.new]
    if unchanged:
        raise CatalogueError(f"nothing is changed by {', '.join(unchanged)}")
    return mutants


def check_fit(mutants: Iterable[Mutant], root: Path) -> None:
    """Raises `CatalogueError`, which names them all, if any of the mutants do not fit the tree under `root`."""
    misfits = []
    for mutant in mutants:
        try:
            mutant.mutated(root)
        except CatalogueError as error:
            misfits.append(str(error))
    if misfits:
        raise CatalogueError("\n".join(misfits))
