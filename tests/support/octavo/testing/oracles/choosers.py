"""Sequences that choose a token, slow references of what they may choose, and the chi-square of what they chose."""

from collections import Counter
from typing import Any

import numpy as np
from torch import Tensor

from octavo.wire.sampling import BeamSearch, EarlyStopping, SamplingParams
from octavo.worker.sampling.sampler import choose
from octavo.worker.sequences import Chooser, WorkerSequence


def chooser(**settings: Any) -> Chooser:
    """Makes a chooser of `choosing_sequence`."""
    return Chooser(choosing_sequence(**settings))


def choosing_sequence(
    *, prompt: list[int] | None = None, generated: list[int] | None = None, index: int = 0, **params: Any
) -> WorkerSequence:
    """A sequence at temperature 1 with seed 1, also its id, unless `params` (of `SamplingParams`) say otherwise."""
    sampling = SamplingParams(**{"temperature": 1.0, "seed": 1, "max_tokens": 64} | params)
    prompt_ids, generated_ids = prompt or [0], generated or []
    return WorkerSequence(
        sampling.seed, index, sampling, len(prompt_ids), prompt_ids + generated_ids, len(prompt_ids), [[]]
    )


def beam(width: int, **params: Any) -> Chooser:
    """Makes one beam of a search with `width` of them."""
    return chooser(**params | {"beam": BeamSearch(width, 1.0, EarlyStopping.ON)})


def chosen(logits: Tensor, choosers: list[Chooser]) -> list[int]:
    """Returns the token ids that `choosers`, none of them beams, sample."""
    return [token.token_id for token in choose(logits, choosers).sampled]


def drawn(logits: Tensor, count: int, **params: Any) -> Counter[int]:
    """Counts the tokens that `count` seeds draw from `logits` ([vocab_size])."""
    return Counter(chosen(logits.expand(count, -1), [chooser(**params, seed=seed) for seed in range(count)]))


def softmax(logits: Tensor, tokens: set[int], temperature: float = 1.0) -> dict[int, float]:
    masses = {token: float(np.exp(float(logits[token]) / temperature)) for token in tokens}
    return {token: mass / sum(masses.values()) for token, mass in masses.items()}


def assert_follows(counts: Counter[int], probabilities: dict[int, float]) -> None:
    """Chi-square within four standard deviations; nothing outside `probabilities` was drawn."""
    total = counts.total()
    assert set(counts) <= set(probabilities)
    statistic = sum((counts[t] - p * total) ** 2 / (p * total) for t, p in probabilities.items())
    freedom = len(probabilities) - 1
    assert abs(statistic - freedom) < 4 * (2 * freedom) ** 0.5
