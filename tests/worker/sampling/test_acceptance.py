"""Which rows of a draft count, and what a step reports of them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.testing.oracles.choosers import beam, choosing_sequence
from octavo.wire.sampling import Logprobs
from octavo.wire.steps import FailureReason, FurtherTokens, SampledToken
from octavo.worker.sampling import sampler
from octavo.worker.sampling.acceptance import accepted, reports
from octavo.worker.sampling.logprobs import row_logprobs
from octavo.worker.sampling.sampler import choose
from octavo.worker.sequences import Chooser, WorkerSequence

INF = float("inf")


def rows_of(sequence: WorkerSequence, *draft: int) -> list[Chooser]:
    return [Chooser(sequence, list(draft), num_drafted) for num_drafted in range(len(draft) + 1)]


@pytest.mark.parametrize(
    ("chosen", "counting"),
    [
        ([7, 8, 9, 1], [0, 1, 2, 3]),
        ([7, 8, 4, 1], [0, 1, 2]),
        ([7, 3, 9, 1], [0, 1]),
        ([2, 8, 9, 1], [0]),
        ([2, 7, 8, 9], [0]),
    ],
)
def test_rows_count_up_to_the_first_that_draws_another_token(chosen: list[int], counting: list[int]) -> None:
    choosers = rows_of(choosing_sequence(), 7, 8, 9)
    assert accepted(choosers, chosen, range(4)) == counting


@pytest.mark.parametrize(("impossible", "counting"), [(0, []), (1, [0]), (2, [0, 1]), (3, [0, 1, 2])])
def test_no_row_counts_that_could_not_choose_and_none_after_it(impossible: int, counting: list[int]) -> None:
    choosers = rows_of(choosing_sequence(), 7, 8, 9)
    assert accepted(choosers, [7, 8, 9, 1], {0, 1, 2, 3} - {impossible}) == counting


def test_sequences_are_told_apart() -> None:
    """A draft that is right to its end, one that begins with what the row of another has drawn, one without."""
    first, second, third = (choosing_sequence(seed=seed) for seed in (1, 2, 3))
    choosers = [*rows_of(first, 5), *rows_of(second, 6, 6), Chooser(third)]
    counting = accepted(choosers, [5, 6, 4, 6, 6, 3], range(6))
    assert counting == [0, 1, 2, 5]
    logprobs = {row: Logprobs(-float(row), 1, [], []) for row in (0, 1)}
    sampled, further = reports(choosers, counting, [5, 6, 4, 6, 6, 3], logprobs)
    assert sampled == [SampledToken(1, 5, logprobs[0]), SampledToken(2, 4), SampledToken(3, 3)]
    assert further == [FurtherTokens(1, [6], [logprobs[1]])]


def test_logprobs_are_computed_for_tokens_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.full((5, 10), -1.0)
    for row, token in enumerate([7, 8, 1, 9, 3]):
        logits[row, token] = 4.0
    computed: list[int] = []

    def watched(logits: Tensor, token_ids: list[int], tops: list[int]) -> list[Logprobs]:
        computed.extend(token_ids)
        return row_logprobs(logits, token_ids, tops)

    monkeypatch.setattr(sampler, "row_logprobs", watched)
    wanting = choosing_sequence(seed=1, temperature=0.0, logprobs=0)
    choices = choose(logits, [*rows_of(wanting, 7, 8, 9), Chooser(choosing_sequence(seed=2, temperature=0.0))])
    assert computed == [7, 8, 1]
    [more] = choices.further
    assert (choices.sampled[0].token_id, more.token_ids, len(more.logprobs)) == (7, [8, 1], 2)


@pytest.mark.parametrize("broken", [float("nan"), INF, -INF])
@pytest.mark.parametrize("row", [1, 2])
def test_a_guess_that_breaks_the_model_fails_nobody(broken: float, row: int) -> None:
    """The sequence fails if what it has itself does."""
    logits = torch.zeros(3, 10)
    logits[0, 4] = logits[1, 5] = logits[2, 6] = 1.0
    logits[row] = broken
    choosers = rows_of(choosing_sequence(temperature=0.0), 4, 5)
    choices = choose(logits, choosers)
    assert choices.failed == []
    assert [token.token_id for token in choices.sampled] == [4]
    assert [each.token_ids for each in choices.further] == [[5]][: row - 1]
    [failure] = choose(logits.roll(-row, 0), choosers).failed
    assert failure.reason is FailureReason.NOT_FINITE


def test_a_guess_that_leaves_no_token_fails_nobody() -> None:
    """Before the fewest tokens asked for, the only allowed one is excluded; after them it may come."""
    params: dict[str, Any] = {
        "temperature": 0.0,
        "allowed_token_ids": [3, 4],
        "stop_token_ids": [4],
        "banned_token_ids": [3],
    }
    logits = torch.zeros(3, 10)
    early = choose(logits, rows_of(choosing_sequence(min_tokens=0, **params), 4, 4))
    assert (early.failed, early.sampled[0].token_id, early.further[0].token_ids) == ([], 4, [4, 4])
    [failure] = choose(logits, rows_of(choosing_sequence(min_tokens=1, **params), 4, 4)).failed
    assert failure.reason is FailureReason.NO_TOKEN_LEFT


def test_each_row_of_a_draft_chooses_as_if_the_draft_had_been_generated() -> None:
    """With every rule that looks at what was generated, or at how much."""
    generator = torch.Generator().manual_seed(3)
    features: dict[str, Any] = {
        "temperature": 1.3,
        "repetition_penalty": 1.4,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.9,
        "min_tokens": 4,
        "stop_token_ids": list(range(5)),
        "logprobs": 1,
    }
    for seed in range(30):
        logits = torch.randn(7, 12, generator=generator)
        told: list[int] = []
        plain = []
        for row in range(7):
            sequence = choosing_sequence(prompt=[1, 2], generated=[3, *told], seed=seed, **features)
            [token] = choose(logits[row : row + 1], [Chooser(sequence)]).sampled
            plain.append((token.token_id, token.logprobs))
            told.append(token.token_id)
        drafted = choosing_sequence(prompt=[1, 2], generated=[3], seed=seed, **features)
        beside = beam(2, seed=99)
        choices = choose(torch.cat((logits[:1], logits)), [beside, *rows_of(drafted, *told[:6])])
        [first], [more] = choices.sampled, choices.further
        assert [(first.token_id, first.logprobs), *zip(more.token_ids, more.logprobs, strict=True)] == plain
        assert len(choices.candidates) == 1
