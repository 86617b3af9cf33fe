"""Docstrings that leave the reader without a subject or a verb, by their first sentences.

The rules are lists of words (words.toml), not grammar: single verdicts may be wrong, the share moves with what is
written.

* A first sentence has *no verb* if none of its words is in `FINITE`, and its first word is neither in `IMPERATIVE` nor
  the third person of one of these.
* A docstring has a *dangling opening* if its first word is in `DANGLING`: a clause without its main clause, as in
  "What a step computes.", or a pronoun whose noun stands elsewhere, as in "They do not." So it has if a preposition
  comes first and no verb follows, as in "By the rules of beams."
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .tree import Module

_WORDS = {
    name: frozenset(words.split())
    for name, words in tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8")).items()
}
DANGLING, PREPOSITIONS = _WORDS["dangling"], _WORDS["prepositions"]
FINITE, IMPERATIVE = _WORDS["finite"], _WORDS["imperative"]
_SENTENCE_END = re.compile(r"(?<=[.!?])\s|\n\s*\n")
_WORD = re.compile(r"`[^`]*`|[A-Za-z][A-Za-z'-]*")


@dataclass(frozen=True)
class Docstring:
    """Where a docstring stands, as `path:line`, and its first sentence."""

    place: str
    sentence: str

    @property
    def words(self) -> list[str]:
        return [word.lower() for word in _WORD.findall(self.sentence)]

    @property
    def dangles(self) -> bool:
        first = self.words[:1]
        return not DANGLING.isdisjoint(first) or (not PREPOSITIONS.isdisjoint(first) and not self.has_verb)

    @property
    def has_verb(self) -> bool:
        return any(word in FINITE for word in self.words) or any(map(_is_order, self.words[:1]))


def read_docstrings(module: Module) -> Iterator[Docstring]:
    """Yields the docstrings of a module, its classes and its functions."""
    nodes: list[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef] = [module.tree, *module.definitions]
    for node in nodes:
        if text := ast.get_docstring(node):
            yield Docstring(f"{module.path}:{node.body[0].lineno}", _SENTENCE_END.split(text, maxsplit=1)[0])


def _is_order(word: str) -> bool:
    """Returns whether `word` is a verb of IMPERATIVE or its third person, as in "copies" and "passes"."""
    stems = {word, word.removesuffix("s"), word.removesuffix("es"), word.removesuffix("ies") + "y"}
    return not stems.isdisjoint(IMPERATIVE)
