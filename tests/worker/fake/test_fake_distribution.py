"""The fake's opinion of a history is a distribution: every token has one rank, and logprobs fall with it."""

import hashlib
import math
from typing import Any

import pytest

from octavo.testing.oracles.worker_plans import sampling
from octavo.worker.fake.distribution import FakeDistribution, settings_digest


def distribution(
    number: int, size: int = 9, eos: tuple[int, ...] = (), eos_probability: float = 0.0
) -> FakeDistribution:
    return FakeDistribution.of(
        hashlib.blake2b(number.to_bytes(4, "big"), digest_size=16).digest(), size, eos, eos_probability
    )


@pytest.mark.parametrize(
    ("size", "eos", "eos_probability"),
    [(1, (), 0.0), (9, (), 0.0), (2, (0,), 0.0), (2, (0,), 1.0), (12, (0, 5, 11), 0.5), (30, (29,), 0.5)],
)
def test_ranks_are_an_order_of_the_whole_vocabulary(size: int, eos: tuple[int, ...], eos_probability: float) -> None:
    for number in range(20):
        opinion = distribution(number, size, eos, eos_probability)
        ranked = [opinion.token(rank) for rank in range(1, size + 1)]
        assert sorted(ranked) == list(range(size))
        assert [opinion.rank(token) for token in ranked] == list(range(1, size + 1))


def test_logprobs_fall_and_are_those_of_a_distribution() -> None:
    for number in range(20):
        opinion = distribution(number, size=400)
        logprobs = [opinion.logprob(opinion.token(rank)) for rank in range(1, 401)]
        assert logprobs == sorted(logprobs, reverse=True)
        assert len(set(logprobs)) == 400
        assert math.fsum(map(math.exp, logprobs)) == pytest.approx(1)


def test_eos_comes_first_if_it_is_drawn_and_else_after_all_others() -> None:
    assert distribution(1, 9, (2, 4), 1.0).token(1) == 2
    assert distribution(1, 9, (2, 4), 1.0).rank(4) == 9
    assert [distribution(1, 9, (2, 4), 0.0).rank(token) for token in (2, 4)] == [8, 9]


def test_what_is_reported_of_a_token_agrees_with_its_rank() -> None:
    opinion = distribution(5, size=9)
    third = opinion.token(3)
    report = opinion.logprobs(third, 2)
    assert (report.rank, report.logprob) == (3, opinion.logprob(third))
    assert report.top_token_ids == [opinion.token(1), opinion.token(2)]
    assert report.top_logprobs[0] > report.top_logprobs[1] > report.logprob
    assert opinion.logprobs(third, 0).top_token_ids == []
    assert len(opinion.logprobs(third, 20).top_token_ids) == 9


def test_only_what_is_permitted_is_offered_in_its_order() -> None:
    opinion = distribution(3, size=9)
    ranked = [opinion.token(rank) for rank in range(1, 10)]
    assert opinion.permitted(sampling(), 0, 4) == ranked[:4]
    banned = sampling(banned_token_ids=[ranked[0], ranked[2]])
    assert opinion.permitted(banned, 0, 3) == [ranked[1], ranked[3], ranked[4]]
    allowed = sampling(allowed_token_ids=[ranked[7], 400, ranked[4], ranked[7]])
    assert opinion.permitted(allowed, 0, 5) == [ranked[4], ranked[7]]


def test_no_stop_token_is_permitted_before_the_least_number_of_tokens() -> None:
    opinion = distribution(3, size=9)
    patient = sampling(min_tokens=4, stop_token_ids=[opinion.token(1)])
    assert opinion.permitted(patient, 3, 1) == [opinion.token(2)]
    assert opinion.permitted(patient, 4, 1) == [opinion.token(1)]


def test_nothing_left_to_choose_is_an_error() -> None:
    with pytest.raises(ValueError, match="every token is excluded"):
        distribution(3, size=3).permitted(sampling(banned_token_ids=[0, 1, 2]), 0, 1)


SHAPING: list[dict[str, Any]] = [
    {"repetition_penalty": 1.1},
    {"presence_penalty": 0.5},
    {"frequency_penalty": 0.5},
    {"logit_bias": [(3, 1.0)]},
    {"logit_bias": [(3, 2.0)]},
    {"logit_bias": [(4, 1.0)]},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.1},
]


def test_every_setting_that_shapes_a_choice_leaves_a_trace_of_its_own() -> None:
    traces = {settings_digest(sampling(**shaping), drawn=True) for shaping in SHAPING}
    assert len(traces) == len(SHAPING)
    assert settings_digest(sampling(temperature=1.0, seed=7, max_tokens=3), drawn=True) == b""


@pytest.mark.parametrize("shaping", SHAPING[6:])
def test_a_greedy_choice_knows_no_setting_of_a_drawn_one(shaping: dict[str, Any]) -> None:
    assert settings_digest(sampling(**shaping), drawn=False) == b""


def test_equal_settings_leave_one_trace_however_their_numbers_are_written() -> None:
    assert settings_digest(sampling(presence_penalty=1), drawn=False) == settings_digest(
        sampling(presence_penalty=1.0), drawn=False
    )
