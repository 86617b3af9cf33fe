"""How long steps take, from some that were timed."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import numpy as np

from octavo.wire.step_times import StepShape, StepTimeModel, TokenTime
from octavo.worker.least_squares import least_costs
from octavo.worker.timed_steps import Sample

_WELL_BEYOND = 1.5


def fitted(samples: Sequence[Sample]) -> StepTimeModel:
    """The model with the least squares of relative differences to `samples`, of which one at least computes tokens; no
    cost is negative, and a step of more tokens takes no less time."""
    knots = _knots(sample.shape.num_tokens for sample in samples)
    seconds = np.array([sample.seconds for sample in samples])
    quantities = np.array([_quantities(sample.shape, knots) for sample in samples])
    costs = least_costs(quantities / seconds[:, None], np.ones(len(samples))).tolist()
    token_times = [TokenTime(knot, _token_seconds(knot, knots, costs)) for knot in knots]
    return StepTimeModel(token_times, *costs[len(knots) :])


def errors(model: StepTimeModel, families: Mapping[str, Iterable[Sample]]) -> dict[str, list[float]]:
    """By family, how far what the model says is from what was measured: of each step's time, sign and all."""
    return {
        family: [model.seconds(sample.shape) / sample.seconds - 1.0 for sample in samples]
        for family, samples in families.items()
    }


def typical_error(errors: Mapping[str, list[float]]) -> float:
    """The median of the sizes."""
    return statistics.median(map(abs, chain.from_iterable(errors.values())))


def _knots(num_tokens: Iterable[int]) -> list[int]:
    """Where the time per token may change: the first size that was timed, powers of two, and the last if it is well
    beyond them."""
    found = sorted(set(num_tokens) - {0})
    powers = {size for size in found if size & (size - 1) == 0}
    last = {found[-1]} if found[-1] >= _WELL_BEYOND * max(powers, default=0) else set()
    return sorted({found[0]} | powers | last)


def _quantities(shape: StepShape, knots: list[int]) -> list[float]:
    """Those of `_ramps`, then as the fields of `StepTimeModel` come."""
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
    """One for any step, then the tokens between each knot and the next, with all beyond the last but one in the last:
    if none costs less than nothing, more tokens take no less time."""
    ends = [*knots[1:-1], math.inf]
    return [1.0, *(float(min(max(num_tokens - low, 0), end - low)) for low, end in zip(knots[:-1], ends, strict=False))]


def _token_seconds(num_tokens: int, knots: list[int], costs: list[float]) -> float:
    return sum(cost * ramp for cost, ramp in zip(costs, _ramps(num_tokens, knots), strict=False))
