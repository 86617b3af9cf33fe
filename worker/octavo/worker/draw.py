"""From logits to token ids: greedy, or temperature, min-p, top-k and top-p by inverse CDF with one uniform per row.

The vocabulary is not sorted: the largest few candidates nearly always settle a row, and a row that they do not settle
asks for more.
"""

from dataclasses import dataclass
from math import inf, log

import torch
from torch import Tensor

from octavo.worker.masses import SPAN, in_spans, total_mass
from octavo.worker.rng import uniforms
from octavo.worker.sequences import WorkerSequence

# Candidates to try, fewest first; the whole vocabulary is the last resort.
_CANDIDATES = (256, 4096)


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
        largest, likeliest = logits.max(dim=-1)
        return cls(logits, largest, likeliest, sequences)


def draw(rows: Rows, wanted: list[int]) -> Tensor:
    """[rows] token ids: of the `wanted` rows with a temperature drawn ones, of all others the likeliest."""
    chosen = rows.likeliest.clone()
    drawing = [row for row in wanted if rows.sequences[row].sampling.temperature > 0]
    for members, pick in (
        ([row for row in drawing if not _is_cut(rows.sequences[row])], _pick_any),
        ([row for row in drawing if _is_cut(rows.sequences[row])], _pick_candidate),
    ):
        if members:
            index = torch.tensor(members, device=chosen.device)
            sequences = [rows.sequences[row] for row in members]
            scaled = (rows.logits[index] - rows.largest[index, None]) / _temperatures(sequences, chosen.device)
            _cut_min_p(scaled, sequences)
            chosen[index] = pick(scaled, sequences, _uniforms(sequences, chosen.device))
    return chosen


def _is_cut(sequence: WorkerSequence) -> bool:
    return sequence.sampling.top_k > 0 or sequence.sampling.top_p < 1


def _temperatures(sequences: list[WorkerSequence], device: torch.device) -> Tensor:
    values = torch.tensor([[sequence.sampling.temperature] for sequence in sequences], dtype=torch.float32)
    # A temperature that fp32 rounds to 0 would make 0 / 0 of the largest logit.
    return values.clamp_min_(torch.finfo(torch.float32).tiny).to(device)


def _uniforms(sequences: list[WorkerSequence], device: torch.device) -> Tensor:
    drawn = uniforms(
        [sequence.sampling.seed for sequence in sequences],
        [sequence.sequence_index for sequence in sequences],
        [sequence.num_generated for sequence in sequences],
    )
    return torch.from_numpy(drawn).to(device)[:, None]


def _cut_min_p(scaled: Tensor, sequences: list[WorkerSequence]) -> None:
    """Rules out, in `scaled` ([rows, vocab_size], the largest of each row 0), what is less likely than `min_p` times
    the likeliest."""
    cut = [row for row, sequence in enumerate(sequences) if sequence.sampling.min_p > 0]
    if cut:
        index = torch.tensor(cut, device=scaled.device)
        least = torch.tensor([[log(sequences[row].sampling.min_p)] for row in cut], dtype=torch.float32)
        kept = scaled[index]
        scaled[index] = kept.masked_fill(kept < least.to(scaled.device), -inf)


def _pick_any(scaled: Tensor, _: list[WorkerSequence], uniform: Tensor) -> Tensor:
    """[rows] token ids over the whole vocabulary, in two levels: first the span of ids, then the id in it."""
    spans = in_spans(scaled)
    masses = spans.sum(dim=-1)
    cumulative = masses.cumsum(dim=-1)
    target = uniform * cumulative[:, -1:]
    span = _invert(masses, target)
    before = cumulative.gather(1, span) - masses.gather(1, span)
    inside = spans[torch.arange(len(spans), device=spans.device), span.squeeze(1)]
    return (span * SPAN + _invert(inside, target - before)).squeeze(1)


def _invert(masses: Tensor, target: Tensor) -> Tensor:
    """[rows, 1]: the first index where the running sum of `masses` ([rows, n]) exceeds `target` ([rows, 1]); at most
    the last one with any mass, whatever rounding does."""
    cumulative = masses.cumsum(dim=-1)
    reached = (cumulative <= target).sum(dim=-1, keepdim=True)
    return torch.minimum(reached, (cumulative < cumulative[:, -1:]).sum(dim=-1, keepdim=True))


def _pick_candidate(scaled: Tensor, sequences: list[WorkerSequence], uniform: Tensor) -> Tensor:
    """[rows] token ids among the top-k and, of those, the top-p."""
    vocab_size = scaled.shape[1]
    top_k = torch.tensor([[sequence.sampling.top_k or vocab_size] for sequence in sequences], device=scaled.device)
    top_p = torch.tensor([[sequence.sampling.top_p] for sequence in sequences], dtype=torch.float64).to(scaled.device)
    chosen = torch.empty(len(sequences), dtype=torch.int64, device=scaled.device)
    left = torch.arange(len(sequences), device=scaled.device)
    for count in (*(count for count in _CANDIDATES if count < vocab_size), vocab_size):
        tokens, settled = _among_candidates(scaled[left], top_k[left], top_p[left], uniform[left], count)
        chosen[left[settled]] = tokens[settled]
        left = left[~settled]
        if not len(left):
            break
    return chosen


def _among_candidates(
    scaled: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Token ids and whether they are right, [rows] each, looking at the `count` most likely tokens only.

    Kept are the first `top_k`, and of those the fewest whose share of their mass reaches `top_p`; among equally likely
    tokens lower ids come first. That is settled if the least likely kept one beats the last candidate: whatever was
    left out is then below it.
    """
    values, tokens = _ranked(scaled, count)
    first_k = torch.arange(count, device=scaled.device) < top_k
    masses = values.double().exp() * first_k
    cumulative = masses.cumsum(dim=-1)
    whole = torch.where(top_k < scaled.shape[1], cumulative[:, -1:], total_mass(scaled))
    kept = first_k & (cumulative - masses < top_p * whole)
    last = kept.sum(dim=-1, keepdim=True) - 1
    index = _invert(masses * kept, uniform * cumulative.gather(1, last))
    cut_inside = (values.gather(1, last) > values[:, -1:]) & ((top_k <= count) | (top_k == scaled.shape[1]))
    settled = cut_inside if count < scaled.shape[1] else torch.ones_like(cut_inside)
    return tokens.gather(1, index).squeeze(1), settled.squeeze(1)


def _ranked(scaled: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest values and their ids, [rows, count], in falling order, equal ones by rising id; which of
    those equal to the last are left out is open."""
    values, tokens = scaled.topk(count, dim=-1)
    tokens, order = tokens.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, tokens.gather(1, order)
