"""Sampling: exact cuts, true probabilities, and rows that know nothing of each other."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.wire.sampling import SamplingParams
from octavo.worker import sampler
from octavo.worker.sampler import SamplingError, sample
from octavo.worker.sequences import WorkerSequence


def sequence(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 1, index: int = 0, generated: int = 0
) -> WorkerSequence:
    sampling = SamplingParams(temperature, top_k, top_p, seed, 64, [])
    return WorkerSequence(seed, index, sampling, 1, [0] * (1 + generated), 0, [])


def drawn(logits: Tensor, count: int, **params: float) -> Counter[int]:
    """Tokens that `count` different positions of one sequence draw from `logits` ([vocab_size])."""
    rows = [sequence(**params, generated=position) for position in range(count)]  # type: ignore[arg-type]
    return Counter(sample(logits.expand(count, -1), rows))


def allowed(logits: Tensor, top_k: int, top_p: float) -> set[int]:
    """By sorting everything: the first `top_k`, and of those the fewest whose share of their mass reaches `top_p`."""
    ranked = sorted(range(len(logits)), key=lambda token: (-float(logits[token]), token))[: top_k or None]
    masses = np.exp(np.array([float(logits[token]) for token in ranked], dtype=np.float64))
    before = np.concatenate(([0.0], np.cumsum(masses)[:-1])) / masses.sum()
    return {token for token, mass in zip(ranked, before, strict=True) if mass < top_p}


def assert_follows(counts: Counter[int], probabilities: dict[int, float]) -> None:
    """Chi-square within four standard deviations; nothing outside `probabilities` was drawn."""
    total = counts.total()
    assert set(counts) <= set(probabilities)
    statistic = sum((counts[t] - p * total) ** 2 / (p * total) for t, p in probabilities.items())
    freedom = len(probabilities) - 1
    assert abs(statistic - freedom) < 4 * (2 * freedom) ** 0.5


def softmax(logits: Tensor, tokens: set[int], temperature: float = 1.0) -> dict[int, float]:
    masses = {token: float(np.exp(float(logits[token]) / temperature)) for token in tokens}
    return {token: mass / sum(masses.values()) for token, mass in masses.items()}


def test_temperature_zero_takes_the_likeliest_and_the_lowest_id_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, -1.0], [5.0, 0.0, 0.0, 5.0]])
    assert sample(logits, [sequence(temperature=0.0)] * 2) == [1, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_follow_the_softmax(temperature: float) -> None:
    logits = 0.5 * torch.randn(300, generator=torch.Generator().manual_seed(1))
    expected = softmax(logits, set(range(300)), temperature)
    assert_follows(drawn(logits, 6000, temperature=temperature), expected)


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (0, 0.6), (30, 0.5), (300, 0.9), (1, 1.0)])
def test_tokens_follow_the_softmax_of_what_the_cuts_leave(top_k: int, top_p: float) -> None:
    logits = torch.randn(400, generator=torch.Generator().manual_seed(2))
    expected = softmax(logits, allowed(logits, top_k, top_p))
    counts = drawn(logits, 5000, top_k=top_k, top_p=top_p)
    if len(expected) == 1:
        assert set(counts) == set(expected)
    else:
        assert_follows(counts, expected)


@pytest.mark.parametrize("candidates", [(256, 4096), (1,), (2, 3), ()])
@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 0.8), (0, 0.999), (6, 0.7), (2, 0.1)])
def test_the_cut_is_exact_however_few_candidates_are_tried_first(
    top_k: int, top_p: float, candidates: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "_CANDIDATES", candidates)
    # Equal logits straddle every cut: the lower ids must win.
    logits = torch.tensor([1.0, 2.0, 2.0, 1.0, 1.0, 2.0, 0.0, 1.0, 0.0, 2.0])
    assert set(drawn(logits, 1500, top_k=top_k, top_p=top_p)) == allowed(logits, top_k, top_p)


def test_a_flat_distribution_needs_and_gets_the_whole_vocabulary() -> None:
    logits = torch.zeros(4500)
    counts = drawn(logits, 1000, top_p=0.98)
    assert len(counts) > 800
    assert 4096 < max(counts) < 4410


def test_top_k_beyond_the_vocabulary_is_off() -> None:
    logits = torch.randn(50)
    assert drawn(logits, 200, top_k=2**31 - 1) == drawn(logits, 200, top_k=50)


def test_a_row_draws_the_same_alone_as_in_a_batch() -> None:
    logits = 2 * torch.randn(40, 3000, generator=torch.Generator().manual_seed(3))
    kinds = [(0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 40, 1.0), (1.3, 0, 0.95), (1.0, 500, 0.9), (5.0, 0, 0.999)]
    rows = [sequence(*kinds[i % len(kinds)], seed=i, index=i % 3, generated=i) for i in range(40)]
    together = sample(logits, rows)
    assert together == [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert together == sample(logits.flip(0), rows[::-1])[::-1]


def test_seed_index_and_position_each_change_the_draw() -> None:
    logits = torch.zeros(3, 10_000)
    for rows in (
        [sequence(seed=1), sequence(seed=2), sequence(seed=1 << 40)],
        [sequence(index=0), sequence(index=1), sequence(index=2)],
        [sequence(generated=0), sequence(generated=1), sequence(generated=2)],
    ):
        tokens = sample(logits, rows)
        assert len(set(tokens)) == 3
        assert tokens == sample(logits, rows)


def test_a_tiny_temperature_is_nearly_greedy_and_never_fails() -> None:
    logits = torch.randn(4, 100)
    rows = [sequence(temperature=t) for t in (1e-300, 1e-40, 1e-20, 1e-3)]
    assert sample(logits, rows) == logits.argmax(dim=-1).tolist()


def test_tokens_ruled_out_are_never_drawn() -> None:
    logits = torch.full((1000,), float("-inf"))
    logits[[3, 999]] = 0.0
    for params in ({}, {"top_p": 0.999}, {"top_k": 10}):
        assert set(drawn(logits, 200, **params)) == {3, 999}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_refused_by_sequence(bad: float) -> None:
    logits = torch.zeros(3, 64)
    logits[1, 17] = bad
    with pytest.raises(SamplingError, match=r"not finite for sequences 0xbeef;"):
        sample(logits, [sequence(), sequence(seed=0xBEEF), sequence(temperature=0.0)])


def test_a_row_without_any_token_is_refused() -> None:
    with pytest.raises(SamplingError):
        sample(torch.full((1, 8), float("-inf")), [sequence()])


def test_no_rows_no_tokens() -> None:
    assert sample(torch.empty(0, 100), []) == []


def test_likelier_tokens_are_ranked_first_and_equals_by_id() -> None:
    values, tokens = sampler._ranked(torch.tensor([[0.0, 1.0, 0.0, 1.0, 2.0]]), 5)
    assert tokens.tolist() == [[4, 1, 3, 0, 2]]
    assert all(a >= b for a, b in pairwise(values[0].tolist()))
