"""Choosing for a whole batch: rows that know nothing of each other, the right answer to each, and what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.testing.oracles.choosers import beam, chooser, choosing_sequence, chosen
from octavo.wire.steps import FailureReason
from octavo.worker.sampling.logprobs import token_logprobs
from octavo.worker.sampling.sampler import beam_candidates, broken, choose
from octavo.worker.sequences import Chooser

INF = float("inf")
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 1.3, "top_p": 0.95},
    {"top_k": 500, "top_p": 0.9},
    {"temperature": 5.0, "top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 0.01, "top_k": 30, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.5, "logprobs": 3},
    {"temperature": 3.0, "presence_penalty": 2.0, "frequency_penalty": 1.0, "logprobs": 0},
    {"allowed_token_ids": list(range(100, 900)), "top_k": 20},
    {"banned_token_ids": list(range(1000)), "min_p": 0.1, "logprobs": 20},
    {"logit_bias": [(5, 9.0), (6, 9.0)], "min_tokens": 30, "stop_token_ids": [5, 77], "top_p": 0.6},
    {"logprobs": 7},
]


def random_logits(rows: int, vocab_size: int) -> Tensor:
    return 2 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(3))


def mixed_row(row: int, num_kinds: int) -> Chooser:
    tokens: dict[str, Any] = {"prompt": [row, 3, 4], "generated": [row % 7, 3, 3] * (row % 5), "seed": row}
    kind = row % (num_kinds + 1)
    if kind == num_kinds:
        return beam(1 + row % 4, **tokens, stop_token_ids=[1, 2], frequency_penalty=0.5 * (row % 2))
    return chooser(**tokens, **KINDS[kind], index=row % 3)


def test_a_row_chooses_the_same_alone_as_in_a_batch() -> None:
    logits = random_logits(60, 3000)
    rows = [mixed_row(row, len(KINDS)) for row in range(60)]
    together = choose(logits, rows)
    alone = [choose(logits[i : i + 1], [row]) for i, row in enumerate(rows)]
    assert together.sampled == [token for choices in alone for token in choices.sampled]
    assert together.candidates == [found for choices in alone for found in choices.candidates]
    backwards = choose(logits.flip(0), rows[::-1])
    assert (backwards.sampled[::-1], backwards.candidates[::-1]) == (together.sampled, together.candidates)
    assert (len(together.sampled), len(together.candidates)) == (56, 4)


def test_what_a_row_asks_for_leaves_the_draw_of_the_others() -> None:
    logits = random_logits(len(KINDS), 3000)
    plain = [chooser(seed=row) for row in range(len(KINDS))]
    tokens = chosen(logits, plain)
    for row in range(len(KINDS)):
        others = [other for other in range(len(KINDS)) if other != row]
        changed = chosen(logits, [mixed_row(i, len(KINDS)) if i == row else plain[i] for i in range(len(KINDS))])
        assert [changed[other] for other in others] == [tokens[other] for other in others]


def test_samplers_and_beams_are_answered_in_the_order_of_their_rows() -> None:
    rows = [beam(2, seed=10), chooser(seed=11), beam(1, seed=12), chooser(seed=13, temperature=0.0)]
    logits = random_logits(4, 100)
    choices = choose(logits, rows)
    assert [token.sequence_id for token in choices.sampled] == [11, 13]
    assert choices.sampled[1].token_id == logits[3].argmax()
    assert choices.candidates == beam_candidates(logits[[0, 2]], [rows[0], rows[2]])


def test_logprobs_are_those_of_the_untouched_logits_of_rows_that_want_them() -> None:
    logits = random_logits(4, 200)
    rows = [
        chooser(seed=1, logprobs=4, temperature=0.2, top_k=5),
        chooser(seed=2),
        chooser(seed=3, logprobs=0, banned_token_ids=[int(logits[2].argmax())], repetition_penalty=2.0),
        chooser(seed=4, logprobs=2, logit_bias=[(17, 100.0)]),
    ]
    first, second, third, fourth = choose(logits, rows).sampled
    assert second.logprobs is None
    for row, token, top in ((0, first, 4), (2, third, 0), (3, fourth, 2)):
        assert [token.logprobs] == token_logprobs(logits[row : row + 1], [token.token_id], top)
    assert fourth.token_id == 17
    assert third.logprobs
    assert third.logprobs.rank > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_logits_stay_as_they_are(dtype: torch.dtype) -> None:
    logits = random_logits(30, 1100).to(dtype)
    before = logits.clone()
    choose(logits, [mixed_row(row, len(KINDS)) for row in range(30)])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("bad", [float("nan"), INF])
@pytest.mark.parametrize(
    "middle", [chooser(seed=9), beam(2, seed=9), chooser(seed=9, banned_token_ids=[17], top_p=0.5)]
)
def test_a_row_that_is_not_finite_fails_alone(bad: float, middle: Chooser) -> None:
    logits = random_logits(3, 640)
    first, last = chooser(seed=1, logprobs=3), chooser(seed=3, top_k=4)
    healthy = choose(logits[[0, 2]], [first, last])
    logits[1, 17] = bad
    choices = choose(logits, [first, middle, last])
    assert [(each.sequence_id, each.reason) for each in choices.failed] == [(9, FailureReason.NOT_FINITE)]
    assert "--dtype float32" in choices.failed[0].detail
    assert (choices.sampled, choices.candidates) == (healthy.sampled, [])


def test_a_row_without_any_token_fails() -> None:
    choices = choose(torch.full((2, 8), -INF), [chooser(seed=4), beam(1, seed=5)])
    assert [(each.sequence_id, each.reason) for each in choices.failed] == [
        (4, FailureReason.NOT_FINITE),
        (5, FailureReason.NOT_FINITE),
    ]
    assert (choices.sampled, choices.candidates) == ([], [])


@pytest.mark.parametrize(
    "params",
    [
        {"banned_token_ids": list(range(8))},
        {"allowed_token_ids": [2, 3], "banned_token_ids": [3, 2]},
        {"allowed_token_ids": [2], "stop_token_ids": [2], "min_tokens": 1},
        {"allowed_token_ids": [8]},
        {"allowed_token_ids": [7]},
    ],
)
@pytest.mark.parametrize("drawing", [{"temperature": 0.0}, {"logprobs": 2}, {"top_k": 3, "min_p": 0.1}, {"top_p": 0.5}])
def test_a_sequence_that_excludes_every_token_fails_alone(params: dict[str, Any], drawing: dict[str, Any]) -> None:
    logits = random_logits(4, 8)
    logits[:, 7] = -INF
    others = [chooser(seed=1, repetition_penalty=1.2), beam(1, seed=2, banned_token_ids=[3])]
    healthy = choose(logits[[0, 3]], others)
    stuck = [chooser(seed=8, **params, **drawing), beam(2, seed=9, **params)]
    choices = choose(logits, [others[0], *stuck, others[1]])
    assert [(each.sequence_id, each.reason) for each in choices.failed] == [
        (8, FailureReason.NO_TOKEN_LEFT),
        (9, FailureReason.NO_TOKEN_LEFT),
    ]
    assert "exclude fewer" in choices.failed[0].detail
    assert (choices.sampled, choices.candidates) == (healthy.sampled, healthy.candidates)


def test_hidden_states_that_are_not_finite_break_their_sequence() -> None:
    hidden = torch.zeros(4, 5)
    hidden[1, 4], hidden[3, 0] = float("nan"), -INF
    assert [each.sequence_id for each in broken(hidden, [choosing_sequence(seed=i) for i in range(4)])] == [1, 3]


def test_no_rows_no_choices() -> None:
    choices = choose(torch.empty(0, 100), [])
    assert (choices.sampled, choices.candidates, choices.failed) == ([], [], [])
