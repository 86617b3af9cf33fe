"""Choosing under grammars: only what they allow, by all the other rules as before, and nobody's neighbour notices."""

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.testbed.tiny_model import END_TOKEN_ID, VOCAB_SIZE, write_byte_model
from octavo.testing.oracles.choosers import beam, chooser, choosing_sequence
from octavo.testing.small.constraints import DIGITS, WORDS, compiled, ids_of_mask
from octavo.wire.steps import FailureReason
from octavo.worker.sampling import grammar_masks
from octavo.worker.sampling.grammar_masks import NO_MASKS, masks_of
from octavo.worker.sampling.grammars import Grammars
from octavo.worker.sampling.logprobs import token_logprobs
from octavo.worker.sampling.sampler import Choices, choose
from octavo.worker.sequences import Chooser

INF = float("inf")


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    directory = tmp_path_factory.mktemp("model")
    write_byte_model(directory)
    return Grammars(directory)


@pytest.fixture(scope="module")
def digits(grammars: Grammars) -> str:
    return compiled(DIGITS, grammars.vocabulary)


def random_logits(rows: int, vocab_size: int = VOCAB_SIZE) -> Tensor:
    return 3 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(7))


def chosen(logits: Tensor, rows: list[Chooser], grammars: Grammars) -> Choices:
    return choose(logits, rows, masks_of(rows, grammars))


def tokens(grammars: Grammars, text: str) -> list[int]:
    return grammars.vocabulary.tokenize_str(text)


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 50.0},
    {"top_k": 1},
    {"top_p": 0.01},
    {"min_p": 0.9},
    {"temperature": 5.0, "repetition_penalty": 2.0, "presence_penalty": -2.0, "frequency_penalty": -2.0},
    {"logit_bias": [(0, 100.0), (40, 100.0)]},
    {"banned_token_ids": [16, 17, 18]},
]


@pytest.mark.parametrize("params", KINDS)
@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 300, 200])
def test_what_is_chosen_is_allowed(params: dict[str, Any], vocab_size: int, grammars: Grammars, digits: str) -> None:
    """Whether the model has more logits than its tokenizer has tokens, or fewer."""
    rows = [chooser(**params | {"seed": seed, "grammar": digits}) for seed in range(20)]
    allowed = ids_of_mask(grammars.allowed(rows[0].sequence))
    choices = chosen(random_logits(20, vocab_size), rows, grammars)
    assert {token.token_id for token in choices.sampled} <= allowed
    assert len(choices.sampled) == 20


def test_among_what_is_allowed_the_choice_is_as_ever(grammars: Grammars, digits: str) -> None:
    logits = random_logits(12)
    rows = [chooser(seed=seed, grammar=digits, top_k=5, repetition_penalty=1.3) for seed in range(12)]
    allowed = sorted(ids_of_mask(grammars.allowed(rows[0].sequence)))
    others = [chooser(seed=seed, allowed_token_ids=allowed, top_k=5, repetition_penalty=1.3) for seed in range(12)]
    assert chosen(logits, rows, grammars).sampled == choose(logits, others).sampled


def test_neighbours_choose_as_without(grammars: Grammars, digits: str) -> None:
    logits = random_logits(6)
    free = [chooser(seed=1), chooser(seed=2, banned_token_ids=[5], top_p=0.7), beam(2, seed=3, frequency_penalty=1.0)]
    bound = [chooser(seed=11, grammar=digits), beam(2, seed=12, grammar=digits), chooser(seed=13, temperature=0.0)]
    mixed = [each for pair in zip(free, bound, strict=True) for each in pair]
    together, alone = chosen(logits, mixed, grammars), choose(logits[::2], free)
    ids = {each.sequence_id for each in free}
    assert [each for each in together.sampled if each.sequence_id in ids] == alone.sampled
    assert [each for each in together.candidates if each.sequence_id in ids] == alone.candidates


def test_a_row_chooses_the_same_alone_as_in_a_batch(grammars: Grammars, digits: str) -> None:
    words = compiled(WORDS, grammars.vocabulary)
    rows = [
        *(chooser(seed=seed, grammar=digits, generated=tokens(grammars, "12")[: seed % 3]) for seed in range(6)),
        *(chooser(seed=seed, grammar=words, generated=tokens(grammars, "maybe")[: seed % 6]) for seed in range(6, 12)),
        *(beam(2, seed=seed, grammar=words) for seed in range(12, 14)),
    ]
    logits = random_logits(len(rows))
    together = chosen(logits, rows, grammars)
    alone = [chosen(logits[i : i + 1], [row], grammars) for i, row in enumerate(rows)]
    assert together.sampled == [token for choices in alone for token in choices.sampled]
    assert together.candidates == [found for choices in alone for found in choices.candidates]


def test_logprobs_are_of_the_untouched_distribution(grammars: Grammars, digits: str) -> None:
    logits = random_logits(1)
    [token] = chosen(logits, [chooser(grammar=digits, logprobs=4)], grammars).sampled
    assert [token.logprobs] == token_logprobs(logits, [token.token_id], 4)
    assert token.logprobs is not None
    assert not set(token.logprobs.top_token_ids) <= ids_of_mask(grammars.allowed(choosing_sequence(grammar=digits)))


def test_candidates_of_beams_are_what_may_come_with_their_own_logprobs(grammars: Grammars, digits: str) -> None:
    logits = random_logits(1)
    bound = beam(8, grammar=digits, generated=tokens(grammars, "1"), stop_token_ids=[END_TOKEN_ID])
    [found] = chosen(logits, [bound], grammars).candidates
    logprobs = logits[0].log_softmax(-1)
    allowed = ids_of_mask(grammars.allowed(bound.sequence))
    assert found.token_ids == sorted(allowed, key=lambda token: -float(logprobs[token]))
    assert END_TOKEN_ID in found.token_ids
    assert found.logprobs == pytest.approx([float(logprobs[token]) for token in found.token_ids], abs=1e-5)


@pytest.mark.parametrize("make", [chooser, lambda **params: beam(2, **params)])
def test_where_only_the_end_may_come_too_early_that_sequence_fails_alone(make: Any, grammars: Grammars) -> None:
    words = compiled(WORDS, grammars.vocabulary)
    params = {"grammar": words, "generated": tokens(grammars, "yes"), "stop_token_ids": [END_TOKEN_ID]}
    rows = [chooser(seed=1), make(seed=2, **params, min_tokens=4), make(seed=3, **params, min_tokens=3)]
    choices = chosen(random_logits(3), rows, grammars)
    [failure] = choices.failed
    assert (failure.sequence_id, failure.reason) == (2, FailureReason.NO_TOKEN_LEFT)
    assert "of those that its grammar lets come next" in failure.detail
    ended = [token.token_id for token in choices.sampled if token.sequence_id == 3]
    ended += [token for found in choices.candidates for token in found.token_ids]
    assert ended == [END_TOKEN_ID]


def test_a_grammar_that_cannot_be_followed_fails_alone(grammars: Grammars, digits: str) -> None:
    logits = random_logits(5)
    good = [chooser(seed=1, grammar=digits), chooser(seed=2), beam(2, seed=3, grammar=digits)]
    bad = [chooser(seed=8, grammar=digits, generated=tokens(grammars, "x")), beam(2, seed=9, grammar="start: !")]
    choices = chosen(logits, good + bad, grammars)
    healthy = chosen(
        logits[:3], [chooser(seed=1, grammar=digits), chooser(seed=2), beam(2, seed=3, grammar=digits)], grammars
    )
    assert [(each.sequence_id, each.reason) for each in choices.failed] == [
        (8, FailureReason.BAD_GRAMMAR),
        (9, FailureReason.BAD_GRAMMAR),
    ]
    assert (choices.sampled, choices.candidates) == (healthy.sampled, healthy.candidates)


def test_without_a_vocabulary_all_that_have_grammars_fail(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    rows = [chooser(seed=1, grammar="x"), chooser(seed=2), beam(1, seed=3, grammar="x")]
    choices = chosen(random_logits(3), rows, Grammars(tmp_path))
    assert [(each.sequence_id, each.reason) for each in choices.failed] == [
        (1, FailureReason.BAD_GRAMMAR),
        (3, FailureReason.BAD_GRAMMAR),
    ]
    assert "no vocabulary of its model" in choices.failed[0].detail
    assert [token.sequence_id for token in choices.sampled] == [2]


def test_logits_that_are_not_finite_are_told_as_such(grammars: Grammars, digits: str) -> None:
    logits = random_logits(2)
    logits[0, 3], logits[1] = INF, -INF
    choices = chosen(logits, [chooser(seed=1, grammar=digits), beam(2, seed=2, grammar=digits)], grammars)
    assert [each.reason for each in choices.failed] == [FailureReason.NOT_FINITE] * 2


def test_a_step_without_grammars_has_no_masks(tmp_path: Path) -> None:
    assert masks_of([chooser(), beam(2)], Grammars(tmp_path)) is NO_MASKS


def test_the_logits_stay_as_they_are(grammars: Grammars, digits: str) -> None:
    logits = random_logits(2)
    before = logits.clone()
    chosen(logits, [chooser(seed=1, grammar=digits), beam(2, seed=2, grammar=digits)], grammars)
    assert torch.equal(logits, before)


def test_masks_are_the_same_side_by_side_as_one_after_the_other(
    grammars: Grammars, digits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_masks, "available_cores", lambda: 4)
    words = compiled(WORDS, grammars.vocabulary)

    def rows() -> list[Chooser]:
        found = [chooser(seed=seed, grammar=words if seed % 2 else digits) for seed in range(1, 40)]
        masks_of(found, grammars)
        return found

    few, many = rows(), rows()
    for row in many:
        assert row.sequence.follower is not None
        row.sequence.follower.mask_us = 10_000
    one, other = masks_of(few, grammars), masks_of(many, grammars)
    assert (one.bits == other.bits).all()
    assert [*one.rows.values()] == [*other.rows.values()]


def test_a_step_tells_what_each_grammar_took(grammars: Grammars, digits: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A microsecond passes whenever somebody looks.
    ticks = itertools.count(0, 1000)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(ticks))
    rows = [
        chooser(seed=1),
        chooser(seed=2, grammar=digits),
        beam(2, seed=3, grammar=digits),
        chooser(seed=4, grammar="no grammar"),
    ]
    times = {each.sequence_id: each.microseconds for each in masks_of(rows, grammars).times}
    # One each to catch up; and half of the five that two masks took together, rounded.
    assert times == {2: 4, 3: 4, 4: 1}


def test_what_a_grammar_took_is_told_for_each_row_that_it_masked(
    grammars: Grammars, digits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However many rows there are, nobody looks more often.
    ticks = itertools.count(0, 12_000_000)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(ticks))

    def taken(draft: list[int]) -> int:
        sequence = choosing_sequence(seed=2, grammar=digits)
        rows = [Chooser(sequence, draft, num_drafted) for num_drafted in range(len(draft) + 1)]
        (told,) = masks_of(rows, grammars).times
        return told.microseconds

    # The guess that does not fit, and what comes after it, need no mask.
    assert taken([]) == 3 * taken([*tokens(grammars, "1"), *tokens(grammars, "2"), *tokens(grammars, "ab")]) > 0
