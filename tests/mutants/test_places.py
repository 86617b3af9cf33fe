"""A snippet is found under other names, in another layout and in another place, and nothing else is taken for it."""

import re

import pytest

from octavo.testing.depth import deep

from .catalogue import load
from .places import Match, Name, Source, find, rewritten, tokens_of
from .tree import REPOSITORY

SOURCE = '''
"""A pool of blocks."""

LIMIT = 2


class Pool:
    def take(self, count):
        if not count:
            return []
        self.free -= count  # All at once.
        return self.cut(count, step=1)

    def give(self, count):
        if not count:
            return None
        self.free += count


def total(pools):
    return sum(pool.free for pool in pools)
'''
# Snippets, each with the function that contains it.
TAKE = ("self.free -= count\nreturn self.cut(count, step=1)", "Pool.take")
EMPTY = ("if not count:\n    return []", "Pool.take")


def found(snippet: tuple[str, str], text: str) -> Match:
    match = find(*snippet, Source(text))
    assert isinstance(match, Match), match
    return match


def lines(match: Match) -> str:
    return match.source.text[match.start : match.end]


@pytest.mark.parametrize(
    ("former", "now"),
    [
        ("count", "number"),
        (".free", ".blocks"),
        (".cut", ".divide"),
        ("step", "stride"),
        ("take", "allocate"),
        ("Pool", "BlockPool"),
    ],
)
def test_a_name_has_changed(former: str, now: str) -> None:
    text = SOURCE.replace(former, now)
    match = found(TAKE, text)
    assert lines(match) == TAKE[0].replace("\n", "  # All at once.\n        ").replace(former, now)
    assert len(match.renamed) == 1
    assert found(EMPTY, text).end < match.start


def test_a_snippet_is_rewritten_by_the_names_of_today() -> None:
    match = found(TAKE, SOURCE.replace("count", "number").replace(".cut", ".divide"))
    assert rewritten("self.cut(count)  # cut\nself.count = cut", match.names) == (
        "self.divide(number)  # cut\nself.count = cut"
    )


def test_an_attribute_is_not_the_variable_of_its_name() -> None:
    match = found(("self.free = free", ""), "self.free = spare\n")
    assert match.renamed == {Name("free"): Name("spare")}


@pytest.mark.parametrize(
    "text",
    [
        SOURCE.replace("self.cut(count, step=1)", "self.cut(\n            count,\n            step=1,\n        )"),
        SOURCE.replace(
            "        self.free -= count  # All at once.\n", "        self.free -= count\n\n        # Cut.\n"
        ),
        SOURCE.replace("class Pool:\n", "class Pool:\n    class Inner:\n        pass\n\n"),
        "if True:\n" + SOURCE.replace("\n", "\n    "),
    ],
    ids=["wrapped", "commented", "beside-others", "indented"],
)
def test_layout_and_comments_have_changed(text: str) -> None:
    assert not found(TAKE, text).renamed


def test_a_comma_before_a_closing_bracket_may_be_there_or_not() -> None:
    for snippet in ("f(a, [b, c])", "f(\n    a,\n    [\n        b,\n        c,\n    ],\n)"):
        for text in ("x = f(a, [b, c])\n", "x = f(a, [b, c,],)\n"):
            assert tokens_of(lines(found((snippet, ""), text)))[0].text == "f"
    assert found(("f(a, b),", ""), "g(f(a, b), 1)\n").renamed == {}
    assert found(("f(a, b),", ""), "g(f(a, b))\n").renamed == {}


@pytest.mark.parametrize(
    ("snippet", "text", "why"),
    [
        (TAKE, SOURCE.replace("step=1", "step=2"), "^is gone"),
        (TAKE, SOURCE.replace("self.free -= count", "self.free -= count + 1"), "^is gone"),
        # What is called `count` goes on: this is another variable.
        (TAKE, SOURCE.replace("self.free -= count", "self.free -= size"), "^is gone"),
        (TAKE, SOURCE.replace("self.free -= count", "self.free -= step"), "^is gone"),
        # The function is there, and what it contained is not: a namesake in another is no move.
        (
            ("if not count:", "Pool.take"),
            SOURCE.replace("if not count:", "if not self:", 1),
            r"similar is .*line 15 in Pool\.give$",
        ),
        # Most of its names are others.
        (TAKE, SOURCE.replace("count", "n").replace("free", "f").replace("cut", "c").replace("take", "t"), "^is gone"),
        (("if not size:", "Pool.choose"), SOURCE, r"is gone, .*line 9 in Pool\.take where size is count"),
        (("if count not in self:", "Pool.take"), SOURCE, "^is gone$"),
        (("return", "Pool.take"), SOURCE, r"^stands 2 times \(line 10 in Pool\.take; .*: make `old` longer"),
    ],
    ids=range(9),
)
def test_anything_else_is_not_taken_for_it(snippet: tuple[str, str], text: str, why: str) -> None:
    wrong = find(*snippet, Source(text))
    assert isinstance(wrong, str)
    assert re.search(why, wrong), wrong


def test_of_two_that_are_alike_the_one_with_more_of_its_names_is_meant() -> None:
    assert "-=" not in lines(found(("if not count:\n    return []", "Pool.take"), SOURCE))
    text = "def f(a, b):\n    a = b\n    c = b\n    d = e\n"
    assert lines(found(("c = b", "f"), text)) == "c = b"
    assert lines(found(("x = b", "f"), text.replace("    c = b\n", ""))) == "a = b"


@pytest.mark.parametrize("all_names", [False, *deep(True)])
def test_every_mutant_outlives_the_renaming_of_a_name(*, all_names: bool) -> None:
    """Each of its names in turn, or of some mutants their function's."""
    lost = []
    for mutant in load()[:: 1 if all_names else 4]:
        _, match = mutant.place(REPOSITORY)
        names = {name.text for name in (match.names if all_names else match.scope.path[-1:])}
        for name in names:
            again = find(mutant.old, mutant.within, Source(renamed(match.source, name)))
            if isinstance(again, str) or again.first != match.first:
                lost.append(f"{mutant.name} if {name} is renamed: it {again}")
    assert lost == []


def renamed(source: Source, name: str) -> str:
    """A module whose names that are spelled so are spelled otherwise."""
    return rewritten(source.text, {Name(name, role): Name(f"other_{name}") for role in ("", ".", "=")})
