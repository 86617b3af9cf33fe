"""Random mixes of everything that can be asked for, in one batch, against a sampler that sorts row by row."""

from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.testing.oracles.choosers import chooser
from octavo.testing.oracles.plain_sampler import plain_choice, plain_logprobs
from octavo.wire.sampling import Logprobs
from octavo.worker.sampling.sampler import choose
from octavo.worker.sequences import Chooser

ROWS = 400


def random_params(random: Random, vocab_size: int) -> dict[str, Any]:
    """Each feature in about every third row."""

    def tokens(count: int) -> list[int]:
        return random.sample(range(vocab_size), count)

    choices: dict[str, Any] = {
        "temperature": lambda: random.choice((0.0, 0.3, 0.7, 1.5, 3.0)),
        "top_k": lambda: random.choice((1, 2, 40, 63, 64, 65, 200, vocab_size + 5)),
        "top_p": lambda: random.choice((0.01, 0.3, 0.9, 0.99, 0.9999)),
        "min_p": lambda: random.choice((0.001, 0.05, 0.5, 1.0)),
        "repetition_penalty": lambda: random.choice((0.5, 1.2, 2.0)),
        "presence_penalty": lambda: random.uniform(-2, 2),
        "frequency_penalty": lambda: random.uniform(-2, 2),
        "logit_bias": lambda: [(token, random.uniform(-9, 9)) for token in tokens(30)],
        "allowed_token_ids": lambda: tokens(random.choice((3, 100))),
        "banned_token_ids": lambda: tokens(vocab_size // 3),
        "logprobs": lambda: random.choice((0, 1, 20)),
    }
    params = {name: draw() for name, draw in choices.items() if random.random() < 0.35}
    if random.random() < 0.35:
        params |= {"stop_token_ids": tokens(20), "min_tokens": random.randint(1, 30)}
    return params


def mixed_rows(vocab_size: int) -> tuple[Tensor, list[Chooser]]:
    random, generator = Random(vocab_size), np.random.default_rng(vocab_size)
    scales = generator.uniform(0.5, 6.0, size=(ROWS, 1))
    logits = (scales * generator.standard_normal((ROWS, vocab_size))).astype(np.float32)
    rows = []
    for row in range(ROWS):
        prompt, generated = (random.choices(range(vocab_size), k=random.randint(1, 40)) for _ in range(2))
        params = random_params(random, vocab_size)
        rows.append(chooser(prompt=prompt, generated=generated, index=row % 3, seed=row, **params))
    return torch.from_numpy(logits), rows


def assert_equal(found: Logprobs, expected: Logprobs) -> None:
    assert (found.rank, found.top_token_ids) == (expected.rank, expected.top_token_ids)
    assert found.logprob == pytest.approx(expected.logprob, abs=1e-5)
    assert found.top_logprobs == pytest.approx(expected.top_logprobs, abs=1e-5)


# Not more ids than candidates; ids that fill no span; two spans and a rest; many.
@pytest.mark.parametrize("vocab_size", [150, 600, 5003])
def test_every_row_chooses_what_sorting_would_choose(vocab_size: int) -> None:
    logits, rows = mixed_rows(vocab_size)
    choices = choose(logits, rows)
    stuck = {failure.sequence_id for failure in choices.failed}
    answered = [row for row in range(ROWS) if row not in stuck]
    assert [token.sequence_id for token in choices.sampled] == answered
    for row, token in zip(answered, choices.sampled, strict=True):
        assert token.token_id == plain_choice(logits[row].numpy(), rows[row].sequence)
        top = rows[row].sampling.logprobs
        if top is None:
            assert token.logprobs is None
        else:
            assert token.logprobs is not None
            assert_equal(token.logprobs, plain_logprobs(logits[row].numpy(), token.token_id, top))
    # Some have banned the few that they had allowed.
    assert len(stuck) < ROWS // 20


def test_penalties_follow_a_sequence_as_it_grows() -> None:
    """What is kept of a sequence between steps is that of all its tokens, forks and replays included."""
    generator = np.random.default_rng(1)
    params: dict[str, Any] = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2}
    grown = [chooser(prompt=[1, 2, 2], seed=seed, temperature=2.0, **params) for seed in range(8)]
    for step in range(40):
        logits = torch.from_numpy(generator.standard_normal((len(grown), 60)).astype(np.float32))
        replayed = [
            chooser(
                prompt=[1, 2, 2],
                generated=each.sequence.token_ids[3:],
                index=each.sequence.sequence_index,
                **_params(each),
            )
            for each in grown
        ]
        tokens = [token.token_id for token in choose(logits, grown).sampled]
        assert tokens == [token.token_id for token in choose(logits, replayed).sampled]
        assert tokens == [plain_choice(row.numpy(), each.sequence) for row, each in zip(logits, grown, strict=True)]
        for each, token in zip(grown, tokens, strict=True):
            each.sequence.token_ids.append(token)
        if step == 20:
            grown = [*grown, *(Chooser(each.sequence.fork(each.sequence_id, 1)) for each in grown)]


def _params(sequence: Chooser) -> dict[str, Any]:
    sampling = sequence.sampling
    return {name: getattr(sampling, name) for name in sampling.__struct_fields__ if name != "max_tokens"}
