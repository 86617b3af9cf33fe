"""A model of how long steps take, fitted to timed steps without negative costs (Lawson and Hanson, 1974)."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from octavo.runtime.models.step_times import StepShape, StepTimeModel, TokenTime
from octavo.worker.calibrate.timed_steps import TimedStep

Numbers = npt.NDArray[np.float64]

# Quantities whose proportion varies less than this differ by noise alone.
_SAME = 1e-6
# The share of all there was to explain below which the rest is rounding.
_ROUNDING = 1e-12


_WELL_BEYOND = 1.5


def least_costs(quantities: Numbers, seconds: Numbers) -> Numbers:
    """Returns the costs [columns], none negative, with the least sum of squares of `quantities` [rows, columns] @ costs
    - `seconds` [rows].

    If the rows do not distinguish some columns, one of them gets the cost of all.
    """
    if not quantities.size:
        return np.zeros(quantities.shape[1])
    # The columns are of very different sizes.
    scales = np.where(quantities.any(axis=0), np.abs(quantities).max(axis=0), 1.0)
    return _least_costs(quantities / scales, seconds) / scales


def _least_costs(quantities: Numbers, seconds: Numbers) -> Numbers:
    """Lets cost after cost become positive: always the one that explains most of the rest."""
    costs = np.zeros(quantities.shape[1])
    candidates: npt.NDArray[np.bool_] = np.asarray(quantities.any(axis=0))
    enough = _ROUNDING * np.linalg.norm(quantities, axis=0) * np.linalg.norm(seconds)
    while True:
        explained = np.where(candidates & (costs == 0.0), quantities.T @ (seconds - quantities @ costs) - enough, 0.0)
        best = int(explained.argmax())
        if explained[best] <= 0.0:
            return costs
        with_it = _settled(quantities, seconds, costs, best)
        if with_it is None or _rest(quantities, seconds, with_it) >= _rest(quantities, seconds, costs):
            candidates[best] = False
        else:
            costs = with_it


def _settled(quantities: Numbers, seconds: Numbers, costs: Numbers, new: int) -> Numbers | None:
    """Solves for the positive costs and a new one, dropping those that would be negative; None if they cannot be
    distinguished."""
    kept = costs > 0.0
    kept[new] = True
    while True:
        wanted = np.zeros_like(costs)
        wanted[kept], _, rank, _ = np.linalg.lstsq(quantities[:, kept], seconds, rcond=_SAME)
        if rank < kept.sum():
            return None
        negative = kept & (wanted <= 0.0)
        if not negative.any():
            return wanted
        # Goes as far that way as all costs stay above zero: then one of them is zero.
        ways = np.maximum((costs - wanted)[negative], np.finfo(np.float64).tiny)
        share = (costs[negative] / ways).min()
        costs = np.maximum(costs + share * (wanted - costs), 0.0)
        kept &= ~(negative & (costs <= _ROUNDING * costs.max()))
        costs = np.where(kept, costs, 0.0)


def _rest(quantities: Numbers, seconds: Numbers, costs: Numbers) -> float:
    return float(np.square(quantities @ costs - seconds).sum())


def fitted(samples: Sequence[TimedStep]) -> StepTimeModel:
    """Fits the model with the least squares of relative differences to `samples`, at least one of which computes
    tokens.

    No cost is negative, and a step of more tokens takes no less time.
    """
    knots = _knots(sample.shape.num_tokens for sample in samples)
    seconds = np.array([sample.seconds for sample in samples])
    quantities = np.array([_quantities(sample.shape, knots) for sample in samples])
    costs = least_costs(quantities / seconds[:, None], np.ones(len(samples))).tolist()
    token_times = [TokenTime(knot, _token_seconds(knot, knots, costs)) for knot in knots]
    return StepTimeModel(token_times, *costs[len(knots) :])


def errors(model: StepTimeModel, families: Mapping[str, Iterable[TimedStep]]) -> dict[str, list[float]]:
    """Returns, by family, the relative differences of the model's times from the measured ones, signed."""
    return {
        family: [model.seconds(sample.shape) / sample.seconds - 1.0 for sample in samples]
        for family, samples in families.items()
    }


def typical_error(errors: Mapping[str, list[float]]) -> float:
    """Returns the median of the absolute errors."""
    return statistics.median(map(abs, chain.from_iterable(errors.values())))


def _knots(num_tokens: Iterable[int]) -> list[int]:
    """Returns the sizes at which the time per token may change: the first size that was timed, powers of two, and the
    last if it is well beyond them."""
    found = sorted(set(num_tokens) - {0})
    powers = {size for size in found if size & (size - 1) == 0}
    last = {found[-1]} if found[-1] >= _WELL_BEYOND * max(powers, default=0) else set()
    return sorted({found[0]} | powers | last)


def _quantities(shape: StepShape, knots: list[int]) -> list[float]:
    """Returns the quantities of `_ramps`, then those of the fields of `StepTimeModel`."""
    moves = bool(shape.blocks_out) + bool(shape.blocks_in) + bool(shape.copies)
    return [
        *(_ramps(shape.num_tokens, knots) if shape.num_tokens else len(knots) * [0.0]),
        float(shape.num_sampled > 0),
        shape.num_sampled,
        shape.context_tokens,
        shape.prefill_pairs,
        moves,
        shape.blocks_out,
        shape.blocks_in,
        shape.copies,
    ]


def _ramps(num_tokens: int, knots: list[int]) -> list[float]:
    """Returns one for any step, then the tokens between each knot and the next, with all beyond the last but one in the
    last.

    If no cost is negative, more tokens take no less time.
    """
    ends = [*knots[1:-1], math.inf]
    return [1.0, *(float(min(max(num_tokens - low, 0), end - low)) for low, end in zip(knots[:-1], ends, strict=False))]


def _token_seconds(num_tokens: int, knots: list[int], costs: list[float]) -> float:
    return sum(cost * ramp for cost, ramp in zip(costs, _ramps(num_tokens, knots), strict=False))
