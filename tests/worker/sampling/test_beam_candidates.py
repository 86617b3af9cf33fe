"""The candidates of beams against log_softmax and sorting, and against transformers' processors."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from octavo.testing.oracles.choosers import beam
from octavo.worker.sampling.sampler import beam_candidates
from octavo.worker.sequences import Chooser


def random_logits(rows: int, vocab_size: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def assert_are_likeliest(scores: Tensor, token_ids: list[int], logprobs: list[float], count: int) -> None:
    """Of `scores` ([vocab_size]), by sorting, the `count` largest that are not -inf."""
    finite = [token for token in range(len(scores)) if scores[token] > float("-inf")]
    assert token_ids == sorted(finite, key=lambda token: (-float(scores[token]), token))[:count]
    assert logprobs == pytest.approx(scores[token_ids].tolist(), abs=1e-5)


@pytest.mark.parametrize(("width", "stops", "count"), [(1, [], 2), (3, [7], 6), (4, [7, 8], 12), (16, [1, 2, 3], 64)])
def test_there_are_enough_candidates_for_every_beam_to_go_on(width: int, stops: list[int], count: int) -> None:
    logits = random_logits(1, 300)
    [found] = beam_candidates(logits, [beam(width, stop_token_ids=stops, seed=9)])
    assert found.sequence_id == 9
    assert len(found.token_ids) == count
    assert_are_likeliest(logits[0].log_softmax(-1), found.token_ids, found.logprobs, count)


def test_there_are_no_more_candidates_than_tokens() -> None:
    [found] = beam_candidates(torch.tensor([[1.0, 3.0, 2.0]]), [beam(16)])
    assert found.token_ids == [1, 2, 0]


def test_equal_candidates_come_by_rising_id() -> None:
    [found] = beam_candidates(torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0, 0.0]]), [beam(2)])
    assert found.token_ids == [1, 3, 0, 2]


def test_excluded_tokens_are_left_out() -> None:
    logits = random_logits(1, 20)
    excluding = beam(
        8, allowed_token_ids=[3, 4, 5, 6, 7], banned_token_ids=[4], min_tokens=1, stop_token_ids=[5], seed=2
    )
    [found] = beam_candidates(logits, [excluding])
    assert set(found.token_ids) == {3, 6, 7}
    assert_are_likeliest(logits[0, found.token_ids] - logits[0].logsumexp(-1), [0, 1, 2], found.logprobs, 3)


def test_temperature_and_cuts_change_nothing() -> None:
    logits = random_logits(1, 50)
    plain = beam_candidates(logits, [beam(3)])
    assert beam_candidates(logits, [beam(3, temperature=0.3, top_k=1, top_p=0.1, min_p=0.9)]) == plain


def test_processors_change_log_probabilities_as_those_of_transformers_do() -> None:
    logits = random_logits(1, 80)
    prompt, generated = [1, 2, 3, 4, 2], [5, 6, 5]
    params: dict[str, Any] = {
        "repetition_penalty": 1.4,
        "logit_bias": [(9, 2.0), (5, -1.0), (70, 4.0)],
        "banned_token_ids": [30, 31],
        "min_tokens": 4,
        "stop_token_ids": [6, 11],
    }
    input_ids = torch.tensor([prompt + generated])
    scores = logits.log_softmax(-1)
    for processor in (
        SequenceBiasLogitsProcessor([[[token], bias] for token, bias in params["logit_bias"]]),
        MinNewTokensLengthLogitsProcessor(len(prompt), 4, params["stop_token_ids"], device="cpu"),
        SuppressTokensLogitsProcessor(params["banned_token_ids"], device="cpu"),
        RepetitionPenaltyLogitsProcessor(1.4),
    ):
        scores = processor(input_ids, scores)
    [found] = beam_candidates(logits, [beam(4, prompt=prompt, generated=generated, **params)])
    assert_are_likeliest(scores[0], found.token_ids, found.logprobs, 12)


def test_beams_in_one_batch_get_what_each_gets_alone() -> None:
    kinds: list[dict[str, Any]] = [
        {"width": 1},
        {"width": 5, "repetition_penalty": 1.2},
        {"width": 3, "stop_token_ids": [4, 5, 6], "min_tokens": 8},
        {"width": 16, "banned_token_ids": [1, 2], "logit_bias": [(7, 3.0)]},
        {"width": 2, "presence_penalty": 1.0, "frequency_penalty": -0.5},
    ]
    logits = random_logits(20, 500)
    beams: list[Chooser] = [beam(**kinds[i % 5], prompt=[1, i], generated=[3, i, i], seed=i) for i in range(20)]
    alone = [beam_candidates(logits[i : i + 1], [beams[i]])[0] for i in range(20)]
    assert beam_candidates(logits, beams) == alone
    assert beam_candidates(logits.flip(0), beams[::-1]) == alone[::-1]
