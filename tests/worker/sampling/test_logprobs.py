"""Logprobs, ranks and the likeliest tokens against sorting in fp64."""

from math import inf

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from octavo.wire.sampling import Logprobs
from octavo.worker.sampling import logprobs as module
from octavo.worker.sampling.logprobs import NotFiniteError, log_norms, row_logprobs, token_logprobs

Exact = npt.NDArray[np.float64]


def random_logits(rows: int, vocab_size: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def in_fp64(logits: Tensor) -> Exact:
    exact: Exact = logits.double().numpy()
    norms: Exact = np.log(np.exp(exact).sum(axis=-1, keepdims=True))
    return exact - norms


def log_softmax(logits: Tensor) -> Tensor:
    largest, norm = log_norms(logits)
    return logits - largest - norm


@pytest.mark.parametrize("vocab_size", [1, 7, 256, 1000, 50257])
def test_logprobs_are_the_log_softmax(vocab_size: int) -> None:
    logits = random_logits(5, vocab_size)
    np.testing.assert_allclose(log_softmax(logits).numpy(), in_fp64(logits), rtol=1e-6, atol=2e-6)
    np.testing.assert_allclose(log_softmax(logits).numpy(), logits.log_softmax(-1).numpy(), rtol=1e-6, atol=2e-6)


def test_large_logits_do_not_overflow() -> None:
    [first, second, third] = log_softmax(torch.tensor([[3e38, 3e38, -3e38]]))[0].tolist()
    assert first == second == pytest.approx(-np.log(2))
    assert third == -inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tokens_get_their_logprob_rank_and_the_likeliest(dtype: torch.dtype) -> None:
    logits = random_logits(20, 300).to(dtype)
    token_ids = [row * 13 for row in range(20)]
    exact = in_fp64(logits.float())
    for found, values, token_id in zip(token_logprobs(logits, token_ids, 5), exact, token_ids, strict=True):
        ranked = sorted(range(300), key=lambda token: (-values[token], token))
        assert found.rank == 1 + sum(value > values[token_id] for value in values)
        assert found.logprob == pytest.approx(values[token_id], abs=1e-5)
        assert found.top_token_ids == ranked[:5]
        assert found.top_logprobs == pytest.approx([values[token] for token in ranked[:5]], abs=1e-5)


def test_equals_share_a_rank_and_come_by_rising_id() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, -0.0, 0.0, 2.0, 0.0]])
    [found] = token_logprobs(logits, [6], 5)
    assert found.rank == 4
    assert found.top_token_ids == [1, 2, 5, 0, 3]
    assert token_logprobs(logits, [5], 0)[0].rank == 1


def test_no_likeliest_are_reported_if_none_are_wanted() -> None:
    logits = torch.zeros(2, 4)
    [first, second] = token_logprobs(logits, [1, 2], 0)
    assert first == second == Logprobs(float(np.float32(np.log(0.25))), 1, [], [])


def test_rows_may_want_different_numbers_of_likeliest() -> None:
    logits = random_logits(3, 50)
    assert row_logprobs(logits, [4, 5, 6], [0, 20, 3]) == [
        token_logprobs(logits[i : i + 1], [token], top)[0] for i, (token, top) in enumerate([(4, 0), (5, 20), (6, 3)])
    ]


def test_no_more_likeliest_than_there_are_possible_tokens() -> None:
    logits = torch.tensor([[0.0, -inf, 1.0], [2.0, 1.0, 0.0]])
    found = token_logprobs(logits, [1, 2], 20)
    assert [row.top_token_ids for row in found] == [[2, 0], [0, 1, 2]]
    assert found[0].logprob == -inf
    assert [row.rank for row in found] == [3, 3]


def test_many_rows_get_what_each_gets_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, token_ids = random_logits(33, 777), [row * 23 for row in range(33)]
    together = token_logprobs(logits, token_ids, 4)
    assert together == [token_logprobs(logits[i : i + 1], [token_ids[i]], 4)[0] for i in range(33)]
    monkeypatch.setattr(module, "_ROWS", 10)
    assert token_logprobs(logits, token_ids, 4) == together


@pytest.mark.parametrize("vocab_size", [300, 49152])
def test_a_rank_is_counted_wherever_the_token_stands(vocab_size: int) -> None:
    logits = random_logits(12, vocab_size, seed=8)
    for place in (0, 18, 19, 20, 21, 150, vocab_size - 1):
        token_ids = [row.argsort(descending=True)[place].item() for row in logits]
        assert [found.rank for found in token_logprobs(logits, token_ids, 20)] == [place + 1] * 12


def test_no_rows_no_logprobs() -> None:
    assert token_logprobs(torch.empty(0, 10), [], 3) == []


def test_the_logits_stay_as_they_are() -> None:
    logits = random_logits(3, 40)
    before = logits.clone()
    token_logprobs(logits, [1, 2, 3], 3)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("bad", [float("nan"), inf])
def test_logits_that_are_not_finite_are_refused(bad: float) -> None:
    logits = torch.zeros(3, 8)
    logits[1, 2] = bad
    with pytest.raises(NotFiniteError, match="not finite"):
        token_logprobs(logits, [0, 0, 0], 1)
    with pytest.raises(NotFiniteError, match="not finite"):
        token_logprobs(torch.full((1, 8), -inf), [0], 1)
