"""Both policies through the same scenarios: other steps, the same tokens."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from octavo.scheduler.core.config import Policy, Preemption
from octavo.testing.cluster import make_request, reference_tokens
from octavo.testing.scenarios import beams, outputs, plans, step_until, undisturbed
from octavo.wire.requests import Request

from ...conftest import MakeCluster


@dataclass
class Scenario:
    """Requests that arrive `gap` steps apart, and a replica and a configuration to meet them."""

    requests: list[Request]
    gap: int = 0
    num_blocks: int = 64
    config: dict[str, Any] = field(default_factory=dict)


def sampled(name: str, prompt: int, max_tokens: int, count: int, **others: Any) -> Request:
    return make_request(name, prompt, max_tokens, num_sequences=count, temperature=1.0, **others)


def stopping(name: str, prompt: int, max_tokens: int) -> Request:
    """Ends at its third token."""
    stop = reference_tokens(make_request(name, prompt, max_tokens))[2]
    return make_request(name, prompt, max_tokens, stop_token_ids=(stop,))


SCENARIOS = {
    "one": Scenario([make_request("a", 5, 9)]),
    "one-token": Scenario([make_request("a", 1, 1), make_request("b", 9, 1)]),
    "burst": Scenario([make_request(f"r{i}", 1 + 3 * i, 4 + i) for i in range(6)]),
    "trickle": Scenario([make_request(f"r{i}", 4 + i, 7) for i in range(6)], gap=2),
    "longer-than-a-step": Scenario(
        [make_request("a", 40, 4), make_request("b", 3, 8), make_request("c", 33, 3)], gap=1
    ),
    "tiny-budget": Scenario([make_request(f"r{i}", 3, 5) for i in range(4)], config={"max_num_batched_tokens": 2}),
    "few-slots": Scenario([make_request(f"r{i}", 3, 5) for i in range(7)], config={"max_num_seqs": 2}),
    "common-beginning": Scenario([make_request(f"r{i}", 20 + i, 6, shared=17) for i in range(4)]),
    "parallel": Scenario([sampled("a", 7, 8, 4), sampled("b", 12, 5, 2), make_request("c", 4, 9)], gap=1),
    "beams": Scenario([make_request("a", 6, 7, beam=beams(3)), make_request("b", 5, 9)], gap=1),
    "stops": Scenario([stopping("a", 5, 20), stopping("b", 13, 20), make_request("c", 5, 6)]),
    "tight": Scenario([make_request(f"r{i}", 6, 14) for i in range(5)], num_blocks=12),
    "tight-parallel": Scenario([sampled(f"r{i}", 6, 10, 2) for i in range(4)], num_blocks=14),
    "priorities": Scenario(
        [make_request(f"r{i}", 6, 9, priority=i % 3) for i in range(6)], num_blocks=12, config={"max_num_seqs": 3}
    ),
    "tenants": Scenario([make_request(f"r{i}", 6, 9, tenant=f"t{i % 2}") for i in range(6)], num_blocks=12),
}


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("name", list(SCENARIOS))
def test_tokens_are_the_same(make_cluster: MakeCluster, name: str, policy: Policy, in_flight: int) -> None:
    scenario = SCENARIOS[name]
    config = {"max_num_batched_tokens": 16, **scenario.config}
    cluster = make_cluster(policy=policy, max_steps_in_flight=in_flight, preemption=Preemption.SWAP, **config)
    cluster.join(num_blocks=scenario.num_blocks, num_cpu_blocks=scenario.num_blocks // 2)
    for request in scenario.requests:
        cluster.submit(request)
        for _ in range(scenario.gap):
            cluster.step()
    cluster.run(max_steps=300)
    assert outputs(cluster, *scenario.requests) == undisturbed(make_cluster, *scenario.requests)


class TestChunked:
    def test_a_long_prompt_takes_what_decodes_leave_and_delays_none_of_them(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_num_batched_tokens=16, max_steps_in_flight=1)
        replica = cluster.join()
        cluster.submit(*(make_request(f"r{i}", 4, 30) for i in range(3)))
        cluster.step()
        cluster.submit(make_request("long", 50, 3))
        step_until(cluster, lambda: len(cluster.tokens["long"]) == 1)
        shares = [[work.num_tokens for work in plan.work] for plan in plans(replica)][1:]
        assert shares == [[1, 1, 1, 13], [1, 1, 1, 13], [1, 1, 1, 13], [1, 1, 1, 11]]

    def test_partial_prefills_come_before_new_prompts(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_num_batched_tokens=8, max_steps_in_flight=1)
        replica = cluster.join()
        cluster.submit(make_request("cut", 12, 3), make_request("next", 12, 3))
        cluster.step()
        cluster.step()
        assert [[work.num_tokens for work in plan.work] for plan in plans(replica)] == [[8], [4, 4]]

    def test_decodes_take_the_whole_budget_if_there_are_as_many(self, make_cluster: MakeCluster) -> None:
        cluster = make_cluster(max_num_batched_tokens=4, max_steps_in_flight=1)
        replica = cluster.join()
        cluster.submit(*(make_request(f"r{i}", 1, 6) for i in range(4)))
        cluster.step()
        cluster.submit(make_request("waits", 5, 3))
        for _ in range(5):
            cluster.step()
        assert [len(plan.work) for plan in plans(replica)] == [4] * 6
        cluster.run()
