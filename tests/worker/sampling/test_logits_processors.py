"""Exclusions, biases and penalties against a reference that goes token by token."""

from collections import Counter
from math import inf
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.testing.oracles.choosers import assert_follows, chooser, choosing_sequence, chosen, drawn, softmax
from octavo.worker.sampling.grammar_masks import NO_MASKS
from octavo.worker.sampling.logits_processors import _with_pending, is_processed, process
from octavo.worker.sequences import PENDING_TOKEN, Chooser, WorkerSequence

VOCAB_SIZE = 60


def expected(logits: Tensor, sequence: WorkerSequence) -> list[float]:
    """What becomes of `logits` ([vocab_size]), one token at a time in fp32."""
    sampling, counts = sequence.sampling, Counter(sequence.token_ids[sequence.prompt_length :])
    excluded = {*sampling.banned_token_ids}
    if sequence.num_generated < sampling.min_tokens:
        excluded |= {*sampling.stop_token_ids}
    result = []
    for token, value in enumerate(logits.numpy()):
        if token in excluded or (sampling.allowed_token_ids and token not in sampling.allowed_token_ids):
            result.append(-inf)
            continue
        for biased, bias in sampling.logit_bias:
            value = value + np.float32(bias) if biased == token else value
        if token in sequence.token_ids:
            penalty = np.float32(sampling.repetition_penalty)
            value = value / penalty if value > 0 else value * penalty
        if token in counts:
            value = value - np.float32(sampling.frequency_penalty) * np.float32(counts[token])
            value = value - np.float32(sampling.presence_penalty)
        result.append(float(value))
    return result


def processed(logits: Tensor, sequences: list[Chooser]) -> Tensor:
    result = logits.clone()
    process(result, sequences)
    return result


FEATURES: list[dict[str, Any]] = [
    {"logit_bias": [(3, 5.5), (17, -100.0), (59, 0.25)]},
    {"allowed_token_ids": [5, 3, 40, 41, 42]},
    {"banned_token_ids": [0, 59, 7]},
    {"min_tokens": 6, "stop_token_ids": [2, 11]},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 0.7},
    {"frequency_penalty": -1.1},
    {
        "logit_bias": [(token, 1.5) for token in range(0, 60, 7)],
        "allowed_token_ids": list(range(40)),
        "banned_token_ids": [8, 14],
        "min_tokens": 9,
        "stop_token_ids": [21],
        "repetition_penalty": 1.7,
        "presence_penalty": -0.3,
        "frequency_penalty": 0.9,
    },
]


def rows_of(features: list[dict[str, Any]], seed: int = 0) -> tuple[Tensor, list[Chooser]]:
    """Random logits and, of prompts and outputs with many repeats, sequences with these features."""
    generator = np.random.default_rng(seed)
    logits = torch.from_numpy(3 * generator.standard_normal((len(features), VOCAB_SIZE)).astype(np.float32))
    tokens = generator.integers(0, 25, size=(len(features), 16)).tolist()
    return logits, [
        chooser(prompt=row[:11], generated=row[11:], **params) for row, params in zip(tokens, features, strict=True)
    ]


@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature_does_what_the_reference_does(feature: dict[str, Any]) -> None:
    logits, sequences = rows_of([feature] * 4)
    assert processed(logits, sequences).tolist() == [
        expected(row, each.sequence) for row, each in zip(logits, sequences, strict=True)
    ]


def test_all_features_in_one_batch_do_what_each_does_alone() -> None:
    features = [{}, *FEATURES, {}, *FEATURES[::-1], {}]
    logits, sequences = rows_of(features, seed=1)
    together = processed(logits, sequences)
    assert together.tolist() == [expected(row, each.sequence) for row, each in zip(logits, sequences, strict=True)]
    alone = [processed(logits[i : i + 1], [sequence]) for i, sequence in enumerate(sequences)]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_is_seen(feature: dict[str, Any]) -> None:
    _, [sequence] = rows_of([feature])
    assert is_processed(sequence)


def test_a_row_that_asks_for_nothing_is_not_processed() -> None:
    assert not is_processed(chooser(stop_token_ids=[3], logprobs=5, top_k=3, top_p=0.5, min_p=0.2))
    assert not is_processed(chooser(stop_token_ids=[3], min_tokens=2, generated=[1, 1]))
    assert not is_processed(chooser(min_tokens=2))


def test_stop_tokens_are_possible_once_there_are_min_tokens() -> None:
    logits = torch.zeros(3, 8)
    rows = [chooser(min_tokens=2, stop_token_ids=[5], generated=[1] * count) for count in range(3)]
    assert (processed(logits, rows)[:, 5] == -inf).tolist() == [True, True, False]
    assert (processed(logits, rows) == -inf).sum() == 2


def test_ids_beyond_the_vocabulary_exclude_and_favour_nothing() -> None:
    logits = torch.randn(1, 8)
    far = 2**31 - 1
    outside = chooser(
        logit_bias=[(far, 3.0), (8, 3.0)], banned_token_ids=[far, 8], min_tokens=1, stop_token_ids=[far, 8]
    )
    assert torch.equal(processed(logits, [outside]), logits)
    half = processed(logits, [chooser(allowed_token_ids=[far, 8, 2], logit_bias=[(far, 1.0), (2, 1.0)])])
    assert half.isfinite().tolist() == [[token == 2 for token in range(8)]]
    assert half[0, 2] == logits[0, 2] + 1


def test_biases_of_one_token_add_up() -> None:
    assert processed(torch.zeros(1, 4), [chooser(logit_bias=[(2, 1.0), (2, 0.5)])]).tolist() == [[0, 0, 1.5, 0]]


def test_a_bias_cannot_bring_back_what_is_excluded() -> None:
    sequence = chooser(logit_bias=[(1, 100.0)], banned_token_ids=[1])
    assert processed(torch.zeros(1, 3), [sequence]).tolist() == [[0, -inf, 0]]


@pytest.mark.parametrize("penalty", [5e-324, 1e-40, 1e-30])
def test_a_repetition_penalty_near_zero_gives_numbers_still(penalty: float) -> None:
    logits = torch.tensor([[-inf, -3.0, 0.0, 1e-30, 20.0, 3e38]])
    result = processed(logits, [chooser(prompt=[0, 1, 2, 3, 4, 5], repetition_penalty=penalty)])
    assert not result.isnan().any()
    assert not result.isposinf().any()
    assert result[0, 0] == -inf
    assert chosen(logits, [chooser(prompt=[0, 1, 2, 3], repetition_penalty=penalty)]) == [5]


def test_counts_do_not_depend_on_what_has_been_computed() -> None:
    logits, [sequence] = rows_of([FEATURES[-1]])
    before = processed(logits, [sequence])
    sequence.sequence.num_computed = 0
    assert torch.equal(processed(logits, [sequence]), before)


def test_a_greedy_row_takes_the_likeliest_of_the_processed_logits() -> None:
    logits, sequences = rows_of([{**feature, "temperature": 0.0} for feature in FEATURES], seed=2)
    best = [int(np.argmax(expected(row, each.sequence))) for row, each in zip(logits, sequences, strict=True)]
    assert chosen(logits, sequences) == best
    assert best != logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("feature", FEATURES)
def test_tokens_follow_the_softmax_of_the_processed_logits(feature: dict[str, Any]) -> None:
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    tokens: dict[str, Any] = {"prompt": [1, 2, 3, 30, 31], "generated": [3, 4, 4, 4, 9]}
    result = torch.tensor(expected(logits, choosing_sequence(**tokens, **feature)))
    possible = {token for token in range(VOCAB_SIZE) if result[token] > -10}
    counts = drawn(logits, 5000, **tokens, **feature, temperature=1.5)
    assert_follows(counts, softmax(result, possible, temperature=1.5))


@pytest.mark.parametrize("features", [FEATURES[4], FEATURES[7], FEATURES[-1]])
def test_a_token_that_only_the_device_knows_counts_as_if_it_were_known(features: dict[str, Any]) -> None:
    """One that was generated before, one of the prompt, a new one; beside rows whose tokens are all known."""
    generated, last = [40, 41, 40], [40, 3, 17]
    kinds = [features, features, features, {}, features]
    known = [[*generated, last[row]] if row < len(last) else generated for row in range(len(kinds))]
    pending = [[*generated, PENDING_TOKEN] if row < len(last) else generated for row in range(len(kinds))]
    logits = torch.randn(len(kinds), VOCAB_SIZE, generator=torch.Generator().manual_seed(5))

    def choosers(tokens: list[list[int]]) -> list[Chooser]:
        return [chooser(prompt=[3, 4, 3], generated=each, **kind) for each, kind in zip(tokens, kinds, strict=True)]

    found, waiting = logits.clone(), choosers(pending)
    process(found, waiting, NO_MASKS, torch.tensor([*last, 5, 6]))
    assert torch.equal(found, processed(logits, choosers(known)))
    # Once it is known, the same sequences count it once.
    for each, token in zip(waiting, last, strict=False):
        each.sequence.token_ids[-1] = token
    assert torch.equal(processed(logits, waiting), found)


def test_a_pending_token_that_has_a_place_already_counts_alike_in_both() -> None:
    """A device writes the two in any order."""
    at, counts = torch.tensor([3, 5, VOCAB_SIZE + 3]), torch.tensor([1.0, 2.0, 0.0])
    rows = torch.tensor([0, 0, 1, 0, 1])
    places, new = _with_pending(at, counts, rows, torch.tensor([5, 7]), VOCAB_SIZE)
    assert places.tolist() == [3, 5, VOCAB_SIZE + 3, 5, VOCAB_SIZE + 7]
    assert new.tolist() == [1, 3, 0, 3, 1]
