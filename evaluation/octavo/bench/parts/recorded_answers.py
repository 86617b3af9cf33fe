"""Plays recorded answers through the scheduler alone, with guesses and without: a replica in virtual time chooses the
recorded tokens, and takes as long for a step as its cost curve says."""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from random import Random
from typing import Final

from octavo.bench.parts.scheduler_alone import VOCAB_SIZE, SchedulerAlone, make_request, plans
from octavo.bench.whole.speculation_works import WORDS, WORKS
from octavo.scheduler.core.config import SchedulerConfig, Speculate
from octavo.scheduler.core.steps_in_flight import OutstandingStep
from octavo.wire.costs import PrefillCosts, RowCost, StepCosts, SwapCosts
from octavo.wire.sampling import SamplingParams
from octavo.wire.steps import FurtherTokens, SampledToken, StepTimes

Curve = tuple[tuple[int, float], ...]

# Milliseconds of a step by its rows: about what SmolLM2-135M in bf16 takes of one CPU thread; and one of a device that
# is never full.
CURVES: Final[dict[str, Curve]] = {
    "cpu": ((1, 11.0), (2, 11.5), (4, 13.5), (8, 17.5), (16, 28.0), (32, 49.0), (64, 88.0)),
    "flat": ((1, 10.0), (64, 11.0)),
}
KINDS: Final = ("random", "words", "copy", *(kind for kind, work in WORKS.items() if work.copies))
# Milliseconds from an answer to the next step, where no plan waits at the worker.
_GAP_MS: Final = 1.0
ANSWER: Final = 128
PROMPT: Final = 64
# Every so many tokens a copy has another one than its prompt.
_EDITED: Final = 24
_BLOCK_SIZE: Final = 16
_SEED: Final = 0


@dataclass(frozen=True)
class Recording:
    """Holds the tokens of a prompt and of its answer."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class PlayedStep:
    """Tells of one step what it took: CPU microseconds of the scheduler's core, virtual seconds of the worker; how many
    tokens it gave, how many of these were guessed, and how many guesses it checked."""

    computes_prompts: bool
    scheduler_us: float
    seconds: float
    tokens: int
    guessed: int
    spent: int


@dataclass(frozen=True)
class Played:
    """Tells what the steps that compute no prompt took: how many there were, the CPU microseconds of the scheduler's
    core, the worker's virtual seconds; and of the tokens that they gave how many, and how many were guessed."""

    steps: int
    scheduler_us: float
    seconds: float
    tokens: int
    guessed: int
    spent: int

    @classmethod
    def of(cls, steps: Iterable[PlayedStep]) -> "Played":
        """Sums up steps."""
        found = [step for step in steps if not step.computes_prompts]
        return cls(
            len(found),
            sum(step.scheduler_us for step in found),
            sum(step.seconds for step in found),
            sum(step.tokens for step in found),
            sum(step.guessed for step in found),
            sum(step.spent for step in found),
        )

    @property
    def us_a_step(self) -> float:
        return self.scheduler_us / self.steps

    @property
    def tokens_a_step(self) -> float:
        return self.tokens / self.steps

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def recordings(
    kind: str, count: int, tokenize: Callable[[str], list[int]], prompt: int = PROMPT, answer: int = ANSWER
) -> list[Recording]:
    """Returns `count` recordings: of `random` tokens, which repeat nothing; of `words` drawn from few; a `copy` of
    random tokens, now and then with another one; or of a work of `speculation_works`, with the answers that it wants.
    Prompts have `prompt` tokens but for those of works, answers up to `answer`. Raises `ValueError` if there are not so
    many."""
    source = Random(_SEED)

    def draw(length: int) -> list[int]:
        if kind == "random":
            return source.choices(range(VOCAB_SIZE), k=length)
        return tokenize(" ".join(source.choices(WORDS, k=length)))[:length]

    def copy(tokens: list[int]) -> list[int]:
        return [token + 1 if place % _EDITED == 0 else token for place, token in enumerate(tokens[:answer], 1)]

    if kind in ("random", "words"):
        return [Recording(draw(prompt), draw(answer)) for _ in range(count)]
    if kind == "copy":
        return [Recording(tokens, copy(tokens)) for tokens in (draw(max(prompt, answer)) for _ in range(count))]
    prompts = WORKS[kind].prompts(_SEED, count)
    return [Recording(tokenize("\n".join(each.said)), tokenize(each.answer)[:answer]) for each in prompts]


class RecordedReplica(SchedulerAlone):
    """Answers each request with its recording, in steps that take as long as `curve` says. Ids of requests are places
    in `recordings`."""

    def __init__(self, recordings: Sequence[Recording], speculation: Speculate, curve: Curve) -> None:
        longest = max(len(each.prompt) + len(each.answer) for each in recordings)
        count = len(recordings)
        config = SchedulerConfig(
            max_num_seqs=count,
            max_num_batched_tokens=longest * count,
            max_waiting=count,
            speculation=speculation,
        )
        super().__init__(
            config,
            num_blocks=count * (2 + longest // _BLOCK_SIZE),
            block_size=_BLOCK_SIZE,
            costs=StepCosts(
                PrefillCosts(0.0, 0.0, 0.0),
                SwapCosts(0.0, 0.0, 0.0),
                [RowCost(rows, milliseconds / 1000) for rows, milliseconds in curve],
            ),
        )
        self._recordings, self._curve = recordings, curve
        for index, each in enumerate(recordings):
            self.submit(make_request(str(index), each.prompt, SamplingParams(max_tokens=len(each.answer))))

    def chosen(self, step: OutstandingStep) -> tuple[list[SampledToken], list[FurtherTokens]]:
        """Returns the tokens that stand in the recordings: after each guess that is right another one."""
        sampled, further = [], []
        for group, sequence in step.samplers:
            sequence_id, start = sequence.placement.sequence_id, sequence.num_generated
            answer, draft = self._recordings[int(group.request_id)].answer, step.drafts.get(sequence_id)
            sampled.append(SampledToken(sequence_id, answer[start]))
            if draft is not None and (num_right := _num_common(draft.token_ids, answer[start:])):
                further.append(FurtherTokens(sequence_id, answer[start + 1 : start + 1 + num_right]))
        return sampled, further

    def times(self, step: OutstandingStep) -> StepTimes:
        """Says what a step of so many rows takes by the curve."""
        return StepTimes(0, round(1000 * _milliseconds(self._curve, step.num_tokens)), 0)

    def steps(self) -> Iterator[PlayedStep]:
        """Runs all requests to their ends, as many steps in flight as are allowed; yields each step once it is done."""
        while self.core.groups:
            began = time.thread_time_ns()
            while plans(self.schedule()):
                pass
            planned = time.thread_time_ns()
            step, result = self.replica.outstanding[0], self.next_result()
            took = (_milliseconds(self._curve, step.num_tokens) + _GAP_MS * step.is_alone) / 1000
            answered = time.thread_time_ns()
            self.accept(result, took)
            scheduler_us = (planned - began + time.thread_time_ns() - answered) / 1000
            num_further = sum(len(each.token_ids) for each in result.further)
            num_tokens = len(result.sampled) + num_further
            yield PlayedStep(bool(step.prefills), scheduler_us, took, num_tokens, num_further, step.num_guesses)
        while self.replica.outstanding:
            self.accept(self.next_result())

    def play(self) -> Played:
        """Runs all requests to their ends."""
        return Played.of(self.steps())


def _num_common(guesses: list[int], answer: list[int]) -> int:
    """Counts the first guesses that are the answer's and not its last token, after which there is none."""
    pairs = zip(guesses, answer[:-1], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _milliseconds(curve: Curve, rows: int) -> float:
    """Returns what a step takes by a curve, which goes on as it ends."""
    above = min(max(bisect_left([size for size, _ in curve], rows), 1), len(curve) - 1)
    (low, low_ms), (high, high_ms) = curve[above - 1 : above + 1]
    return low_ms + (rows - low) * (high_ms - low_ms) / (high - low)
