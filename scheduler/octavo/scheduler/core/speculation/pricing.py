"""The price of drafts: how many guesses a step checks, and whether sequences wait for their tokens to be guessed from.

A step's time grows little by a few rows, and much by many. Guesses are worth their rows while tokens come faster with
them: in a step of few rows nearly any are, in a full one none. A sequence that is planned before its last token is
known cannot have its next ones guessed. If all wait for the answer, the worker waits for the next plan meanwhile; if
only those with guesses do, they miss every other step.
"""

import enum
import sys
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from operator import mul

from octavo.scheduler.core.speculation.acceptance import HIGHEST_CHANCE
from octavo.wire.costs import RowCost
from octavo.wire.steps import MAX_DRAFT_TOKENS, StepTimes

# Seconds from a worker's answer to its next step, until that was measured; and the latest measurements that count.
_FIRST_GAP_S = 0.001
_KEPT_GAPS = 15
# Steps whose times count.
_KEPT_STEPS = 32
# After so many of them it is looked anew whether guesses may pay: prices move slowly.
_LOOKED_AFTER = 8
# The tokens that the best guesses bring: of a few sequences, by rows; and of each sequence, by depth.
_BEST_FEW = [(rows, rows * HIGHEST_CHANCE) for rows in (1, 2, 4, 8)]
_BEST_MANY = [
    (depth, sum(HIGHEST_CHANCE**each for each in range(1, depth + 1))) for depth in (1, 2, 4, 8, 16, MAX_DRAFT_TOKENS)
]
# Tokens must come faster by so much: what is less may be an error of the measurements.
MARGIN = 1.02


class Pace(enum.Enum):
    """Says who waits for the answer of the latest step before being planned again: nobody, sequences with guesses, or
    all."""

    GO = "go"
    DRAFTERS = "drafters"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Offer:
    """Offers the guesses of one sequence, by their `chances`: of each, given those before it. With a token in flight
    the first guess is for that one, and no row of the next step."""

    chances: Sequence[float]
    in_flight: bool = False

    def gains(self) -> list[float]:
        """Returns the tokens that each further row is expected to bring."""
        gains = list(accumulate(self.chances, mul))
        return gains[1:] if self.in_flight else gains


@dataclass(frozen=True, slots=True)
class Decision:
    """Says how many guesses of each offer a step checks, and who waits. A sequence with a token in flight whose guesses
    are wanted waits for it, and offers them again."""

    counts: list[int]
    pace: Pace


class Prices:
    """Knows what the steps of one replica cost. The curve is `rows`, as its worker measured them with short contexts at
    its start (with none nothing pays); the steps that it answers say by how much its sequences, and further rows, take
    longer."""

    def __init__(self, rows: Sequence[RowCost]) -> None:
        # A worker's word is not relied on: sizes rise, no step takes no time, and none takes less than a smaller one.
        curve = sorted({cost.rows: cost.seconds for cost in rows if cost.seconds > 0.0}.items())
        self._rows = [size for size, _ in curve]
        self._seconds = list(accumulate((seconds for _, seconds in curve), max))
        # Seconds by which each row between two sizes lengthens a step; beyond the last size as before it.
        points = pairwise(zip(self._rows, self._seconds, strict=True))
        self._slopes = [(high_s - low_s) / (high - low) for (low, low_s), (high, high_s) in points] or [0.0]
        # Of each of them and all behind it the least.
        self._least_slopes = list(accumulate(reversed(self._slopes), min))[::-1]
        self._gaps: deque[float] = deque(maxlen=_KEPT_GAPS)
        self.gap_s = _FIRST_GAP_S
        # Seconds that a sequence takes beyond the curve: its context, mostly.
        self._sequence_s = 0.0
        # Seconds that further rows have taken lately, and should have by the curve.
        self._further_s = self._expected_s = 0.0
        # What `may_pay` was asked last, and has said; and the steps since.
        self._asked: tuple[int, int] | None = None
        self._said, self._steps_since = False, 0

    @property
    def is_known(self) -> bool:
        return bool(self._rows)

    @property
    def row_factor(self) -> float:
        """Returns how much longer further rows take than by the curve, which is believed until it is known better."""
        return (self._further_s + self._seconds[0]) / (self._expected_s + self._seconds[0])

    def answered_alone(self, seconds: float, times: StepTimes) -> None:
        """Notes how long the answer took to a step that was sent while no other was under way, and what the worker says
        that it took of that."""
        self._gaps.append(max(0.0, seconds - _seconds_of(times) - times.propose_us / 1e6))
        self.gap_s = sorted(self._gaps)[len(self._gaps) // 2]

    def answered(self, num_decodes: int, num_rows: int, times: StepTimes) -> None:
        """Notes how long a step took that decoded so many sequences in so many rows, and computed nothing else."""
        if not self._rows or not num_decodes:
            return
        self._steps_since += 1
        by_curve = self._by_curve(num_decodes)
        expected = by_curve + num_decodes * self._sequence_s
        took = _seconds_of(times)
        if num_rows == num_decodes:
            # One that took much longer was held up.
            beyond = max(0.0, min(took, 2 * expected) - by_curve) / num_decodes
            self._sequence_s += (beyond - self._sequence_s) / _KEPT_STEPS
            self._further_s += (self._expected_s - self._further_s) / (10 * _KEPT_STEPS)
        else:
            further = self._by_curve(num_rows) - by_curve
            keep = 1.0 - 1.0 / _KEPT_STEPS
            self._further_s = keep * self._further_s + min(max(0.0, took - expected), 4 * further)
            self._expected_s = keep * self._expected_s + further

    def seconds(self, num_decodes: int) -> float:
        """Returns how long a step takes that decodes so many sequences without guesses."""
        return self._by_curve(num_decodes) + num_decodes * self._sequence_s

    def further_seconds(self, rows: int, further: int) -> float:
        """Returns how much longer a step of so many rows takes with so many further ones."""
        return self.row_factor * (self._by_curve(rows + further) - self._by_curve(rows))

    def _by_curve(self, rows: int) -> float:
        known = self._rows
        if rows <= known[0]:
            return self._seconds[0]
        below = bisect_left(known, rows) - 1
        return self._seconds[below] + (rows - known[below]) * self._slopes[min(below, len(self._slopes) - 1)]

    def least_growth(self, rows: int) -> float:
        """Returns the least seconds by which any row lengthens a step that has so many before it."""
        below = min(max(bisect_right(self._rows, rows) - 1, 0), len(self._slopes) - 1)
        return self.row_factor * self._least_slopes[below]

    def growth(self, rows: int) -> Iterator[tuple[float, float]]:
        """Yields of each further row of a step of so many, one after the other, the least seconds by which that row or
        any behind it lengthens the step, and by how many all up to that one do."""
        known, last, factor, grown_s = self._rows, len(self._slopes) - 1, self.row_factor, 0.0
        while True:
            below = bisect_right(known, rows) - 1
            place = min(max(below, 0), last)
            least_s, slope = factor * self._least_slopes[place], factor * self._slopes[place] if below >= 0 else 0.0
            end = known[below + 1] if below + 1 < len(known) else sys.maxsize
            for _ in range(rows, end):
                grown_s += slope
                yield least_s, grown_s
            rows = end

    def worth(self, num_decodes: int, other_rows: int) -> float:
        """Returns the tokens that a guess must bring to be worth a row of such a step: as many as others would in the
        least time that a row takes."""
        seconds = self.seconds(num_decodes) + self.gap_s
        return num_decodes * self.least_growth(num_decodes + other_rows) / seconds

    def may_pay(self, num_decodes: int, other_rows: int) -> bool:
        """Tells whether guesses could pay in a step that decodes so many sequences beside so many rows of prompts, if
        all were as good as any are and waiting cost nothing."""
        if not self._rows or not num_decodes:
            return False
        if self._asked != (num_decodes, other_rows) or self._steps_since >= _LOOKED_AFTER:
            self._asked, self._steps_since = (num_decodes, other_rows), 0
            self._said = self._can_pay(num_decodes, other_rows)
        return self._said

    def _can_pay(self, num_decodes: int, other_rows: int) -> bool:
        rows, plain_s = num_decodes + other_rows, self.seconds(num_decodes)
        factor, before_s = self.row_factor, self._by_curve(rows)
        # A second of further rows costs so many tokens, and the margin so many beside.
        per_s, least = MARGIN * num_decodes / plain_s, (MARGIN - 1.0) * num_decodes
        best = chain(_BEST_FEW, ((num_decodes * depth, num_decodes * gain) for depth, gain in _BEST_MANY))
        for further, gain in best:
            if gain > least + per_s * factor * (self._by_curve(rows + further) - before_s):
                return True
        return False


def _seconds_of(times: StepTimes) -> float:
    return (times.prepare_us + times.model_us + times.sample_us) / 1e6


def decide(prices: Prices, offers: Sequence[Offer], num_decodes: int, other_rows: int, room: int) -> Decision:
    """Decides about a step that decodes `num_decodes` sequences, those of the `offers` among them, beside `other_rows`
    of prompts, with `room` for so many guesses: what lets tokens come fastest."""
    gains = [offer.gains() for offer in offers]
    ranked = sorted(chain.from_iterable(gains), reverse=True)[: max(0, room)]
    if ranked and prices.is_known:
        plain = num_decodes / prices.seconds(num_decodes)
        size, all_wait = _best_size(prices, ranked, num_decodes, other_rows)
        counts = _shares(gains, ranked[:size])
        some_wait = _every_other(prices, counts, sum(ranked[:size]), num_decodes, other_rows)
        if max(all_wait, some_wait) > MARGIN * plain:
            return Decision(counts, Pace.ALL if all_wait >= some_wait else Pace.DRAFTERS)
    return Decision([0] * len(offers), Pace.GO)


def _best_size(prices: Prices, ranked: Sequence[float], num_decodes: int, other_rows: int) -> tuple[int, float]:
    """Returns how many guesses let tokens come fastest, and how many come in a second, if all sequences wait. Guesses
    bring the `ranked` tokens, the most first."""
    # Beside a long prompt a step is slow whatever it decodes: what tokens are worth is what others cost.
    base_s, rows = prices.seconds(num_decodes) + prices.gap_s, num_decodes + other_rows
    tokens, size, best = float(num_decodes), 0, 0.0
    for number, (gain, (least_s, grown_s)) in enumerate(zip(ranked, prices.growth(rows), strict=False), 1):
        if gain < best * least_s:
            # No row from here on brings as much for its time.
            break
        tokens += gain
        rate = tokens / (base_s + grown_s)
        if rate > best:
            size, best = number, rate
    return size, best


def _every_other(prices: Prices, counts: Sequence[int], gain: float, num_decodes: int, other_rows: int) -> float:
    """Returns the tokens per second of two steps, in one of which the sequences with guesses are missing; 0 if all have
    some."""
    others = num_decodes - sum(count > 0 for count in counts)
    if not others:
        return 0.0
    further_s = prices.further_seconds(num_decodes + other_rows, sum(counts))
    return (others + num_decodes + gain) / (prices.seconds(others) + prices.seconds(num_decodes) + further_s)


def _shares(gains: Sequence[Sequence[float]], spent: Sequence[float]) -> list[int]:
    """Returns how many of each offer's gains are among the largest ones that are `spent`: of equal ones the first.
    Those of an offer do not rise."""
    least = spent[-1]
    counts = [next((place for place, gain in enumerate(each) if gain <= least), len(each)) for each in gains]
    left = len(spent) - sum(counts)
    for index, each in enumerate(gains):
        if not left:
            break
        more = min(left, sum(gain == least for gain in each))
        counts[index] += more
        left -= more
    return counts


def always(most: int, offers: Sequence[Offer]) -> Decision:
    """Decides for up to `most` guesses of each offer, whatever they cost: sequences with guesses wait."""
    counts = [max(0, min(most, len(offer.chances) - offer.in_flight)) for offer in offers]
    return Decision(counts, Pace.DRAFTERS if any(counts) else Pace.GO)
