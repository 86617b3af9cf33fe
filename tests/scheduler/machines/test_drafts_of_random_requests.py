"""Random requests of every kind, computed without drafts, with right ones, wrong ones and anything between: the same
tokens, logprobs, ends and counts."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from octavo.scheduler.core.config import Preemption
from octavo.testing.cluster import VOCABULARY, Cluster, Stream, make_request, reference_tokens, write_fake_model
from octavo.testing.depth import deep_unless
from octavo.testing.fakes.drafters import AdversarialDrafter, Foresight, ScriptedDrafter, adversary
from octavo.wire.requests import Delta, Request
from octavo.wire.sampling import BeamSearch, EarlyStopping

_REQUESTS = 12
# In this one a sequence waits for the last token of another one of its request, which guesses let be shorter.
_WAITING = 400
# In these no request but a beam search may have more than two tokens, so that nothing can be guessed; and the only one
# that may has no more, so that a draft model's guesses come too late.
_SHORT = (231, 152)
_SEEDS = [*range(90), *_SHORT, _WAITING]
_FEW = 3
# Twenty times as many as any run has taken.
_MOST_STEPS = 1000
# One that does not end within a step says where it is.
_TIMEOUT_S = 300


def _request(random: Random, name: str) -> Request:
    prompt = random.randint(1, 14)
    sampling: dict[str, Any] = random.choice(
        [
            {},
            {"temperature": 1.0, "seed": random.randint(0, 99)},
            {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
            {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.1},
            {"logit_bias": [(3, 2.0), (7, -1.0)], "min_tokens": 4},
            {"allowed_token_ids": list(range(0, 400, 3))},
            {"banned_token_ids": list(range(0, 900, 2))},
            {"num_sequences": random.randint(2, 4), "temperature": 1.0},
            {"num_sequences": 2},
            {"beam": BeamSearch(2, 1.0, EarlyStopping.ON)},
        ]
    )
    if "beam" not in sampling:
        sampling |= {"logprobs": random.choice([None, 0, 2]), "prompt_logprobs": random.choice([None, None, 1])}
    max_tokens, shared = random.choice([1, 2, 7, 20]), min(prompt, random.choice([0, 4, 8]))
    free = make_request(name, prompt, max_tokens, shared=shared, **sampling)
    if "beam" in sampling or random.random() < 0.5:
        return free
    stop = random.choice(reference_tokens(free))
    return make_request(name, prompt, max_tokens, shared=shared, stop_token_ids=(stop,), **sampling)


def _outcome(
    directory: Path,
    seed: int,
    requests: list[Request],
    drafter: ScriptedDrafter | None,
    hit_rate: float | None = None,
    **config: Any,
) -> tuple[dict[Stream, Any], int]:
    """What came of the requests, and how many guesses were checked: on a worker that has too few blocks for all, and
    is lost once; its steps fail now and then."""
    random = Random(seed)
    cluster = Cluster(directory, drafter=drafter, max_failed_steps=10**6, **config)
    sizes: dict[str, Any] = {"num_blocks": 150, "num_cpu_blocks": 60, "block_size": random.choice([1, 2, 4])}
    cluster.join(1, draft_hit_rate=hit_rate, **sizes)
    cluster.submit(*requests)
    lost_at = random.randint(3, 20)
    for number in range(_MOST_STEPS):
        if not cluster.core.groups:
            break
        if number == lost_at:
            cluster.leave(1)
            cluster.join(2, draft_hit_rate=hit_rate, **sizes)
        cluster.step(fail=random.random() < 0.03)
    assert not cluster.core.groups, f"not done after {_MOST_STEPS} steps\n{cluster.state()}"
    assert not cluster.rejected
    told = {stream: _told(deltas) for stream, deltas in cluster.deltas.items()}
    return told, sum(deltas[-1].drafted for deltas in cluster.deltas.values())


def _longest_guessed(requests: list[Request], plain: dict[Stream, Any]) -> int:
    """Returns how many tokens the longest stream has of which guesses can be checked: no beam search, and one that may
    have three, for one comes with the prompt and one behind the last guess."""
    may = {each.request_id for each in requests if each.sampling.beam is None and each.sampling.max_tokens > 2}
    return max((len(told[0]) for (request_id, _), told in plain.items() if request_id in may), default=0)


def _told(deltas: list[Delta]) -> tuple[Any, ...]:
    return (
        [token_id for delta in deltas for token_id in delta.token_ids],
        [logprobs for delta in deltas for logprobs in delta.logprobs],
        [logprobs for delta in deltas for logprobs in delta.prompt_logprobs],
        deltas[-1].finish_reason,
        deltas[-1].cumulative_logprob,
    )


@pytest.mark.timeout(_TIMEOUT_S)
@pytest.mark.parametrize("seed", deep_unless(lambda seed: seed < _FEW or seed in (*_SHORT, _WAITING), _SEEDS))
def test_they_get_what_they_get_without(tmp_path: Path, seed: int) -> None:
    directory, random = write_fake_model(tmp_path / "model"), Random(seed)
    requests = [_request(random, f"r{number}") for number in range(_REQUESTS)]
    config: dict[str, Any] = {
        "max_num_batched_tokens": random.choice([8, 16, 64]),
        "max_num_seqs": 8,
        "max_steps_in_flight": random.choice([1, 2]),
        "preemption": random.choice(list(Preemption)),
        "watermark": 0.0,
    }
    plain, none = _outcome(directory, seed, requests, None, speculation="off", **config)
    assert none == 0
    longest = _longest_guessed(requests, plain)
    drafters: list[tuple[int, AdversarialDrafter | ScriptedDrafter | None, float | None]] = [
        (random.choice([1, 4, 16]), adversary((0,), seed), None),
        (32, ScriptedDrafter(Foresight(VOCABULARY)), None),
        (8, ScriptedDrafter(lambda group, sequence, most: [sequence.num_known % 5] * most), None),
        (random.choice([1, 3, 8]), None, random.choice([0.0, 0.7, 1.0])),
        (random.choice([1, 4, 16]), adversary((0,), seed), 0.8),
    ]
    for most, drafter, hit_rate in drafters:
        found, num_drafted = _outcome(directory, seed, requests, drafter, hit_rate, speculation=most, **config)
        assert found == plain
        # A draft model guesses what follows the first decode, everybody else what that brings.
        assert (num_drafted > 0) == (longest > (2 if drafter is None else 1))
