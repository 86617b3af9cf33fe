"""150,000 draws against the exact probabilities, by a chi-square test that a bias of 2 % fails."""

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from octavo.testing.depth import deep, deep_unless
from octavo.testing.oracles.choosers import chooser
from octavo.testing.oracles.plain_sampler import plain_logits, plain_masses
from octavo.worker.sampling import draw, rng
from octavo.worker.sampling.logits_processors import process
from octavo.worker.sequences import Chooser

DRAWS, AT_ONCE = 150_000, 5_000
VOCAB_SIZE = 12
# Of 1,000 fair samplers about one has a statistic this many standard deviations above its mean.
DEVIATIONS = 3.6
TOKENS: dict[str, Any] = {"prompt": [1, 2, 3], "generated": [3, 4, 4, 9]}
CASES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "cuts": {"temperature": 1.2, "top_k": 10, "top_p": 0.97, "min_p": 0.01},
    "everything": {
        "temperature": 0.9,
        "top_p": 0.98,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.2,
        "logit_bias": [(7, 1.0), (8, -1.0)],
        "banned_token_ids": [0, 5],
    },
}
LOGITS = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(1))


def draws(example: Chooser) -> Counter[int]:
    """`DRAWS` tokens, each by a key of its own."""
    logits = LOGITS[None].clone()
    process(logits, [example])
    found: Counter[int] = Counter()
    for first in range(0, DRAWS, AT_ONCE):
        rows = [Chooser(example.sequence.fork(0, index)) for index in range(first, first + AT_ONCE)]
        drawn = draw.draw(draw.Rows.of(logits.expand(AT_ONCE, -1), rows), list(range(AT_ONCE)))
        found.update(drawn.tolist())
    return found


def excess(counts: Counter[int], example: Chooser) -> float:
    """Pearson's statistic above its mean, in its standard deviations."""
    tokens, masses = plain_masses(plain_logits(LOGITS.numpy(), example.sequence), example.sequence)
    possible = masses > 0
    tokens, expected = tokens[possible], DRAWS * masses[possible] / masses.sum()
    assert set(counts) <= set(tokens.tolist())
    observed = np.array([counts[int(token)] for token in tokens])
    freedom = len(tokens) - 1
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return (statistic - freedom) / float(np.sqrt(2 * freedom))


@pytest.mark.parametrize("name", deep_unless("everything".__eq__, CASES))
def test_draws_follow_the_distribution(name: str) -> None:
    example = chooser(**TOKENS, **CASES[name], seed=5)
    assert abs(excess(draws(example), example)) < DEVIATIONS


@pytest.mark.parametrize("name", ["cuts", *deep("temperature")])
def test_a_bias_of_two_percent_would_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fair = rng.uniforms

    def biased(*keys: Any) -> npt.NDArray[np.float64]:
        """1.02 times as dense in the lower half as it should be, and 0.98 times in the upper."""
        uniform = fair(*keys)
        return np.where(uniform < 0.51, uniform / 1.02, 1 - (1 - uniform) / 0.98)

    monkeypatch.setattr(draw, "uniforms", biased)
    example = chooser(**TOKENS, **CASES[name], seed=5)
    assert excess(draws(example), example) > DEVIATIONS
