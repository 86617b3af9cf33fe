"""Sets what a model thinks apart from what it answers, in a text that arrives in parts."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Final, NamedTuple

from octavo.frontend.answer_parsers.lark import TokenIds, any_token_but, at_most, literal, quoted
from octavo.frontend.answer_parsers.scanning import certain_length

# Space that models write between reasoning and answer.
_SPACE: Final = r"SPACE: /[ \t\r\n]{1,8}/"


class Split(NamedTuple):
    """Holds text that was thought, and text behind it that is the answer's."""

    reasoning: str = ""
    text: str = ""


@dataclass(frozen=True)
class ReasoningFormat(ABC):
    """Describes how a model sets apart what it thinks."""

    @property
    @abstractmethod
    def markers(self) -> tuple[str, ...]:
        """Returns the texts that may be special tokens, without which nothing could be set apart."""

    @abstractmethod
    def parser(self, *, is_open: bool = False) -> "ReasoningParser":
        """Makes the parser of one sequence. With `is_open` the prompt has begun the reasoning."""

    def after(self, prompt: str, continued: str | None = None) -> "Reasoning":
        """Returns what it is in the answer to a prompt that ends with the text `prompt`, or that ends within a message,
        of which `continued` is the text."""
        return Reasoning(self)

    @abstractmethod
    def grammar(self, asked: "ReasoningLimits", token_id: TokenIds) -> str:
        """Returns a grammar, in Lark's notation, of what may be written. Raises `ValueError` where there is none."""


class ReasoningParser(ABC):
    """Splits the text of one sequence. The parts, joined, do not depend on how the text is cut.

    `num_tokens` counts those of the tokens fed that were thought, the markers around them included. Where `is_between`,
    the model may begin to think after text.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self.is_between = False

    @abstractmethod
    def feed(self, text: str, num_tokens: int = 1) -> Split:
        """Returns what has become certain with the text of further tokens."""

    @abstractmethod
    def finish(self) -> Split:
        """Returns the rest, once no text follows."""


@dataclass(frozen=True)
class Reasoning:
    """Says how what is thought is set apart in the answer to one prompt.

    Where it `is_open`, the prompt has begun it; where it `is_over`, the prompt has ended it.
    """

    format: ReasoningFormat
    is_open: bool = False
    is_over: bool = False

    def parser(self) -> ReasoningParser:
        """Makes the parser of one sequence."""
        return self.format.parser(is_open=self.is_open)

    def grammar(
        self,
        token_id: TokenIds,
        *,
        ends: Set[int],
        max_tokens: int | None,
        is_constrained: bool,
        is_framed: bool = False,
    ) -> str:
        """Returns a grammar, in Lark's notation, of an answer that thinks with at most `max_tokens` tokens, or "" where
        nothing of it needs one.

        The tokens `ends` end an answer. One that `is_constrained` has after its reasoning what the grammar `@answer`
        says; that one `is_framed` where it writes the model's own frame of messages itself. Raises `ValueError` where
        the reasoning cannot be bounded.
        """
        if self.is_over or not (is_constrained or max_tokens is not None):
            return ""
        limits = ReasoningLimits(ends, max_tokens, self.is_open, is_constrained, is_framed)
        return self.format.grammar(limits, token_id)


@dataclass(frozen=True)
class ReasoningLimits:
    """Holds the arguments of `Reasoning.grammar`, and whether the prompt has begun the reasoning."""

    ends: Set[int]
    max_tokens: int | None
    is_open: bool
    is_constrained: bool
    is_framed: bool


@dataclass(frozen=True)
class TaggedReasoning(ReasoningFormat):
    """Describes reasoning between two markers at the start of an answer. Space around both is left out.

    `answer` are markers that may stand around the answer itself, and are left out too. `calls` open a call of a
    function: one amid the reasoning ends it.
    """

    open: str
    close: str
    answer: tuple[str, str] | None = None
    calls: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.open, self.close, *(self.answer or ()), *self.calls)

    def parser(self, *, is_open: bool = False) -> ReasoningParser:
        return _TaggedParser(self, is_open=is_open)

    def after(self, prompt: str, continued: str | None = None) -> "Reasoning":
        if continued is None:
            is_open, is_over = prompt.rstrip().endswith(self.open), prompt.rstrip().endswith(self.close)
        else:
            is_over = self.close in continued
            is_open = not is_over and self.open in continued
        return Reasoning(self, is_open, is_over)

    def grammar(self, asked: ReasoningLimits, token_id: TokenIds) -> str:
        opening, closing = token_id(self.open), token_id(self.close)
        if opening is None or closing is None:
            return self._grammar_of_texts(asked)
        any_thought = any_token_but({closing, *asked.ends})
        thought = f"{any_thought}{at_most(asked.max_tokens)} <[{closing}]>"
        if asked.is_constrained:
            start = "thought answer" if asked.is_open else f"(<[{opening}]> thought)? answer"
            lines = [f"start: {start}", f"answer: {self._before_answer(token_id)} @answer", _SPACE]
        else:
            # An answer that only seems to think nothing could think without end.
            start = "thought rest" if asked.is_open else f"<[{opening}]> thought rest | no_thought"
            lines = [f"start: {start}", f"no_thought: {any_token_but({opening, *asked.ends})}*"]
            lines.append(f"rest: {any_token_but(asked.ends)}*")
        return "\n".join([*lines, f"thought: {thought}"]) + "\n"

    def _grammar_of_texts(self, asked: ReasoningLimits) -> str:
        """Does the same where the markers are no tokens of their own."""
        if asked.max_tokens is not None:
            raise ValueError(
                "this model writes no tokens of their own around its reasoning, so its end cannot be forced"
            )
        start = "thought answer" if asked.is_open else f"({quoted(self.open)} thought)? answer"
        lines = [f"start: {start}", f"answer: {self._before_answer(lambda _: None)} @answer", _SPACE]
        return "\n".join([*lines, f"thought[suffix={quoted(self.close)}]: /(?s:.*)/"]) + "\n"

    def _before_answer(self, token_id: TokenIds) -> str:
        opening = f"({literal(self.answer[0], self.answer, token_id)} SPACE?)?" if self.answer else ""
        return f"SPACE? {opening}"


class _TaggedParser(ReasoningParser):
    """Splits by a state machine: a state is a method that takes from `_held` what it can, and returns whether it has
    set another state."""

    def __init__(self, form: TaggedReasoning, *, is_open: bool) -> None:
        super().__init__()
        self._form = form
        self._held = ""
        # Tokens of which it is not known whether they belong to the reasoning.
        self._num_undecided = 0
        # Nothing but space has been left out of the part that is read.
        self._at_start = True
        self._reasoning: list[str] = []
        self._text: list[str] = []
        self._state: Callable[[bool], bool] = self._inside if is_open else self._before

    def feed(self, text: str, num_tokens: int = 1) -> Split:
        if self._state == self._behind and not self._held:
            # The most of an answer comes here.
            return Split(text=text) if self._form.answer is None else self._split(text)
        self._num_undecided += num_tokens
        split = self._split(text)
        if self._state == self._inside:
            self._count()
        return split

    def finish(self) -> Split:
        return self._split("", final=True)

    def _split(self, text: str, *, final: bool = False) -> Split:
        self._held += text
        self._reasoning, self._text = [], []
        while self._state(final):
            pass
        return Split("".join(self._reasoning), "".join(self._text))

    def _count(self) -> None:
        self.num_tokens += self._num_undecided
        self._num_undecided = 0

    def _before(self, final: bool) -> bool:
        """Finds the opening marker, or that there is none."""
        rest = self._held.lstrip()
        if rest.startswith(self._form.open):
            self._held, self._at_start, self._state = rest[len(self._form.open) :], True, self._inside
            return True
        if self._form.open.startswith(rest) and not final:
            return False
        self._state = self._behind
        return True

    def _inside(self, final: bool) -> bool:
        """Takes reasoning up to the closing marker, or to a call."""
        if self._at_start:
            self._held = self._held.lstrip()
            self._at_start = not self._held
        ends = (self._form.close, *self._form.calls)
        found = [(at, end) for end in ends if (at := self._held.find(end)) >= 0]
        if found:
            at, end = min(found)
            self._think(self._held[:at].rstrip())
            self._held = self._held[at + len(end) if end == self._form.close else at :]
            self._count()
            self._state = self._between
            return True
        length = len(self._held.rstrip()) if final else certain_length(self._held, ends)
        self._think(self._held[:length])
        self._held = "" if final else self._held[length:]
        return False

    def _think(self, text: str) -> None:
        if text:
            self._reasoning.append(text)

    def _between(self, final: bool) -> bool:
        """Leaves out the marker that opens the answer, if there is one."""
        opening, self._held = self._form.answer[0] if self._form.answer else "", self._held.lstrip()
        if opening.startswith(self._held) and self._held != opening and not final:
            return False
        self._held = self._held.removeprefix(opening)
        self._state = self._start
        return True

    def _start(self, final: bool) -> bool:
        """Leaves out the space before the answer."""
        self._held = self._held.lstrip()
        if self._held:
            self._state = self._behind
        return bool(self._held)

    def _behind(self, final: bool) -> bool:
        """Passes the answer on, without the marker that closes it where nothing else follows."""
        length = len(self._held)
        if self._form.answer is not None:
            closing = self._form.answer[1]
            at = self._held.find(closing)
            if at >= 0 and not self._held[at + len(closing) :].strip():
                length = len(self._held[:at].rstrip())
            elif not final:
                length = certain_length(self._held, (closing,))
        if length:
            self._text.append(self._held[:length])
        self._held = "" if final else self._held[length:]
        return False
