"""All ways of decoding in one batch: each request gets exactly what it gets alone."""

from typing import Any

import msgspec
import pytest

from octavo.scheduler.core.config import Policy, Preemption
from octavo.scheduler.core.events import PrefixPinned
from octavo.testing.cluster import Cluster, make_request
from octavo.testing.scenarios import beams, outputs, plans, step_until, undisturbed
from octavo.wire.requests import Prefix, Request
from octavo.wire.sampling import EarlyStopping

from ...conftest import MakeCluster

PREFIX = Prefix("instructions", make_request("instructions", 14, 1).prompt_token_ids)


def after_prefix(name: str, prompt: int, max_tokens: int, **others: Any) -> Request:
    """A request whose prompt goes on after the pinned prefix."""
    request = make_request(name, prompt, max_tokens, **others)
    return msgspec.structs.replace(request, prompt_token_ids=PREFIX.token_ids + request.prompt_token_ids)


MIXTURE = (
    make_request("greedy", 6, 14),
    make_request("seeded", 7, 13, temperature=0.8, seed=2**40 + 1, top_k=50, top_p=0.9, min_p=0.01),
    make_request("four", 5, 12, num_sequences=4, temperature=1.0, seed=3),
    make_request("beams", 6, 11, beam=beams(4)),
    make_request("short beams", 8, 10, beam=beams(2, 2.0, EarlyStopping.NEVER), num_sequences=2),
    make_request("penalties", 6, 14, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=-0.5),
    make_request("biased", 6, 14, logit_bias=[(7, 3.0)], banned_token_ids=[1, 2], min_tokens=5, stop_token_ids=(9,)),
    make_request("logprobs", 9, 10, logprobs=3, prompt_logprobs=2),
    after_prefix("prefix", 5, 12),
    after_prefix("prefix four", 3, 9, num_sequences=4, temperature=1),
)


def submit_all(cluster: Cluster) -> None:
    cluster.handle(PrefixPinned(PREFIX))
    for request in MIXTURE:
        cluster.submit(request)
        cluster.now += 0.001


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("policy", list(Policy))
def test_in_one_batch(make_cluster: MakeCluster, policy: Policy, in_flight: int) -> None:
    cluster = make_cluster(policy=policy, max_steps_in_flight=in_flight)
    replica = cluster.join(num_blocks=400)
    submit_all(cluster)
    cluster.run()
    assert outputs(cluster, *MIXTURE) == undisturbed(make_cluster, *MIXTURE)
    # 6 that sample one, 2 times 4, and 4 and 2 beams.
    assert max(len(plan.work) for plan in plans(replica)) == 6 + 8 + 6


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("preemption", list(Preemption))
def test_short_of_blocks_and_budget(
    make_cluster: MakeCluster, preemption: Preemption, policy: Policy, in_flight: int
) -> None:
    cluster = make_cluster(
        policy=policy, max_steps_in_flight=in_flight, preemption=preemption, max_num_batched_tokens=16
    )
    cluster.join(num_blocks=70, block_size=2, num_cpu_blocks=40)
    submit_all(cluster)
    cluster.run()
    assert cluster.core.preemptions > 1
    assert outputs(cluster, *MIXTURE) == undisturbed(make_cluster, *MIXTURE)


@pytest.mark.parametrize("windows", [(8,), (0, 6), (5, 9)])
def test_where_layers_have_windows(make_cluster: MakeCluster, windows: tuple[int, ...]) -> None:
    together = make_cluster(preemption=Preemption.SWAP)
    together.join(num_blocks=60 * len(windows), block_size=2, num_cpu_blocks=40, windows=windows)
    submit_all(together)
    together.run()
    assert together.core.preemptions > 0
    for request in MIXTURE:
        alone = make_cluster()
        alone.join(num_blocks=400, windows=windows)
        alone.submit(request)
        alone.run()
        assert together.outputs(request.request_id) == alone.outputs(request.request_id)


def test_across_replicas_that_come_and_go(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_num_batched_tokens=24)
    for incarnation in (1, 2):
        cluster.join(incarnation, num_blocks=60, block_size=2)
    submit_all(cluster)
    for lost in (1, 2, 3):
        step_until(cluster, lambda: any(replica.plans for replica in cluster.replicas.values()))
        for _ in range(4):
            cluster.step()
        cluster.leave(lost)
        cluster.join(lost + 2, num_blocks=60, block_size=2)
    cluster.run()
    assert outputs(cluster, *MIXTURE) == undisturbed(make_cluster, *MIXTURE)


def test_settings_that_differ_give_other_tokens(make_cluster: MakeCluster) -> None:
    """Else the tests above would prove nothing about them."""
    plain = make_request("same", 6, 14)
    changes: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 1.0, "seed": 1},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"logit_bias": [(7, 3.0)]},
    ]
    variants = [
        msgspec.structs.replace(plain, sampling=msgspec.structs.replace(plain.sampling, **change))
        for change in [{}, *changes]
    ]
    found = {str(undisturbed(make_cluster, variant)) for variant in variants}
    assert len(found) == len(variants)
