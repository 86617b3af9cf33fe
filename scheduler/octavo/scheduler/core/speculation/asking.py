"""The price of a draft model's guesses: of which sequences, and how deep, a step has some made for the next to check.

The draft model computes one guess after another, each for all sequences together, and meanwhile the worker does nothing
else; then the sequences wait for the answer. Guesses are asked for while tokens come faster with all that.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from octavo.scheduler.core.speculation.pauses import Pause
from octavo.scheduler.core.speculation.pricing import MARGIN, Prices
from octavo.wire.costs import RowCost

# No more guesses are asked for at once: chances fall with depth.
_DEEPEST = 8
# How much the last measurement counts beside those before; and how far it may be off.
_SHARE = 1 / 16
_FURTHEST_OFF = 4.0
# A draft model that does not pay is tried again after so many steps, and twice as many each time, up to so many.
_TRIED_AFTER, _TRIED_AFTER_AT_MOST = 256, 16_384


class AskingPrices:
    """Knows what one replica's draft model takes for a guess: as its worker measured at its start (`proposals`), and by
    how much its answers have differed from that; and when it is tried again, where it does not pay."""

    def __init__(self, proposals: Sequence[RowCost]) -> None:
        self._curve = sorted((cost.rows, cost.seconds) for cost in proposals if cost.seconds > 0.0)
        self._factor = 1.0
        self.trials = Pause(_TRIED_AFTER, _TRIED_AFTER_AT_MOST)

    @property
    def is_known(self) -> bool:
        return bool(self._curve)

    def seconds(self, num_sequences: int) -> float:
        """Returns how long one guess takes of each of so many sequences together."""
        place = bisect_left(self._curve, (num_sequences, 0.0))
        rows, seconds = self._curve[min(place, len(self._curve) - 1)]
        return self._factor * seconds * max(1.0, num_sequences / rows)

    def answered(self, num_sequences: int, depth: int, microseconds: int) -> None:
        """Notes how long guesses of so many sequences took, the most of them so deep."""
        if not self._curve:
            return
        ratio = microseconds / 1e6 / (depth * self.seconds(num_sequences))
        self._factor *= 1.0 + _SHARE * (min(_FURTHEST_OFF, max(1 / _FURTHEST_OFF, ratio)) - 1.0)


@dataclass(frozen=True, slots=True)
class Asking:
    """Says how many guesses are asked for of each of the sequences that are named by their places among those
    offered."""

    places: list[int]
    depth: int


def ask(
    prices: Prices, asking: AskingPrices, chances: Sequence[Sequence[float]], num_decodes: int, other_rows: int
) -> Asking:
    """Decides what to ask for in steps that decode `num_decodes` sequences beside `other_rows` of prompts, of sequences
    whose guesses would have these `chances` each, given those before it: what lets tokens come fastest, if every step
    did so."""
    gains = [list(accumulate(each[:_DEEPEST], mul)) for each in chances]
    ranked = sorted(range(len(gains)), key=lambda place: sum(gains[place]), reverse=True)
    best, best_rate = Asking([], 0), MARGIN * num_decodes / prices.seconds(num_decodes)
    for count in _sizes(len(ranked)):
        chosen = [gains[place] for place in ranked[:count]]
        seconds, guess_s = prices.seconds(num_decodes) + prices.gap_s, asking.seconds(count)
        tokens, rows = float(num_decodes), 0
        for depth in range(1, max(map(len, chosen)) + 1):
            found = [each[depth - 1] for each in chosen if len(each) >= depth]
            tokens += sum(found)
            rows += len(found)
            rate = tokens / (seconds + depth * guess_s + prices.further_seconds(num_decodes + other_rows, rows))
            if rate > best_rate:
                best, best_rate = Asking(ranked[:count], depth), rate
    return best


def _sizes(most: int) -> list[int]:
    """Returns 1, 2, 4, ... up to and with `most`."""
    return [1 << power for power in range(most.bit_length()) if 1 << power < most] + [most] * (most > 0)
