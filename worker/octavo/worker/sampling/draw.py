"""From logits to token ids: greedy, or temperature, min-p, top-k and top-p by inverse CDF with one uniform per row.

The vocabulary is not sorted: the largest few candidates nearly always settle a row; one that they do not settle is
done by itself (`octavo.worker.sampling.ranked_row`).
"""

from dataclasses import dataclass
from math import inf, log

import torch
from torch import Tensor

from octavo.worker.sampling.largest import largest, likeliest
from octavo.worker.sampling.probability_sums import SPAN, span_masses, total_mass
from octavo.worker.sampling.ranked_row import pick_ranked
from octavo.worker.sampling.rng import uniforms
from octavo.worker.sequences import WorkerSequence

# The candidates that are tried.
_CANDIDATES = 64


@dataclass(frozen=True)
class Rows:
    """Sequences with the `logits` ([rows, vocab_size] fp32) that they choose from, the `largest` of each row and its
    id, the `likeliest` token ([rows] each; of equal ones the lowest id)."""

    logits: Tensor
    largest: Tensor
    likeliest: Tensor
    sequences: list[WorkerSequence]

    @classmethod
    def of(cls, logits: Tensor, sequences: list[WorkerSequence]) -> "Rows":
        return cls(logits, *likeliest(logits), sequences)

    def only(self, wanted: list[int]) -> "Rows":
        """These rows, rising; a copy unless they are all."""
        if len(wanted) == len(self.sequences):
            return self
        index = torch.tensor(wanted, device=self.logits.device)
        logits, values, tokens = (
            tensor.index_select(0, index) for tensor in (self.logits, self.largest, self.likeliest)
        )
        return Rows(logits, values, tokens, [self.sequences[row] for row in wanted])


@dataclass(frozen=True)
class _Cuts:
    """What rows leave to be drawn from, [rows, 1] each: the first `top_k` tokens (more than there are: all), of them
    those whose scaled logit is at least `least`, and of these the first that reach `top_p` of their mass. `whole`: the
    mass of a row's whole vocabulary, of the largest logit's mass, where `top_p` alone cuts."""

    top_k: Tensor
    least: Tensor
    top_p: Tensor
    whole: Tensor

    def of(self, row: int) -> tuple[int, float, float, float]:
        return int(self.top_k[row]), float(self.least[row]), float(self.top_p[row]), float(self.whole[row])


def draw(rows: Rows, wanted: list[int]) -> Tensor:
    """[rows] token ids: of the `wanted` rows with a temperature drawn ones, of all others the likeliest."""
    chosen = rows.likeliest.clone()
    drawing = [row for row in wanted if rows.sequences[row].sampling.temperature > 0]
    for members, pick in (
        ([row for row in drawing if not _is_cut(rows.sequences[row])], _pick_any),
        ([row for row in drawing if _is_cut(rows.sequences[row])], _pick_candidate),
    ):
        if members:
            part = rows.only(members)
            chosen[torch.tensor(members, device=chosen.device)] = pick(part, _uniforms(part))
    return chosen


def _is_cut(sequence: WorkerSequence) -> bool:
    sampling = sequence.sampling
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0


def _uniforms(rows: Rows) -> Tensor:
    drawn = uniforms(
        [sequence.sampling.seed for sequence in rows.sequences],
        [sequence.sequence_index for sequence in rows.sequences],
        [sequence.num_generated for sequence in rows.sequences],
    )
    return torch.from_numpy(drawn).to(rows.logits.device)[:, None]


def _scaled(logits: Tensor, rows: Rows) -> Tensor:
    """[rows, n]: `logits` of these rows relative to the largest of each, divided by the temperatures."""
    temperatures = torch.tensor([sequence.sampling.temperature for sequence in rows.sequences], dtype=torch.float32)
    # One that fp32 rounds to 0 would make 0 / 0 of the largest logit.
    divisors = temperatures.clamp_min_(torch.finfo(torch.float32).tiny).to(logits.device)
    return (logits - rows.largest[:, None]).div_(divisors[:, None])


def _probabilities(rows: Rows) -> Tensor:
    """[rows, vocab_size] fp32, before any cut."""
    is_neutral = all(sequence.sampling.temperature == 1 for sequence in rows.sequences)
    # The same either way: softmax itself takes the largest off first.
    return (rows.logits if is_neutral else _scaled(rows.logits, rows)).softmax(dim=-1)


def _pick_any(rows: Rows, uniform: Tensor) -> Tensor:
    """[rows] token ids over the whole vocabulary, in two levels: first the span of ids, then the id in it."""
    probabilities = _probabilities(rows)
    masses = span_masses(probabilities)
    cumulative = masses.cumsum(dim=-1)
    target = uniform * cumulative[:, -1:]
    span = _invert(masses, target)
    before = cumulative.gather(1, span) - masses.gather(1, span)
    tokens = span * SPAN + torch.arange(SPAN, device=span.device)
    size = probabilities.shape[1]
    inside = probabilities.gather(1, tokens.clamp_max(size - 1)).masked_fill_(tokens >= size, 0).double()
    return (span * SPAN + _invert(inside, target - before)).squeeze(1)


def _invert(masses: Tensor, target: Tensor) -> Tensor:
    """[rows, 1]: the first index where the running sum of `masses` ([rows, n]) exceeds `target` ([rows, 1]); at most
    the last one with any mass, whatever rounding does."""
    cumulative = masses.cumsum(dim=-1)
    reached = (cumulative <= target).sum(dim=-1, keepdim=True)
    return torch.minimum(reached, (cumulative < cumulative[:, -1:]).sum(dim=-1, keepdim=True))


def _pick_candidate(rows: Rows, uniform: Tensor) -> Tensor:
    """[rows] token ids among those that the cuts leave."""
    cuts = _cuts(rows)
    values, tokens = largest(rows.logits, _CANDIDATES)
    chosen, settled = _among(_scaled(values, rows), tokens, cuts, uniform, rows.logits.shape[1])
    for row in (~settled).nonzero().squeeze(1).tolist():
        chosen[row] = _among_all(rows.only([row]), cuts, row, float(uniform[row]))
    return chosen


def _cuts(rows: Rows) -> _Cuts:
    device, size = rows.logits.device, rows.logits.shape[1]
    params = [sequence.sampling for sequence in rows.sequences]
    whole = torch.full((len(params), 1), inf, dtype=torch.float64, device=device)
    open_rows = [row for row, each in enumerate(params) if not (0 < each.top_k < size or each.min_p)]
    if open_rows:
        part = rows.only(open_rows)
        whole[open_rows] = total_mass(_probabilities(part), part.likeliest)
    top_k = torch.tensor([[each.top_k or size] for each in params], device=device)
    least = torch.tensor([[log(each.min_p) if each.min_p else -inf] for each in params], dtype=torch.float32)
    top_p = torch.tensor([[each.top_p] for each in params], dtype=torch.float64)
    return _Cuts(top_k, least.to(device), top_p.to(device), whole)


def _among(scaled: Tensor, tokens: Tensor, cuts: _Cuts, uniform: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Token ids and whether they are right, [rows] each, from the likeliest `tokens` only, whose `scaled` logits these
    are ([rows, n] each, in falling order).

    Among equally likely tokens lower ids come first. A row is settled if the least likely token kept beats the last
    candidate, so that whatever was left out is below it, and if the mass that `top_p` is a share of is known; or if
    nothing that was left out is possible.
    """
    count, beyond = scaled.shape[1], scaled[:, -1:]
    within = (torch.arange(count, device=scaled.device) < cuts.top_k) & (scaled >= cuts.least)
    masses = scaled.double().exp() * within
    cumulative = masses.cumsum(dim=-1)
    whole = torch.where(cuts.whole < inf, cuts.whole, cumulative[:, -1:])
    kept = within & (cumulative - masses < cuts.top_p * whole)
    last = kept.sum(dim=-1, keepdim=True) - 1
    index = _invert(masses * kept, uniform * cumulative.gather(1, last))
    is_known = (cuts.whole < inf) | (cuts.top_k <= count) | (beyond < cuts.least)
    settled = (is_known & (scaled.gather(1, last) > beyond)) | (beyond == -inf) | (count == vocab_size)
    return tokens.gather(1, index).squeeze(1), settled.squeeze(1)


def _among_all(one: Rows, cuts: _Cuts, row: int, uniform: float) -> int:
    """As `_among`, from all of `one` row, whose cuts are those of `row`."""
    return pick_ranked(_scaled(one.logits, one)[0].cpu().numpy(), *cuts.of(row), uniform)
