"""The token that a number falls on among all of a row, likeliest first, without sorting the row.

Its tokens are counted by likelihood, in narrow buckets. Where cuts fall, and where the number does, is found in two
levels: first the bucket, then the place in it, for which the tokens of that bucket alone are sorted.
"""

from math import inf, log

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Masses = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

# Likelihoods that are told apart: so many for a factor of e, and in all.
_BUCKETS_PER_NAT, _NUM_BUCKETS = 64, 4096


def pick_ranked(scaled: Floats, top_k: int, least: float, top_p: float, whole: float, uniform: float) -> int:
    """The id of the token that `uniform` (0 to 1) falls on among those of a row that its cuts leave.

    `scaled` are its logits ([vocab_size]) less the largest, divided by the temperature. Of equally likely tokens lower
    ids come first. Left are the first `top_k`, of them those with at least `least`, and of these the first that reach
    `top_p` of `whole`, which is infinite where it is the mass of these that is meant.
    """
    ids = (scaled >= max(least, _bound(scaled, top_k, top_p, whole))).nonzero()[0]
    row = RankedRow(scaled[ids])
    first = row.mass_of_first(top_k)
    kept = min(first, row.mass_reaching(top_p * (whole if whole < inf else first)))
    # It must stay below, whatever rounding does.
    return int(ids[row.place(min(uniform * kept, np.nextafter(kept, 0)))])


class RankedRow:
    """Tokens in the order of their likelihoods, of which `scaled` ([tokens], none above 0) are the logarithms; equal
    ones as they come. The first of them are told by their mass, the sum of their likelihoods."""

    def __init__(self, scaled: Floats) -> None:
        self._scaled = scaled
        self._buckets: Ids = np.minimum(scaled * -_BUCKETS_PER_NAT, _NUM_BUCKETS - 1).astype(np.int64)
        self._masses: Masses = np.exp(scaled, dtype=np.float64)
        # Of every bucket together with all before it.
        self._ends: Masses = np.bincount(self._buckets, weights=self._masses).cumsum()

    def mass_of_first(self, count: int) -> float:
        """The mass of so many tokens, or of all if they are fewer."""
        if count >= len(self._scaled):
            return float(self._ends[-1])
        ends = np.bincount(self._buckets).cumsum()
        bucket = int(ends.searchsorted(count))
        _, masses = self._inside(bucket)
        return float(masses[count - ends[bucket] - 1])

    def mass_reaching(self, mass: float) -> float:
        """That of the fewest tokens whose mass reaches `mass`, or of all if that does not."""
        bucket = int(self._ends.searchsorted(mass))
        if bucket == len(self._ends):
            return float(self._ends[-1])
        _, masses = self._inside(bucket)
        return float(masses[masses.searchsorted(mass)])

    def place(self, mass: float) -> int:
        """The index of the token that comes after those of this mass; it must be less than that of all."""
        bucket = int(self._ends.searchsorted(mass, side="right"))
        indices, masses = self._inside(bucket)
        return int(indices[masses.searchsorted(mass, side="right")])

    def _inside(self, bucket: int) -> tuple[Ids, Masses]:
        """The tokens of a bucket in their order, and the mass of each with all before it."""
        indices = (self._buckets == bucket).nonzero()[0]
        indices = indices[np.argsort(-self._scaled[indices], kind="stable")]
        before = self._ends[bucket - 1] if bucket else 0.0
        masses = np.minimum(before + self._masses[indices].cumsum(), self._ends[bucket])
        # The same sum in another order: all must agree where a bucket ends.
        masses[-1] = self._ends[bucket]
        return indices, masses


def _bound(scaled: Floats, top_k: int, top_p: float, whole: float) -> float:
    """A likelihood's logarithm below which no token is left."""
    size = len(scaled)
    if whole < inf:
        # All below it have together less than is cut off; by half, for `whole` is rounded.
        return log((1 - top_p) / 2 * whole / size) if top_p < 1 else -inf
    height = size // (8 * top_k)
    if height < 2:
        return -inf
    # As many columns as that have something that is not below the `top_k` largest maxima.
    maxima = scaled[: size // height * height].reshape(height, -1).max(axis=0)
    return float(np.partition(maxima, -top_k)[-top_k])
