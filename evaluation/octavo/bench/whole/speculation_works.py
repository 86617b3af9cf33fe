"""Makes the works that speculation is measured on: conversations whose last answer repeats much of what came before it,
and some whose does not.

All is seeded or from Python's own standard library. A small model copies where it has been shown how, so each
conversation begins with worked examples, the same for all of a work: which prompts there are depends on nothing else.
"""

import importlib
import inspect
import json
import keyword
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice, permutations
from random import Random
from typing import Any, Final

# Modules of ordinary code and long docstrings.
_MODULES: Final = (
    *("argparse", "ast", "base64", "bisect", "calendar", "cmd", "colorsys", "configparser", "copy", "csv", "difflib"),
    *("fnmatch", "fractions", "functools", "getopt", "glob", "gzip", "heapq", "html", "inspect", "ipaddress"),
    *("linecache", "locale", "mimetypes", "optparse", "os", "pickletools", "plistlib", "posixpath", "pprint", "quopri"),
    *("random", "reprlib", "sched", "shlex", "shutil", "smtplib", "statistics", "string", "tarfile", "tempfile"),
    *("textwrap", "timeit", "tokenize", "trace", "types", "uuid", "warnings", "zipfile"),
)
WORDS: Final = (
    *("amber", "anchor", "basket", "bridge", "candle", "copper", "desert", "dragon", "ember", "engine", "feather"),
    *("forest", "garden", "glacier", "harbor", "island", "jacket", "kettle", "lantern", "meadow", "needle", "orchard"),
    *("pepper", "quarry", "ribbon", "saddle", "temple", "umbrella", "valley", "window", "yellow", "zipper"),
)
_QUESTIONS: Final = (
    "Why do people like the {}?",
    "Write a short story about a {} and a {}.",
    "Give me three tips for buying a {}.",
    "What is the difference between a {} and a {}?",
    "Write a poem about the {}.",
    "How would you explain a {} to a child?",
    "Plan a weekend trip to see a {}.",
)
_CODE, _PROSE = (200, 700), (200, 600)

# What user and assistant say in turn, beginning with the user; the assistant's last may be anything if it is empty.
Turns = list[str]


@dataclass(frozen=True)
class Prompt:
    """Holds what user and assistant have `said`, and the `answer` to be had. The last that was said is the assistant's
    where the answer goes on from there."""

    said: Turns
    answer: str

    @property
    def goes_on(self) -> bool:
        return len(self.said) % 2 == 0


@dataclass(frozen=True)
class Work:
    """Describes a work: whether its answers `copies`, the temperature, whether answers end, and how it is made: the
    turns of so many conversations, which begin with the same `shots` examples. The first words of an answer may be
    `given`, where a small model would else repeat an example."""

    copies: bool
    temperature: float
    ends: bool
    make: Callable[[Random, int], list[Turns]]
    shots: int = 2
    given: int = 0

    def prompts(self, seed: int, count: int) -> list[Prompt]:
        """Returns `count` prompts. Raises `ValueError` if there are not so many."""
        made = self.make(Random(seed), self.shots + count)
        if len(made) < self.shots + count:
            raise ValueError(f"of this work there are {len(made) - self.shots} prompts, not {count}")
        examples = list(chain.from_iterable(made[: self.shots]))
        return [self._prompt(examples, turns) for turns in made[self.shots : self.shots + count]]

    def _prompt(self, examples: Turns, turns: Turns) -> Prompt:
        *asked, answer = turns
        if not self.given:
            return Prompt(examples + asked, answer)
        given = " ".join(answer.split(" ")[: self.given])
        return Prompt([*examples, *asked, given], answer.removeprefix(given))


def _edits(random: Random, count: int) -> list[Turns]:
    found = sorted({source for module in _modules() for source in _functions(module)})
    return [_edit(source) for source in random.sample(found, min(count, len(found)))]


def _edit(source: str) -> Turns:
    """Asks to rename what a function names most."""
    names = Counter(name for name in re.findall(r"\b[a-z_]{3,}\b", source) if not keyword.iskeyword(name))
    del names["self"]
    name = max(names, key=lambda each: (names[each], each))
    answer = re.sub(rf"\b{name}\b", "renamed", source)
    return [f"Rename `{name}` to `renamed` in this function.\n\n```python\n{source}```", f"```python\n{answer}```"]


def _quotes(random: Random, count: int) -> list[Turns]:
    found = sorted({pair for module in _modules() for pair in _paragraphs(module)})
    ask = "Quote this text word for word, then summarise it in one sentence.\n\n"
    return [
        [f"{ask}{text}", f'"{text}"\n\nSummary: {summary}']
        for text, summary in random.sample(found, min(count, len(found)))
    ]


def _copies(random: Random, count: int) -> list[Turns]:
    answers = [_fenced(_records(random, 5)) for _ in range(count)]
    return [[f"Copy this JSON.\n\n{answer}", answer] for answer in answers]


def _follow_ups(random: Random, count: int) -> list[Turns]:
    """Asks for a change of what the assistant has answered before."""
    lists = [_records(random, 4) for _ in range(count)]
    return [
        [
            f"List these articles as JSON: {'; '.join(_said(record) for record in records)}.",
            _fenced(records),
            'Now call the "name" of each "title".',
            _fenced(records).replace('"name"', '"title"'),
        ]
        for records in lists
    ]


def _chats(random: Random, count: int) -> list[Turns]:
    asked = [(question, *words) for question in _QUESTIONS for words in permutations(WORDS, 2)]
    questions = dict.fromkeys(question.format(*words) for question, *words in random.sample(asked, len(asked)))
    return [[question, ""] for question in islice(questions, count)]


def _random_words(random: Random, count: int) -> list[Turns]:
    return [[" ".join(random.choices(WORDS, k=48)), ""] for _ in range(count)]


WORKS: Final = {
    "edit": Work(True, 0.0, True, _edits),
    "quote": Work(True, 0.0, True, _quotes, given=4),
    "json": Work(True, 0.0, True, _copies),
    "follow-up": Work(True, 0.0, True, _follow_ups),
    "chat": Work(False, 0.7, True, _chats, shots=0),
    "random": Work(False, 1.0, False, _random_words, shots=0),
}


def _records(random: Random, count: int) -> list[dict[str, Any]]:
    return [
        {
            "id": random.randrange(1000, 9999),
            "name": " ".join(random.sample(WORDS, 2)),
            "price": random.randrange(100, 9999) / 100,
            "stock": random.randrange(500),
            "color": random.choice(("red", "green", "blue", "black")),
        }
        for _ in range(count)
    ]


def _said(record: dict[str, Any]) -> str:
    return "{name} (id {id}, {color}, price {price}, {stock} in stock)".format(**record)


def _fenced(value: object) -> str:
    return f"```json\n{json.dumps(value, indent=1)}\n```"


def _modules() -> Iterator[Any]:
    return map(importlib.import_module, _MODULES)


def _members(module: Any) -> Iterator[Any]:
    """Yields the functions and classes that a module defines."""
    for _, member in sorted(vars(module).items()):
        if (inspect.isfunction(member) or inspect.isclass(member)) and member.__module__ == module.__name__:
            yield member


def _functions(module: Any) -> Iterator[str]:
    """Yields the sources of a module's functions and methods, of those that are neither short nor long."""
    for member in _members(module):
        for each in vars(member).values() if inspect.isclass(member) else (member,):
            # What dataclasses generate has no source.
            if inspect.isfunction(each) and not each.__code__.co_filename.startswith("<"):
                source = textwrap.dedent(inspect.getsource(each))
                if _CODE[0] <= len(source) <= _CODE[1] and source.startswith("def ") and '"""' not in source:
                    yield source


def _paragraphs(module: Any) -> Iterator[tuple[str, str]]:
    """Yields what a module's docstrings say, and the sentence that each begins with."""
    for each in (module, *_members(module)):
        summary, *paragraphs = (" ".join(part.split()) for part in (inspect.getdoc(each) or "").split("\n\n"))
        text = " ".join(paragraphs[:2])
        is_prose = text.endswith(".") and ">>>" not in text and '"' not in text
        if _PROSE[0] <= len(text) <= _PROSE[1] and is_prose and summary.endswith("."):
            yield text, summary
