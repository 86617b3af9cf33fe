"""The draw, which turns logits into token ids: greedy, or temperature, min-p, top-k and top-p by inverse CDF.

Each row takes one uniform number. The vocabulary is not sorted: the largest few candidates nearly always settle a row.
A row that they do not settle is computed by itself: its tokens are counted by likelihood in narrow buckets. A cut, or a
number drawn, is found in two levels: first the bucket, then the place in it, for which the tokens of that bucket alone
are sorted.
"""

from dataclasses import dataclass
from math import inf, log

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.worker.sampling.rng import uniforms
from octavo.worker.sampling.row_reductions import SPAN, argmax, largest, total_weight, weights
from octavo.worker.sequences import Chooser

Floats = npt.NDArray[np.float32]
Masses = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

# Buckets of likelihood: the number for a factor of e, and the number in all.
_BUCKETS_PER_NAT, _NUM_BUCKETS = 64, 4096


def pick_ranked(scaled: Floats, top_k: int, least: float, top_p: float, whole: float, uniform: float) -> int:
    """Returns the id of the token that `uniform` (0 to 1) falls on among the tokens of a row that its cuts leave.

    `scaled` ([vocab_size]) holds the row's logits less the largest, divided by the temperature. Of equally likely
    tokens lower ids come first. The cuts leave the first `top_k` tokens, of them those with at least `least`, and of
    these the first that reach `top_p` of `whole`. An infinite `whole` stands for the mass of the tokens that the first
    two cuts leave.
    """
    ids = (scaled >= max(least, _bound(scaled, top_k, top_p, whole))).nonzero()[0]
    row = RankedRow(scaled[ids])
    first = row.mass_of_first(top_k)
    kept = min(first, row.mass_reaching(top_p * (whole if whole < inf else first)))
    # It must stay below, whatever rounding does.
    return int(ids[row.place(min(uniform * kept, np.nextafter(kept, 0)))])


class RankedRow:
    """Orders tokens by likelihood, equal ones as they come. `scaled` ([tokens], none above 0) holds the logarithms.

    A prefix of this order is named by its mass, the sum of its likelihoods.
    """

    def __init__(self, scaled: Floats) -> None:
        self._scaled = scaled
        self._buckets: Ids = np.minimum(scaled * -_BUCKETS_PER_NAT, _NUM_BUCKETS - 1).astype(np.int64)
        self._masses: Masses = _exponentials(torch.from_numpy(scaled)[None])[0].numpy()
        # The mass of each bucket together with all buckets before it.
        self._ends: Masses = np.bincount(self._buckets, weights=self._masses).cumsum()

    def mass_of_first(self, count: int) -> float:
        """Returns the mass of the first `count` tokens, or of all if they are fewer."""
        if count >= len(self._scaled):
            return float(self._ends[-1])
        ends = np.bincount(self._buckets).cumsum()
        bucket = int(ends.searchsorted(count))
        _, masses = self._inside(bucket)
        return float(masses[count - ends[bucket] - 1])

    def mass_reaching(self, mass: float) -> float:
        """Returns the mass of the fewest tokens whose mass reaches `mass`, or of all if none does."""
        bucket = int(self._ends.searchsorted(mass))
        if bucket == len(self._ends):
            return float(self._ends[-1])
        _, masses = self._inside(bucket)
        return float(masses[masses.searchsorted(mass)])

    def place(self, mass: float) -> int:
        """Returns the index of the token that follows the tokens with this `mass`, which must be below the mass of
        all."""
        bucket = int(self._ends.searchsorted(mass, side="right"))
        indices, masses = self._inside(bucket)
        return int(indices[masses.searchsorted(mass, side="right")])

    def _inside(self, bucket: int) -> tuple[Ids, Masses]:
        """Returns the tokens of a bucket in their order, and for each its mass together with all tokens before it."""
        indices = (self._buckets == bucket).nonzero()[0]
        indices = indices[np.argsort(-self._scaled[indices], kind="stable")]
        before = self._ends[bucket - 1] if bucket else 0.0
        masses = np.minimum(before + self._masses[indices].cumsum(), self._ends[bucket])
        # The same sum in another order: all must agree where a bucket ends.
        masses[-1] = self._ends[bucket]
        return indices, masses


def _bound(scaled: Floats, top_k: int, top_p: float, whole: float) -> float:
    """Returns the logarithm of a likelihood below which the cuts leave no token."""
    size = len(scaled)
    if whole < inf:
        # All tokens below the bound together have less mass than is cut off; half of it, for `whole` is rounded.
        return log((1 - top_p) / 2 * whole / size) if top_p < 1 else -inf
    height = size // (8 * top_k)
    if height < 2:
        return -inf
    # So many columns hold something that is not below the `top_k` largest maxima.
    maxima = scaled[: size // height * height].reshape(height, -1).max(axis=0)
    return float(np.partition(maxima, -top_k)[-top_k])


# The number of candidates that are tried first.
_CANDIDATES = 64


@dataclass(frozen=True)
class Rows:
    """Holds choosers and the `logits` ([rows, vocab_size] fp32) that they choose from.

    `largest` holds the largest logit of each row, `argmax` its token id ([rows] each; of equal ones the lowest id).
    """

    logits: Tensor
    largest: Tensor
    argmax: Tensor
    choosers: list[Chooser]

    @classmethod
    def of(cls, logits: Tensor, choosers: list[Chooser]) -> "Rows":
        return cls(logits, *argmax(logits), choosers)

    def only(self, wanted: list[int]) -> "Rows":
        """Returns the rows `wanted`, in rising order; a copy unless these are all rows."""
        if len(wanted) == len(self.choosers):
            return self
        index = torch.tensor(wanted, device=self.logits.device)
        logits, values, tokens = (tensor.index_select(0, index) for tensor in (self.logits, self.largest, self.argmax))
        return Rows(logits, values, tokens, [self.choosers[row] for row in wanted])


@dataclass(frozen=True)
class _Cuts:
    """Holds the cuts of each row, [rows, 1] each.

    A row leaves the first `top_k` tokens (all, if there are fewer), of them those whose scaled logit is at least
    `least`, and of these the first that reach `top_p` of their mass. Where `top_p` alone cuts, `whole` is the mass of
    the row's whole vocabulary, in units of the largest logit's mass; for other rows it is infinite.
    """

    top_k: Tensor
    least: Tensor
    top_p: Tensor
    whole: Tensor

    def of(self, row: int) -> tuple[int, float, float, float]:
        return int(self.top_k[row]), float(self.least[row]), float(self.top_p[row]), float(self.whole[row])


def draw(rows: Rows, wanted: list[int]) -> Tensor:
    """Returns [rows] token ids: drawn ones for the `wanted` rows with a temperature, the argmax for all others."""
    chosen = rows.argmax.clone()
    drawing = [row for row in wanted if rows.choosers[row].sampling.temperature > 0]
    for members, pick in (
        ([row for row in drawing if not _is_cut(rows.choosers[row])], _pick_any),
        ([row for row in drawing if _is_cut(rows.choosers[row])], _pick_candidate),
    ):
        if members:
            part = rows.only(members)
            chosen[torch.tensor(members, device=chosen.device)] = pick(part, _uniforms(part))
    return chosen


def _is_cut(chooser: Chooser) -> bool:
    sampling = chooser.sampling
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0


def _uniforms(rows: Rows) -> Tensor:
    drawn = uniforms(
        [chooser.sampling.seed for chooser in rows.choosers],
        [chooser.sequence.sequence_index for chooser in rows.choosers],
        [chooser.num_generated for chooser in rows.choosers],
    )
    return torch.from_numpy(drawn).to(rows.logits.device)[:, None]


def _scaled(logits: Tensor, rows: Rows) -> Tensor:
    """Returns [rows, n]: `logits` of these rows less the largest of each row, divided by the temperatures."""
    return (logits - rows.largest[:, None]).div_(_divisors(rows)[:, None])


def _divisors(rows: Rows) -> Tensor:
    """Returns the temperatures, [rows] fp32. One that fp32 rounds to 0 would make 0 / 0 of the largest logit."""
    temperatures = torch.tensor([chooser.sampling.temperature for chooser in rows.choosers], dtype=torch.float32)
    return temperatures.clamp_min_(torch.finfo(torch.float32).tiny).to(rows.logits.device)


def _exponentials(scaled: Tensor) -> Tensor:
    """Returns [rows, n] fp64: e to the power of each of `scaled`, none of which is above 0."""
    ends = scaled.new_zeros(len(scaled))
    return weights(scaled, ends, ends + 1)[0].double()


def _pick_any(rows: Rows, uniform: Tensor) -> Tensor:
    """Draws [rows] token ids from the whole vocabulary, in two levels: first the span of ids, then the id in it."""
    likelihoods, masses = weights(rows.logits, rows.largest, _divisors(rows))
    cumulative = masses.cumsum(dim=-1)
    target = uniform * cumulative[:, -1:]
    span = _invert(masses, target)
    before = cumulative.gather(1, span) - masses.gather(1, span)
    tokens = span * SPAN + torch.arange(SPAN, device=span.device)
    size = likelihoods.shape[1]
    inside = likelihoods.gather(1, tokens.clamp_max(size - 1)).masked_fill_(tokens >= size, 0).double()
    return (span * SPAN + _invert(inside, target - before)).squeeze(1)


def _invert(masses: Tensor, target: Tensor) -> Tensor:
    """Returns [rows, 1]: the first index where the running sum of `masses` ([rows, n]) exceeds `target` ([rows, 1]).

    Whatever rounding does, this is at most the last index with any mass.
    """
    cumulative = masses.cumsum(dim=-1)
    reached = (cumulative <= target).sum(dim=-1, keepdim=True)
    return torch.minimum(reached, (cumulative < cumulative[:, -1:]).sum(dim=-1, keepdim=True))


def _pick_candidate(rows: Rows, uniform: Tensor) -> Tensor:
    """Draws [rows] token ids among those that the cuts leave."""
    cuts = _cuts(rows)
    values, tokens = largest(rows.logits, _CANDIDATES)
    chosen, settled = _among(_scaled(values, rows), tokens, cuts, uniform, rows.logits.shape[1])
    for row in (~settled).nonzero().squeeze(1).tolist():
        chosen[row] = _among_all(rows.only([row]), cuts, row, float(uniform[row]))
    return chosen


def _cuts(rows: Rows) -> _Cuts:
    device, size = rows.logits.device, rows.logits.shape[1]
    params = [chooser.sampling for chooser in rows.choosers]
    whole = torch.full((len(params), 1), inf, dtype=torch.float64, device=device)
    open_rows = [row for row, each in enumerate(params) if not (0 < each.top_k < size or each.min_p)]
    if open_rows:
        part = rows.only(open_rows)
        whole[open_rows] = total_weight(part.logits, part.largest, _divisors(part))
    top_k = torch.tensor([[each.top_k or size] for each in params], device=device)
    least = torch.tensor([[log(each.min_p) if each.min_p else -inf] for each in params], dtype=torch.float32)
    top_p = torch.tensor([[each.top_p] for each in params], dtype=torch.float64)
    return _Cuts(top_k, least.to(device), top_p.to(device), whole)


def _among(scaled: Tensor, tokens: Tensor, cuts: _Cuts, uniform: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Draws from the largest `tokens` only, and returns the token ids and whether each row is settled, [rows] each.

    `scaled` holds the scaled logits of `tokens` ([rows, n] each, in falling order). Among equally likely tokens lower
    ids come first. A row is settled if the least likely token kept beats the last candidate, so that every token
    outside is below it, and if the mass that `top_p` is a share of is known; or if no token outside is possible.
    """
    count, beyond = scaled.shape[1], scaled[:, -1:]
    within = (torch.arange(count, device=scaled.device) < cuts.top_k) & (scaled >= cuts.least)
    masses = _exponentials(scaled) * within
    cumulative = masses.cumsum(dim=-1)
    whole = torch.where(cuts.whole < inf, cuts.whole, cumulative[:, -1:])
    kept = within & (cumulative - masses < cuts.top_p * whole)
    last = kept.sum(dim=-1, keepdim=True) - 1
    index = _invert(masses * kept, uniform * cumulative.gather(1, last))
    is_known = (cuts.whole < inf) | (cuts.top_k <= count) | (beyond < cuts.least)
    settled = (is_known & (scaled.gather(1, last) > beyond)) | (beyond == -inf) | (count == vocab_size)
    return tokens.gather(1, index).squeeze(1), settled.squeeze(1)


def _among_all(one: Rows, cuts: _Cuts, row: int, uniform: float) -> int:
    """Draws as `_among` does, but from all tokens of the single row `one`, whose cuts are those of `row`."""
    return pick_ranked(_scaled(one.logits, one)[0].cpu().numpy(), *cuts.of(row), uniform)
