"""Sampling as one would write it down: row by row, everything sorted, in fp64 where the sampler's order of additions
does not decide. What the sampler does for a whole batch must come to the same."""

from collections import Counter
from math import inf

import numpy as np
import numpy.typing as npt

from octavo.wire.sampling import Logprobs
from octavo.worker.sampling.rng import uniforms
from octavo.worker.sequences import WorkerSequence

Floats = npt.NDArray[np.float64]


def plain_choice(logits: npt.NDArray[np.float32], sequence: WorkerSequence) -> int:
    """The token that `sequence` must choose from `logits` ([vocab_size])."""
    changed = plain_logits(logits, sequence)
    order = np.argsort(-changed, kind="stable")
    if sequence.sampling.temperature == 0:
        return int(order[0])
    order, masses = plain_masses(changed, sequence)
    drawn = uniforms([sequence.sampling.seed], [sequence.sequence_index], [sequence.num_generated])[0]
    cumulative = masses.cumsum()
    return int(order[np.searchsorted(cumulative, drawn * cumulative[-1], side="right")])


def plain_logits(logits: npt.NDArray[np.float32], sequence: WorkerSequence) -> Floats:
    """Applies the processors to `logits`, one token after the other."""
    sampling, counts = sequence.sampling, Counter(sequence.token_ids[sequence.prompt_length :])
    result = logits.astype(np.float64)
    for token, bias in sampling.logit_bias:
        result[token] += bias
    for token in set(sequence.token_ids):
        penalty = sampling.repetition_penalty
        result[token] = result[token] / penalty if result[token] > 0 else result[token] * penalty
    for token, count in counts.items():
        result[token] -= count * sampling.frequency_penalty + sampling.presence_penalty
    excluded = {*sampling.banned_token_ids}
    if sequence.num_generated < sampling.min_tokens:
        excluded |= {*sampling.stop_token_ids}
    if sampling.allowed_token_ids:
        excluded |= {*range(len(logits))} - {*sampling.allowed_token_ids}
    result[sorted(excluded)] = -inf
    return result


def plain_masses(changed: Floats, sequence: WorkerSequence) -> tuple[npt.NDArray[np.int64], Floats]:
    """The tokens that temperature, min-p, top-k and top-p leave, and their masses: by falling likelihood, equal ones by
    rising id; by id alone where nothing is cut."""
    sampling = sequence.sampling
    masses = np.exp((changed - changed.max()) / sampling.temperature)
    if not (sampling.top_k or sampling.min_p or sampling.top_p < 1):
        return np.arange(len(masses)), masses
    order = np.argsort(-changed, kind="stable")
    order = order[masses[order] >= sampling.min_p][: sampling.top_k or None]
    shares = masses[order] / masses[order].sum()
    order = order[shares.cumsum() - shares < sampling.top_p]
    return order, masses[order]


def plain_logprobs(logits: npt.NDArray[np.float32], token_id: int, top: int) -> Logprobs:
    """Returns the logprobs that must be reported of a token chosen after `logits` ([vocab_size])."""
    exact = logits.astype(np.float64) - logits.max()
    exact -= np.log(np.exp(exact).sum())
    likeliest = np.argsort(-logits, kind="stable")[:top]
    rank = 1 + int((logits > logits[token_id]).sum())
    return Logprobs(float(exact[token_id]), rank, likeliest.tolist(), exact[likeliest].tolist())
