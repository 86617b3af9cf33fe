"""The list of mutants: small bugs, each a replacement of a snippet of Python, kept as data in catalogue.toml."""

import ast
import builtins
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

import msgspec

from .places import Match, Name, Source, find, names_of, rewritten

CATALOGUE = Path(__file__).with_name("catalogue.toml")


class CatalogueError(Exception):
    """A mutant that cannot be planted: the list no longer fits the code, and must be brought up to date."""


class Mutant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The snippet `old`, which begins in the class or function `within` of `file`, replaced by `new`.

    `file` is a path in the repository, `within` a qualified name or "" for the module. Both snippets are written as if
    the line that `old` begins in were not indented. Names, files, layout and comments may have changed since: see
    `places`. `tests`: the files under tests/ that are likeliest to find it, which are tried first.
    """

    name: str
    what: str
    file: str
    within: str
    old: str
    new: str
    tests: list[str]

    def place(self, root: Path) -> tuple[Path, Match]:
        """The file under `root` that contains the snippet, another if it has moved there, and where in the file.

        Raises `CatalogueError` if there is no such place, or more than one.
        """
        path = root / self.file
        wrong = "is gone with its file"
        if path.is_file():
            found = find(self.old, self.within, _source(path))
            if isinstance(found, Match):
                return path, found
            wrong = found
        # Where its file is still there, what is called otherwise is something else.
        needed = {name.text for name in names_of(self.old)} if path.is_file() else set()
        others = [
            (other, find(self.old, self.within, _source(other)))
            for other in _modules(root)
            if other != path and needed <= _words_in(other)
        ]
        moved = [(other, match) for other, match in others if isinstance(match, Match)]
        fewest = 0 if path.is_file() else min((len(match.renamed) for _, match in moved), default=0)
        nearest = [(other, match) for other, match in moved if len(match.renamed) == fewest]
        if len(nearest) == 1:
            return nearest[0]
        if nearest:
            places = "; ".join(f"{other.relative_to(root)}, {match}" for other, match in nearest)
            wrong += f", and {len(nearest)} other files have one ({places})"
        raise CatalogueError(f"{self.name}: its snippet in {self.file}, {self.within or 'the module'}, {wrong}")

    def mutated(self, root: Path) -> tuple[Path, str]:
        """The file that contains the snippet, and its text with the bug.

        Raises `CatalogueError` as `place` does, and if `new` contains names that nothing is called by any more.
        """
        path, match = self.place(root)
        text = match.source.text
        before, after = text[: match.start], text[match.end :]
        line = before.rpartition("\n")[2]
        indent = line[: len(line) - len(line.lstrip())]
        new = rewritten(self.new, match.names).replace("\n", f"\n{indent}")
        changed = before + new + after
        # What ends up empty may be part of an expression, or the only statement of a block.
        if not new and not _compiles(changed):
            changed = f"{before}pass{after}"
        if strange := _unknown(names_of(new) - names_of(text[match.start : match.end]), changed, root):
            raise CatalogueError(f"{self.name}: nothing is called {', '.join(strange)} any more, of which `new` speaks")
        if not _compiles(changed):
            raise CatalogueError(f"{self.name}: with `new` in it {path.relative_to(root)} is no Python")
        return path, changed

    def plant(self, root: Path) -> None:
        """Rewrites the file in the tree under `root`."""
        path, text = self.mutated(root)
        path.write_text(text, encoding="utf-8")

    def test_files(self, root: Path) -> list[str]:
        """`tests`, where these files lie now. Raises `CatalogueError` if one is not there, or nobody knows where."""
        return [_test_file(root / "tests", test, self.name) for test in self.tests]

    def renewed(self, root: Path) -> "Mutant":
        """The same mutant by the names and the file of today. Raises `CatalogueError` as `place` does."""
        path, match = self.place(root)
        return msgspec.structs.replace(
            self,
            file=path.relative_to(root).as_posix(),
            within=".".join(name.text for name in match.scope.path),
            old=rewritten(self.old, match.names),
            new=rewritten(self.new, match.names),
            tests=self.test_files(root),
        )


def _test_file(tests: Path, test: str, name: str) -> str:
    if (tests / test).is_file():
        return test
    moved = [path.relative_to(tests).as_posix() for path in tests.rglob(Path(test).name)]
    if len(moved) != 1:
        raise CatalogueError(f"{name}: there is no {test} under tests/, and its name is that of {len(moved)} files")
    return moved[0]


def _modules(root: Path) -> list[Path]:
    return sorted(root.glob("*/octavo/**/*.py"))


def _compiles(text: str) -> bool:
    try:
        compile(text, "", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


_WORD = re.compile(r"\w+")


def _words_in(path: Path) -> frozenset[str]:
    found = path.stat()
    return _words(path, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=1024)
def _words(path: Path, mtime_ns: int, size: int) -> frozenset[str]:
    """The words of a file as it was at that time: hundreds of mutants ask for those of all modules."""
    return frozenset(_WORD.findall(path.read_text(encoding="utf-8")))


def _unknown(names: set[Name], text: str, root: Path) -> list[str]:
    """Those of some names in a module that nothing has: unbound variables, and attributes that no module speaks of."""
    attributes = {name.text for name in names if name.role == "." and not hasattr(list, name.text)}
    for path in _modules(root) if attributes else ():
        attributes -= _words_in(path)
    variables = {name.text for name in names if not name.role}
    if variables:
        variables -= {*dir(builtins), *_bound(ast.parse(text))}
    return sorted(attributes | variables)


def _bound(module: ast.Module) -> Iterator[str]:
    """The names of a module that something is bound to, wherever that is."""
    for node in ast.walk(module):
        match node:
            case (
                ast.Name(id=name, ctx=ast.Store())
                | ast.arg(arg=name)
                | ast.alias(asname=str(name))
                | ast.alias(name=name)
            ):
                yield name
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name


def _source(path: Path) -> Source:
    return _parsed(path.read_text(encoding="utf-8"))


@lru_cache(maxsize=64)
def _parsed(text: str) -> Source:
    return Source(text)


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
            mutant.test_files(root)
        except CatalogueError as error:
            misfits.append(str(error))
    if misfits:
        raise CatalogueError("\n".join(misfits))


def renew(root: Path, path: Path = CATALOGUE) -> int:
    """Writes the names and files of today into the list, and returns how many mutants have changed by that.

    Raises `CatalogueError` as `Mutant.place` does, before anything is written.
    """
    text = path.read_text(encoding="utf-8")
    mutants = {mutant.name: mutant for mutant in load(path)}
    head, *entries = text.split(_HEADING)
    changed = 0
    for number, entry in enumerate(entries):
        former = mutants[msgspec.toml.decode(_HEADING + entry)["mutant"][0]["name"]]
        now = former.renewed(root)
        if now != former:
            # What follows the last field are comments before the next mutant.
            *_, behind = entry.partition(_field("tests", former.tests))
            entries[number] = "".join(_field(key, value) for key, value in msgspec.to_builtins(now).items()) + behind
            changed += 1
    path.write_text(_HEADING.join([head, *entries]), encoding="utf-8")
    return changed


_HEADING = "[[mutant]]\n"


def _field(key: str, value: str | list[str]) -> str:
    """A line or lines of TOML."""
    if isinstance(value, list):
        return f"{key} = [{', '.join(map(_quoted, value))}]\n"
    return f"{key} = '''\n{value}'''\n" if "\n" in value else f"{key} = {_quoted(value)}\n"


def _quoted(text: str) -> str:
    return f"'{text}'" if '"' in text else f'"{text}"'
