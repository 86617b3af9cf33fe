"""From logits to token ids: greedy, or temperature, top-k and top-p by inverse CDF with one uniform per row.

A row's token depends on its own logits, parameters and key alone, never on the rows beside it. The vocabulary is not
sorted: the largest few candidates nearly always settle a row, and a row that they do not settle asks for more.
"""

import torch
from torch import Tensor

from octavo.worker.rng import uniforms
from octavo.worker.sequences import WorkerSequence

# Candidates to try, fewest first; the whole vocabulary is the last resort.
_CANDIDATES = (256, 4096)
# Tokens whose probabilities are first summed together when nothing is cut off.
_SPAN = 256


class SamplingError(Exception):
    """Logits that no token can be chosen from."""


def sample(logits: Tensor, sequences: list[WorkerSequence]) -> list[int]:
    """One token id per row of `logits` ([rows, vocab_size], any float dtype) for the sequence of that row.

    Raises `SamplingError` if a row has a NaN, a positive infinity, or nothing finite.
    """
    if not sequences:
        return []
    logits = logits.float()
    largest, chosen = logits.max(dim=-1)
    _check_finite(largest, sequences)
    for rows, pick in (
        ([row for row, sequence in enumerate(sequences) if _is_plain(sequence)], _pick_any),
        ([row for row, sequence in enumerate(sequences) if _is_cut(sequence)], _pick_candidate),
    ):
        if rows:
            index = torch.tensor(rows, device=logits.device)
            members = [sequences[row] for row in rows]
            scaled = (logits[index] - largest[index, None]) / _temperatures(members, logits.device)
            chosen[index] = pick(scaled, members, _uniforms(members, logits.device))
    token_ids: list[int] = chosen.tolist()
    return token_ids


def _is_cut(sequence: WorkerSequence) -> bool:
    sampling = sequence.sampling
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1)


def _is_plain(sequence: WorkerSequence) -> bool:
    return sequence.sampling.temperature > 0 and not _is_cut(sequence)


def _check_finite(largest: Tensor, sequences: list[WorkerSequence]) -> None:
    finite = torch.isfinite(largest).tolist()
    broken = [f"{sequence.sequence_id:#x}" for sequence, good in zip(sequences, finite, strict=True) if not good]
    if broken:
        raise SamplingError(
            f"the model gave logits that are not finite for sequences {', '.join(broken[:8])};"
            " its weights are broken or overflow in this dtype (try --dtype float32)"
        )


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


def _pick_any(scaled: Tensor, _: list[WorkerSequence], uniform: Tensor) -> Tensor:
    """[rows] token ids over the whole vocabulary, in two levels: first the span of ids, then the id in it."""
    spans = _spans(scaled)
    masses = spans.sum(dim=-1)
    cumulative = masses.cumsum(dim=-1)
    target = uniform * cumulative[:, -1:]
    span = _invert(masses, target)
    before = cumulative.gather(1, span) - masses.gather(1, span)
    inside = spans[torch.arange(len(spans), device=spans.device), span.squeeze(1)]
    return (span * _SPAN + _invert(inside, target - before)).squeeze(1)


def _spans(scaled: Tensor) -> Tensor:
    """Unnormalised probabilities, [rows, spans, _SPAN] fp64. (One long sum would be added up in another order for a
    single row than for several.)"""
    masses = scaled.exp().double()
    padding = -masses.shape[1] % _SPAN
    return torch.nn.functional.pad(masses, (0, padding)).view(len(masses), -1, _SPAN)


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
    whole = torch.where(top_k < scaled.shape[1], cumulative[:, -1:], _spans(scaled).sum(dim=-1).cumsum(dim=-1)[:, -1:])
    kept = first_k & (cumulative - masses < top_p * whole)
    last = kept.sum(dim=-1, keepdim=True) - 1
    index = _invert(masses * kept, uniform * cumulative.gather(1, last))
    cut_inside = (values.gather(1, last) > values[:, -1:]) & ((top_k <= count) | (top_k == scaled.shape[1]))
    settled = cut_inside if count < scaled.shape[1] else torch.ones_like(cut_inside)
    return tokens.gather(1, index).squeeze(1), settled.squeeze(1)


def _ranked(scaled: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest values and their ids, [rows, count], in falling order, equal ones by rising id."""
    values, tokens = scaled.topk(count, dim=-1)
    tokens, order = tokens.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, tokens.gather(1, order)
