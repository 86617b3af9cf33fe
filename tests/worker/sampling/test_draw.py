"""Drawing a token: exact cuts and true probabilities."""

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.testing.depth import every_row
from octavo.testing.oracles.choosers import assert_follows, chooser, chosen, drawn, softmax
from octavo.worker.sampling import draw


def allowed(logits: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
    """By sorting everything: those with `min_p` of the largest probability, the first `top_k` of them, and of those the
    fewest whose share of their mass reaches `top_p`."""
    ranked = sorted(range(len(logits)), key=lambda token: (-float(logits[token]), token))
    least = min_p * np.exp(float(logits.max()))
    ranked = [token for token in ranked if np.exp(float(logits[token])) >= least][: top_k or None]
    masses = np.exp(np.array([float(logits[token]) for token in ranked], dtype=np.float64))
    before = np.concatenate(([0.0], np.cumsum(masses)[:-1])) / masses.sum()
    return {token for token, mass in zip(ranked, before, strict=True) if mass < top_p}


def test_temperature_zero_takes_the_likeliest_and_the_lowest_id_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, -1.0], [5.0, 0.0, 0.0, 5.0]])
    assert chosen(logits, [chooser(temperature=0.0)] * 2) == [1, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_follow_the_softmax(temperature: float) -> None:
    logits = 0.5 * torch.randn(300, generator=torch.Generator().manual_seed(1))
    expected = softmax(logits, set(range(300)), temperature)
    assert_follows(drawn(logits, 6000, temperature=temperature), expected)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    every_row(
        3,
        [
            (5, 1.0, 0.0),
            (30, 0.5, 0.0),
            (300, 0.9, 0.0),
            (0, 0.6, 0.0),
            (1, 1.0, 0.0),
            (0, 1.0, 1.0),
            (0, 1.0, 0.2),
            (0, 0.7, 0.1),
            (25, 1.0, 0.05),
            (20, 0.8, 0.15),
        ],
    ),
)
def test_tokens_follow_the_softmax_of_what_the_cuts_leave(top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(400, generator=torch.Generator().manual_seed(2))
    expected = softmax(logits, allowed(logits, top_k, top_p, min_p))
    counts = drawn(logits, 5000, top_k=top_k, top_p=top_p, min_p=min_p)
    if len(expected) == 1:
        assert set(counts) == set(expected)
    else:
        assert_follows(counts, expected)


def test_min_p_looks_at_the_probabilities_that_the_temperature_gives() -> None:
    logits = torch.randn(200, generator=torch.Generator().manual_seed(5))
    left = {temperature: allowed(logits / temperature, min_p=0.2) for temperature in (0.5, 1.0, 2.0)}
    assert len(left[0.5]) < len(left[1.0]) < len(left[2.0])
    for temperature, tokens in left.items():
        counts = drawn(logits, 3000, temperature=temperature, min_p=0.2)
        assert_follows(counts, softmax(logits, tokens, temperature))


def test_min_p_one_leaves_the_likeliest_and_its_equals() -> None:
    logits = torch.tensor([1.0, 4.0, 3.999, 4.0, -2.0])
    assert set(drawn(logits, 100, min_p=1.0)) == {1, 3}


@pytest.mark.parametrize("candidates", [64, 3, 2, 1])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (3, 1.0, 0.0),
        (0, 0.8, 0.0),
        (0, 0.999, 0.0),
        (6, 0.7, 0.0),
        (2, 0.1, 0.0),
        (0, 0.7, 0.3),
        (7, 1.0, 0.9),
        (3, 0.9, 0.1),
    ],
)
def test_the_cut_is_exact_however_few_candidates_are_tried_first(
    top_k: int, top_p: float, min_p: float, candidates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draw, "_CANDIDATES", candidates)
    # Equal logits straddle every cut: the lower ids must win.
    logits = torch.tensor([1.0, 2.0, 2.0, 1.0, 1.0, 2.0, 0.0, 1.0, 0.0, 2.0])
    assert set(drawn(logits, 500, top_k=top_k, top_p=top_p, min_p=min_p)) == allowed(logits, top_k, top_p, min_p)


def test_a_flat_distribution_needs_and_gets_the_whole_vocabulary() -> None:
    logits = torch.zeros(4500)
    counts = drawn(logits, 1000, top_p=0.98)
    assert len(counts) > 800
    assert 4096 < max(counts) < 4410


def test_top_k_beyond_the_vocabulary_is_off() -> None:
    logits = torch.randn(50)
    assert drawn(logits, 200, top_k=2**31 - 1) == drawn(logits, 200, top_k=50)


def test_seed_index_and_position_each_change_the_draw() -> None:
    logits = torch.zeros(3, 10_000)
    for rows in (
        [chooser(seed=1), chooser(seed=2), chooser(seed=1 << 40)],
        [chooser(index=0), chooser(index=1), chooser(index=2)],
        [chooser(generated=[]), chooser(generated=[4]), chooser(generated=[4, 4])],
    ):
        tokens = chosen(logits, rows)
        assert len(set(tokens)) == 3
        assert tokens == chosen(logits, rows)


def test_a_tiny_temperature_is_nearly_greedy_and_never_fails() -> None:
    logits = torch.randn(4, 100)
    rows = [chooser(temperature=t) for t in (1e-300, 1e-40, 1e-20, 1e-3)]
    assert chosen(logits, rows) == logits.argmax(dim=-1).tolist()


def test_tokens_ruled_out_are_never_drawn() -> None:
    logits = torch.full((1000,), float("-inf"))
    logits[[3, 999]] = 0.0
    for params in ({}, {"top_p": 0.999}, {"top_k": 10}, {"min_p": 1e-300}):
        assert set(drawn(logits, 200, **params)) == {3, 999}


@pytest.mark.parametrize("params", [{"top_k": 10}, {"top_k": 100, "top_p": 0.9}, {"top_p": 0.999}, {"min_p": 1e-300}])
def test_a_row_that_is_left_few_tokens_is_not_looked_through(
    params: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draw, "pick_ranked", None)
    logits = torch.full((1000,), float("-inf"))
    logits[[3, 999]] = torch.tensor([0.0, 0.5])
    assert set(drawn(logits, 200, **params)) == {3, 999}


@pytest.mark.parametrize("params", [{"top_k": 300}, {"top_p": 0.9}, {"min_p": 0.001}, {"top_p": 0.9, "min_p": 0.01}])
def test_how_many_candidates_are_tried_first_does_not_show(
    params: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(6))
    found = []
    for candidates in (1, 64, 2000, 3000):
        monkeypatch.setattr(draw, "_CANDIDATES", candidates)
        found.append(drawn(logits, 60, **params))
    assert all(counts == found[0] for counts in found)
