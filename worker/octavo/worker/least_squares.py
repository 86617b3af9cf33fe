"""Costs from what was measured: the least squares of which no cost is negative (Lawson and Hanson, 1974)."""

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]

# Quantities whose proportion varies less than this are told apart by noise alone.
_SAME = 1e-6
# What is left to explain by a cost, of all there was, that is rounding.
_ROUNDING = 1e-12


def least_costs(quantities: Numbers, seconds: Numbers) -> Numbers:
    """The costs [columns], none negative, with the least sum of squares of `quantities` [rows, columns] @ costs -
    `seconds` [rows]. Of columns that the rows do not tell apart one gets the cost of all."""
    if not quantities.size:
        return np.zeros(quantities.shape[1])
    # They are of very different sizes.
    scales = np.where(quantities.any(axis=0), np.abs(quantities).max(axis=0), 1.0)
    return _least_costs(quantities / scales, seconds) / scales


def _least_costs(quantities: Numbers, seconds: Numbers) -> Numbers:
    """Cost after cost is let above zero: always the one that explains most of what is left."""
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
    """The least squares of the costs above zero and a new one, less those that would be negative; None if they are not
    told apart."""
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
        # As far that way as all stay above zero: then one of them is there.
        ways = np.maximum((costs - wanted)[negative], np.finfo(np.float64).tiny)
        share = (costs[negative] / ways).min()
        costs = np.maximum(costs + share * (wanted - costs), 0.0)
        kept &= ~(negative & (costs <= _ROUNDING * costs.max()))
        costs = np.where(kept, costs, 0.0)


def _rest(quantities: Numbers, seconds: Numbers, costs: Numbers) -> float:
    return float(np.square(quantities @ costs - seconds).sum())
