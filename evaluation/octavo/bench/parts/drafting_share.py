"""Measures what speculation adds to the scheduler's CPU time of a step: `python -m octavo.bench.parts.drafting_share`.

Recorded answers are played through two schedulers, step by step in turns of random order, one with speculation off and
one with auto: so whatever else the machine does meets both alike. Of each round the sums are compared, and of the
rounds stand the medians, in brackets with the bounds between which the true median lies with a probability of 95 %:

* step: CPU time of `schedule()` and `handle()` for a step, with auto by that without
* token: the same for a token; where guesses come true a step does more, and brings more

By texts that repeat nothing, that repeat the prompt, and that seem to repeat something and do not (words drawn from
few); by what rows cost: as on a CPU, where guesses do not pay in so many sequences, and as on a device that is never
full.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path
from random import Random
from typing import Final

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
from octavo.scheduler.core.config import Speculate

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
    """Holds what one round took without guesses and with them."""

    off: Played
    auto: Played

    @property
    def step(self) -> float:
        return self.auto.us_a_step / self.off.us_a_step

    @property
    def token(self) -> float:
        return self.step * self.off.tokens_a_step / self.auto.tokens_a_step


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


def play_round(recorded: Sequence[Recording], curve: Curve, random: Random) -> Round:
    """Plays the recordings through both schedulers in turns."""
    settings: list[Speculate] = ["off", "auto"]
    played: list[list[PlayedStep]] = [[] for _ in settings]
    left = {place: RecordedReplica(recorded, each, curve).steps() for place, each in enumerate(settings)}
    while left:
        for place in random.sample(sorted(left), len(left)):
            if (step := next(left[place], None)) is None:
                del left[place]
            else:
                played[place].append(step)
    return Round(*map(Played.of, played))


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
    )


def to_lines(shares: Sequence[Share]) -> Iterator[str]:
    """Yields the lines of a table."""
    heads = "", "rows", "sequences", "off", "auto", "tokens/step", "guesses", "step", "token"
    rows = [
        (
            *(share.kind, share.curve, str(share.num_sequences), f"{share.off_us:,.0f} us", f"{share.auto_us:,.0f} us"),
            *(f"{share.tokens_a_step:.1f}", str(share.spent), str(share.step), str(share.token)),
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
            print(f"{kind}, {curve}: step {shares[-1].step}, token {shares[-1].token}", file=sys.stderr)
            keep(shares, options.json)
    print("\n".join(to_lines(shares)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
