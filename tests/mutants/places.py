"""Finds where a snippet of Python stands in a source whose names may have changed since the snippet was written.

Only tokens count: neither comments nor line breaks, indentation or the comma before a closing bracket. A snippet may
begin and end anywhere. Names are compared last: another name in the place of one is a rename, if the former is used no
more where the snippet stands.
"""

import ast
import builtins
import keyword
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

_TOKEN = re.compile(
    r"""(?P<blank>\s+|\\\n|\#[^\n]*)
    |(?P<text>(?i:[rbuf]{0,2})(?:\"{3}(?:\\.|[^\\])*?\"{3}|'{3}(?:\\.|[^\\])*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'))
    |(?P<name>[^\W\d]\w*)
    |(?P<number>0[xXoObB][\da-fA-F_]+|(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][-+]?\d+)?[jJ]?)
    |(?P<operator>\*\*=|//=|>>=|<<=|\.\.\.|->|:=|[-+*/%&|^@<>=!]=|\*\*|//|<<|>>|.)""",
    re.VERBOSE | re.DOTALL,
)
_FIXED = {*keyword.kwlist, *dir(builtins)}
_CLOSING = (")", "]", "}")
# Nothing else contains a class or a function.
_HOLDS_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)
# Places that an error names.
_MOST_NAMED = 4


@dataclass(frozen=True, slots=True)
class Name:
    """An identifier and how it is used: one attribute may be renamed and the variable of its name not.

    `role` is "." for an attribute, "=" for an argument given by keyword, "def" for an enclosing class or function, else
    "".
    """

    text: str
    role: str = ""


@dataclass(frozen=True, slots=True)
class Token:
    """`name` is None for what no rename changes: keywords, builtins, operators, literals."""

    text: str
    start: int
    end: int
    name: Name | None


def tokens_of(text: str) -> list[Token]:
    """The tokens of a source or of a part of one."""
    found: list[Token] = []
    for match in _TOKEN.finditer(text):
        if match.lastgroup == "blank":
            continue
        word, name = match[0], None
        if match.lastgroup == "name" and word not in _FIXED:
            name = Name(word, _role(found, text, match.end()))
        found.append(Token(word, match.start(), match.end(), name))
    return found


def _role(before: list[Token], text: str, end: int) -> str:
    if before and before[-1].text == ".":
        return "."
    # No formatter puts a blank before the "=" of an argument, or leaves it out of an assignment.
    return "=" if text[end : end + 1] == "=" and text[end + 1 : end + 2] != "=" else ""


@dataclass(frozen=True, slots=True)
class Scope:
    """The tokens `first` to `last` of a class or function, and its qualified name's parts; the module's are none."""

    first: int
    last: int
    path: tuple[Name, ...]


class Source:
    """The text of a module, its tokens and its scopes."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = tokens_of(text)

    @cached_property
    def scopes(self) -> list[Scope]:
        """The outer ones come before the inner ones."""
        lines = [0]
        for line in self.text.splitlines(keepends=True):
            lines.append(lines[-1] + len(line))
        starts = [token.start for token in self.tokens]

        def within(node: ast.AST, path: tuple[Name, ...]) -> Iterator[Scope]:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    named = (*path, Name(child.name, "def"))
                    first = min([child.lineno, *(each.lineno for each in child.decorator_list)])
                    begin, end = lines[first - 1], lines[child.end_lineno or first]
                    yield Scope(bisect_left(starts, begin), bisect_left(starts, end) - 1, named)
                    yield from within(child, named)
                elif isinstance(child, _HOLDS_STATEMENTS):
                    yield from within(child, path)

        return [Scope(0, len(self.tokens) - 1, ()), *within(ast.parse(self.text), ())]

    def scope(self, place: int) -> Scope:
        """The innermost scope that contains a token."""
        return [scope for scope in self.scopes if scope.first <= place <= scope.last][-1]

    def uses(self, name: Name, scope: Scope) -> bool:
        """Tells whether a name is used so in a scope; one of role "def", whether the module defines it anywhere."""
        if name.role == "def":
            return any(name in each.path for each in self.scopes)
        return any(token.name == name for token in self.tokens[scope.first : scope.last + 1])


@dataclass(frozen=True, slots=True)
class Match:
    """The tokens `first` to `last` of `source` are the snippet, with other names in the places of its own: `names`."""

    source: Source
    first: int
    last: int
    names: Mapping[Name, Name]

    @property
    def renamed(self) -> dict[Name, Name]:
        return {name: now for name, now in self.names.items() if name != now}

    @property
    def start(self) -> int:
        return self.source.tokens[self.first].start

    @property
    def end(self) -> int:
        return self.source.tokens[self.last].end

    @property
    def scope(self) -> Scope:
        return self.source.scope(self.first)

    @property
    def is_rename(self) -> bool:
        """Tells whether all differences can be renames: of one or of half the names, and of none that is still used."""
        gone = self.renamed
        return len(gone) <= max(1, len(self.names) // 2) and not any(self.source.uses(n, self.scope) for n in gone)

    def __str__(self) -> str:
        line = self.source.text.count("\n", 0, self.start) + 1
        where = ".".join(name.text for name in self.scope.path) or "the module"
        now = ", ".join(f"{name.text} is {other.text}" for name, other in self.renamed.items() if name.role != "def")
        return f"line {line} in {where}" + (f" where {now}" if now else "")


def matches(snippet: str, within: str, source: Source) -> list[Match]:
    """All places where the tokens of a snippet stand but for the names, those with the fewest other names first.

    `within` is the qualified name of the class or function that contains the snippet's beginning, "" for the module.
    """
    wanted = tokens_of(snippet)
    path = tuple(Name(part, "def") for part in within.split(".") if part)
    found = [_match(wanted, path, source, first) for first in _beginnings(wanted[0], source.tokens)]
    return sorted(filter(None, found), key=lambda match: len(match.renamed))


def _beginnings(wanted: Token, tokens: list[Token]) -> list[int]:
    """The places in `tokens` where a snippet can stand whose first token is `wanted`."""
    if wanted.name is not None:
        role = wanted.name.role
        return [place for place, token in enumerate(tokens) if token.name is not None and token.name.role == role]
    # As in `_match`, a comma may be there or not before a closing bracket.
    texts = {wanted.text, *([","] if wanted.text in _CLOSING else _CLOSING if wanted.text == "," else [])}
    return [place for place, token in enumerate(tokens) if token.text in texts]


def _match(wanted: list[Token], path: tuple[Name, ...], source: Source, first: int) -> Match | None:
    names: dict[Name, Name] = {}
    tokens, place, last = source.tokens, first, first
    for token in wanted:
        # A line break brings and takes away the comma before a closing bracket.
        if place + 1 < len(tokens) and token.text in _CLOSING and tokens[place].text == ",":
            place += 1
        if place < len(tokens) and token.text == "," and tokens[place].text in _CLOSING:
            continue
        if place == len(tokens) or not _fits(token, tokens[place], names):
            return None
        last, place = place, place + 1
    if len(set(names.values())) != len(names):
        return None
    match = Match(source, first, last, names)
    return replace(match, names=names | _path_names(path, match.scope.path))


def _fits(wanted: Token, found: Token, names: dict[Name, Name]) -> bool:
    if wanted.name is None or found.name is None:
        return wanted.text == found.text and wanted.name == found.name
    return wanted.name.role == found.name.role and names.setdefault(wanted.name, found.name) == found.name


def _path_names(path: tuple[Name, ...], found: tuple[Name, ...]) -> dict[Name, Name]:
    """The names of the enclosing scopes, from the inside out; where there are more or fewer, they are unlike any."""
    none = Name("", "def")
    inner, other = list(reversed(path)), list(reversed(found))
    depth = max(len(inner), len(other))
    inner += [none] * (depth - len(inner))
    other += [none] * (depth - len(other))
    return dict(zip(inner, other, strict=True))


def find(snippet: str, within: str, source: Source) -> Match | str:
    """The one place where a snippet stands, or what is wrong, as the end of a sentence."""
    found = matches(snippet, within, source)
    likely = [match for match in found if match.is_rename]
    nearest = [match for match in likely if len(match.renamed) == len(likely[0].renamed)]
    if len(nearest) == 1:
        return nearest[0]
    if nearest:
        places = "; ".join(map(str, nearest[:_MOST_NAMED]))
        return f"stands {len(nearest)} times ({places}): make `old` longer or `within` right"
    if found:
        return f"is gone, or changed by more than names; similar is {'; '.join(map(str, found[:_MOST_NAMED]))}"
    return "is gone"


def rewritten(snippet: str, names: Mapping[Name, Name]) -> str:
    """A snippet with other names in the places of its own."""
    parts, end = [], 0
    for token in tokens_of(snippet):
        if token.name is not None and token.name in names:
            parts += [snippet[end : token.start], names[token.name].text]
            end = token.end
    return "".join([*parts, snippet[end:]])


def names_of(snippet: str) -> set[Name]:
    """The names in a snippet that a rename can change, but for those of arguments."""
    return {token.name for token in tokens_of(snippet) if token.name is not None and token.name.role != "="}
