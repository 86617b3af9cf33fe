"""The price of drafts: how many guesses a step checks, and whether sequences wait for their tokens to be guessed from.

A step's time grows little by a few rows, and much by many. Guesses are worth their rows while tokens come faster with
them: in a step of few rows nearly any are, in a full one none. A sequence that is planned before its last token is
known cannot have its next ones guessed. If all wait for the answer, the worker waits for the next plan meanwhile; if
only those with guesses do, they miss every other step.
"""

import enum
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import mul

from octavo.scheduler.core.speculation.acceptance import HIGHEST_CHANCE
from octavo.wire.costs import RowCost
from octavo.wire.steps import MAX_DRAFT_TOKENS, StepTimes

# Seconds from a worker's answer to its next step, until that was measured; and the latest measurements that count.
_FIRST_GAP_S = 0.001
_KEPT_GAPS = 15
# The tokens that the best guesses of one sequence bring.
_BEST_GAINS = [HIGHEST_CHANCE**depth for depth in range(1, MAX_DRAFT_TOKENS + 1)]
# Tokens must come faster by so much: what is less may be an error of the measurements.
_MARGIN = 1.02


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
    """Knows what the steps of one replica cost by their rows (`rows`, as its worker measured them; with none nothing
    pays), and the seconds that a worker loses where the next plan waits for its answer."""

    def __init__(self, rows: Sequence[RowCost]) -> None:
        self._rows = [cost.rows for cost in rows]
        self._seconds = [cost.seconds for cost in rows]
        self._gaps: deque[float] = deque(maxlen=_KEPT_GAPS)
        self.gap_s = _FIRST_GAP_S
        # The answer of `may_pay` for the latest numbers, which change seldom.
        self._asked: tuple[int, int] | None = None
        self._pays = False

    def answered_alone(self, seconds: float, times: StepTimes) -> None:
        """Notes how long the answer to a step took that was sent while no other was under way, and what the worker
        says that it took of that."""
        self._gaps.append(max(0.0, seconds - (times.prepare_us + times.model_us + times.sample_us) / 1e6))
        self.gap_s = sorted(self._gaps)[len(self._gaps) // 2]

    def seconds(self, rows: int) -> float:
        """Returns how long a step of so many rows takes: between those measured in proportion, and beyond them as the
        last ones grow."""
        known = self._rows
        upper = min(max(bisect_left(known, rows), 1), len(known) - 1)
        if upper < 1 or rows <= known[0]:
            return self._seconds[0]
        low, high = self._seconds[upper - 1], self._seconds[upper]
        return low + (high - low) * (rows - known[upper - 1]) / (known[upper] - known[upper - 1])

    @property
    def is_known(self) -> bool:
        return bool(self._rows)

    def may_pay(self, num_decodes: int, other_rows: int) -> bool:
        """Tells whether guesses could pay in a step that decodes so many sequences beside so many rows of prompts, if
        all were as good as any are and waiting cost nothing."""
        if not self._rows or not num_decodes:
            return False
        asked = (num_decodes, other_rows)
        if asked != self._asked:
            ranked = sorted(num_decodes * _BEST_GAINS, reverse=True)
            plain, best, _ = self.best_size(num_decodes, other_rows, ranked, 0.0)
            self._asked, self._pays = asked, best > plain * _MARGIN
        return self._pays

    def best_size(
        self, num_decodes: int, other_rows: int, ranked: Sequence[float], gap_s: float
    ) -> tuple[float, float, int]:
        """Returns the tokens per second without guesses and with the best number of them, and that number. Guesses are
        expected to bring the `ranked` tokens, the most first."""
        plain_s, base_s = self.seconds(num_decodes), self.seconds(num_decodes + other_rows)
        tokens, best, size = float(num_decodes), 0.0, 0
        for number, gain in enumerate(ranked, 1):
            tokens += gain
            # Beside a long prompt a step is slow whatever it decodes: what tokens are worth is what others cost.
            rate = tokens / (plain_s + self.seconds(num_decodes + other_rows + number) - base_s + gap_s)
            if rate > best:
                best, size = rate, number
        return num_decodes / plain_s, best, size

    def every_other(self, num_decodes: int, other_rows: int, counts: Sequence[int], gain: float) -> float:
        """Returns the tokens per second of two steps, in one of which the sequences with guesses are missing; 0 if all
        have some."""
        num_missing = sum(count > 0 for count in counts)
        if num_missing == num_decodes:
            return 0.0
        others = num_decodes - num_missing
        further_s = self.seconds(num_decodes + other_rows + sum(counts)) - self.seconds(num_decodes + other_rows)
        return (others + num_decodes + gain) / (self.seconds(others) + self.seconds(num_decodes) + further_s)


def decide(prices: Prices, offers: Sequence[Offer], num_decodes: int, other_rows: int, room: int) -> Decision:
    """Decides about a step that decodes `num_decodes` sequences, those of the `offers` among them, beside `other_rows`
    of prompts, with `room` for so many guesses: what lets tokens come fastest."""
    gains = [offer.gains() for offer in offers]
    ranked = sorted(chain.from_iterable(gains), reverse=True)[: max(0, room)]
    if ranked and prices.is_known:
        plain, all_wait, size = prices.best_size(num_decodes, other_rows, ranked, prices.gap_s)
        counts = _shares(gains, ranked[:size])
        some_wait = prices.every_other(num_decodes, other_rows, counts, sum(ranked[:size]))
        if max(all_wait, some_wait) > plain * _MARGIN:
            return Decision(counts, Pace.ALL if all_wait >= some_wait else Pace.DRAFTERS)
    return Decision([0] * len(offers), Pace.GO)


def _shares(gains: Sequence[Sequence[float]], spent: Sequence[float]) -> list[int]:
    """Returns how many of each offer's gains are among the largest ones that are `spent`: of equal ones the first."""
    least = spent[-1]
    counts = [sum(gain > least for gain in each) for each in gains]
    left = len(spent) - sum(counts)
    for index, each in enumerate(gains):
        more = min(left, sum(gain == least for gain in each))
        counts[index] += more
        left -= more
    return counts


def always(most: int, offers: Sequence[Offer]) -> Decision:
    """Decides for up to `most` guesses of each offer, whatever they cost: sequences with guesses wait."""
    counts = [max(0, min(most, len(offer.chances) - offer.in_flight)) for offer in offers]
    return Decision(counts, Pace.DRAFTERS if any(counts) else Pace.GO)
