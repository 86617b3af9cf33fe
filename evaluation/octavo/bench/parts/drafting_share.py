"""Measures what speculation adds to the scheduler's CPU time of a step: `python -m octavo.bench.parts.drafting_share`.

Recorded answers are played through three schedulers, step by step in turns of random order: with speculation off, with
auto, and once more with auto and a clock around all that drafts and prices. So whatever else the machine does meets
all of them alike. All answers of a round begin together, as dear for drafts as can be: each sequence is looked at for
the first time in one step. Of each round the sums are compared, and of the rounds stand the medians, in brackets with
the bounds between which the true median lies with a probability of 95 %:

* step: CPU time of `schedule()` and `handle()` for a step, with auto by that without
* token: the same for a token; where guesses come true a step does more, and brings more
* drafts: the share of drafting and pricing in the time of the step

By texts that repeat nothing, that repeat the prompt, and that seem to repeat something and do not (words drawn from
few); by what rows cost: as on a CPU, where guesses do not pay in so many sequences, and as on a device that is never
full.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from math import comb
from pathlib import Path
from random import Random
from typing import Any, Final

import tokenizers

from octavo.bench.parts.recorded_answers import (
    ANSWER,
    CURVES,
    KINDS,
    PROMPT,
    Curve,
    Played,
    PlayedStep,
    RecordedReplica,
    Recording,
    recordings,
)
from octavo.bench.table import keep, table
from octavo.runtime.models.directory import BUNDLED_MODEL, resolve_model
from octavo.runtime.process.gc_tuning import collect_seldom

_CONFIDENCE: Final = 0.95


@dataclass(frozen=True)
class Interval:
    """Holds a median, and the bounds of its confidence interval."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Interval":
        """Takes the bounds from the values themselves, whatever their distribution: how many of them lie below the true
        median is binomial. Few values have no narrower interval than from the least to the largest."""
        ranked, count = sorted(values), len(values)
        left_out, beyond = 0, 1 / 2**count
        while left_out < (count - 1) // 2:
            beyond += comb(count, left_out + 1) / 2**count
            if 2 * beyond > 1 - _CONFIDENCE:
                break
            left_out += 1
        return cls(statistics.median(ranked), ranked[left_out], ranked[count - 1 - left_out])

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True)
class Round:
    """Holds what one round took without guesses, with them, and of the latter's clock: microseconds of drafting and
    pricing, and of all."""

    off: Played
    auto: Played
    drafts_us: float
    watched_us: float

    @property
    def step(self) -> float:
        return self.auto.us_a_step / self.off.us_a_step

    @property
    def token(self) -> float:
        return self.step * self.off.tokens_a_step / self.auto.tokens_a_step

    @property
    def drafts(self) -> float:
        return self.drafts_us / self.watched_us


@dataclass(frozen=True)
class Share:
    """Holds what speculation adds, of one kind of text by one curve."""

    kind: str
    curve: str
    num_sequences: int
    off_us: float
    auto_us: float
    tokens_a_step: float
    spent: int
    step: Interval
    token: Interval
    drafts: Interval


class Watched(RecordedReplica):
    """Has a clock around all that drafts and prices."""

    def __init__(self, recordings: Sequence[Recording], curve: Curve) -> None:
        super().__init__(recordings, "auto", curve)
        self.nanoseconds = 0
        speculation, prices = self.core.state.speculation, self.replica.prices
        for owner, names in (
            (speculation, ("serves", "spend", "take", "forget")),
            (prices, ("answered", "answered_alone")),
        ):
            for name in names:
                setattr(owner, name, self._clocked(getattr(owner, name)))

    def _clocked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def clocked(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time_ns()
            try:
                return function(*args, **kwargs)
            finally:
                self.nanoseconds += time.thread_time_ns() - began

        return clocked


def play_round(recorded: Sequence[Recording], curve: Curve, random: Random) -> Round:
    """Plays the recordings through three schedulers in turns."""
    watched = Watched(recorded, curve)
    makers: list[Callable[[], RecordedReplica]] = [
        partial(RecordedReplica, recorded, "off", curve),
        partial(RecordedReplica, recorded, "auto", curve),
        lambda: watched,
    ]
    played: list[list[PlayedStep]] = [[] for _ in makers]
    drafts_us = [0.0]
    left = {place: make().steps() for place, make in enumerate(makers)}
    while left:
        for place in random.sample(sorted(left), len(left)):
            before = watched.nanoseconds
            if (step := next(left[place], None)) is None:
                del left[place]
                continue
            played[place].append(step)
            if place == len(makers) - 1 and not step.computes_prompts:
                drafts_us.append((watched.nanoseconds - before) / 1000)
    off, auto, all_watched = map(Played.of, played)
    return Round(off, auto, sum(drafts_us), all_watched.scheduler_us)


def measure(kind: str, curve: str, recorded: Sequence[Recording], rounds: int, random: Random) -> Share:
    """Measures one kind of text by one curve."""
    found = [play_round(recorded, CURVES[curve], random) for _ in range(rounds)]
    return Share(
        kind,
        curve,
        len(recorded),
        statistics.median(each.off.us_a_step for each in found),
        statistics.median(each.auto.us_a_step for each in found),
        found[0].auto.tokens_a_step,
        found[0].auto.spent,
        Interval.of([each.step for each in found]),
        Interval.of([each.token for each in found]),
        Interval.of([each.drafts for each in found]),
    )


def to_lines(shares: Sequence[Share]) -> Iterator[str]:
    """Yields the lines of a table."""
    heads = "", "rows", "sequences", "off", "auto", "tokens/step", "guesses", "step", "token", "drafts"
    rows = [
        (
            *(share.kind, share.curve, str(share.num_sequences), f"{share.off_us:,.0f} us", f"{share.auto_us:,.0f} us"),
            *(f"{share.tokens_a_step:.1f}", str(share.spent), str(share.step), str(share.token), str(share.drafts)),
        )
        for share in shares
    ]
    yield from table([heads, *rows])


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table, each line of it to stderr as soon as it is known, and writes JSON where asked."""
    parser = argparse.ArgumentParser(prog="octavo.bench.parts.drafting_share", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=BUNDLED_MODEL, help="whose tokenizer is taken")
    parser.add_argument("--kinds", nargs="+", default=["random", "words", "copy"], choices=KINDS, help="of texts")
    parser.add_argument("--curves", nargs="+", default=list(CURVES), choices=CURVES, help="what rows cost")
    parser.add_argument("--sequences", type=int, default=256, help="of each step")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of each prompt")
    parser.add_argument("--answer", type=int, default=ANSWER, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0, help="of the order of turns")
    parser.add_argument("--json", type=Path, help="write the findings here too")
    options = parser.parse_args(arguments)
    tokenizer = tokenizers.Tokenizer.from_file(str(resolve_model(options.model) / "tokenizer.json"))
    collect_seldom()
    shares, random = [], Random(options.seed)
    for kind in options.kinds:
        recorded = recordings(
            kind, options.sequences, lambda text: tokenizer.encode(text).ids, options.prompt, options.answer
        )
        for curve in options.curves:
            shares.append(measure(kind, curve, recorded, options.rounds, random))
            print(f"{kind}, {curve}: step {shares[-1].step}, drafts {shares[-1].drafts}", file=sys.stderr)
            keep(shares, options.json)
    print("\n".join(to_lines(shares)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
