"""Costly grammars hold up only those who ask for them: their time in a step is bounded, and everyone has a turn."""

from collections import Counter
from typing import Any

import pytest

from octavo.scheduler.core.config import Policy, Preemption
from octavo.scheduler.core.step.grammar_time import ALONE_US, STEP_US
from octavo.testing.cluster import Cluster, FakeReplica, make_request
from octavo.testing.fakes.spoilable import microseconds
from octavo.testing.scenarios import beams, outputs, plans, references, step_until
from octavo.wire.requests import Request
from octavo.wire.steps import StepPlan

from ...conftest import MakeCluster

HEAVY_US = 15_000
HEAVY, LIGHT = str(HEAVY_US), "50"


class Costs:
    """What the grammars of each plan take that a replica gets."""

    def __init__(self, cluster: Cluster, replica: FakeReplica) -> None:
        self._cluster = cluster
        self._replica = replica
        self._grammars: dict[int, str] = {}
        self._left: dict[int, int] = {}

    def of_all(self) -> list[int]:
        return [self._of(plan) for plan in plans(self._replica)]

    def _of(self, plan: StepPlan) -> int:
        for start in plan.starts:
            self._grammars[start.sequence_id] = start.sampling.grammar
            self._left[start.sequence_id] = len(start.prompt_token_ids) + len(start.generated_token_ids)
            self._left[start.sequence_id] -= start.num_computed
        for fork in plan.forks:
            self._grammars[fork.sequence_id] = self._grammars[fork.parent_id]
            self._left[fork.sequence_id] = self._left[fork.parent_id]
        taken = 0
        for work in plan.work:
            for each in (work.sequence_id, *work.follower_ids):
                self._left[each] -= work.num_tokens
                if self._left[each] <= 0:
                    taken += microseconds(self._grammars[each])
        return taken


def attackers(count: int, tenant: str = "", max_tokens: int = 30, **sampling: Any) -> list[Request]:
    return [make_request(f"heavy-{i}", 5, max_tokens, tenant=tenant, grammar=HEAVY, **sampling) for i in range(count)]


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_neighbour_of_costly_grammars_gets_a_token_of_every_step_and_no_step_is_long(
    make_cluster: MakeCluster, in_flight: int, policy: Policy
) -> None:
    cluster = make_cluster(policy=policy, max_steps_in_flight=in_flight)
    replica = cluster.join(num_blocks=1000)
    cluster.submit(neighbour := make_request("neighbour", 5, 200), *attackers(20))
    costs = Costs(cluster, replica)
    step_until(cluster, lambda: "neighbour" in cluster.finished)
    assert outputs(cluster, neighbour) == references(neighbour)
    found = costs.of_all()
    # Before it is known what they take, some start.
    known = found[20:]
    assert max(known) <= HEAVY_US
    assert sum(known) <= 1.1 * STEP_US * len(known)
    # Two more where they start: prompts come in steps of their own under the paper's policy.
    assert len(found) <= 200 + 20


def test_costly_grammars_have_their_turns_and_end_at_last(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join(num_blocks=2000)
    heavy = attackers(12, max_tokens=6)
    cluster.submit(make_request("neighbour", 5, 1000), *heavy)
    for _ in range(400):
        cluster.step()
    assert all(outputs(cluster, each) == references(each) for each in heavy)
    # Side by side, not one after the other.
    ends = [len(cluster.deltas[each.request_id, 0]) for each in heavy]
    assert ends == [6] * 12


def test_a_light_grammar_is_in_every_step_beside_heavy_ones(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join(num_blocks=1000)
    cluster.submit(*attackers(20, "attacker"), light := make_request("light", 5, 60, tenant="other", grammar=LIGHT))
    step_until(cluster, lambda: len(cluster.tokens["light"]) >= 2)
    steps = 0
    while "light" not in cluster.finished:
        cluster.step()
        steps += 1
    assert outputs(cluster, light) == references(light)
    assert steps <= 60


def test_tenants_share_the_time_evenly_however_many_they_send(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join(num_blocks=2000)
    many = [make_request(f"many-{i}", 5, 500, tenant="many", grammar="4000") for i in range(12)]
    few = [make_request(f"few-{i}", 5, 500, tenant="few", grammar="4000") for i in range(2)]
    cluster.submit(make_request("neighbour", 5, 2000, tenant="third"), *many, *few)
    for _ in range(300):
        cluster.step()
    served = Counter(
        {
            tenant: sum(len(tokens) for name, tokens in cluster.tokens.items() if name.startswith(tenant))
            for tenant in ("many", "few")
        }
    )
    assert served["many"] == pytest.approx(served["few"], rel=0.15)


def test_alone_they_fill_steps_that_one_who_comes_can_bear(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    replica = cluster.join(num_blocks=2000)
    heavy = attackers(20, max_tokens=8)
    cluster.submit(*heavy)
    cluster.run()
    assert all(outputs(cluster, each) == references(each) for each in heavy)
    known = Costs(cluster, replica).of_all()[20:]
    assert HEAVY_US < max(known) <= ALONE_US


def test_the_first_masks_of_many_come_a_few_in_a_step(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    replica = cluster.join(num_blocks=2000)
    cluster.submit(make_request("neighbour", 5, 100), *(make_request(f"r{i}", 9, 2, grammar="900") for i in range(40)))
    cluster.run()
    assert max(Costs(cluster, replica).of_all()) <= 3 * STEP_US


def test_a_single_long_time_is_taken_for_an_accident(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join()
    cluster.submit(make_request("r", 5, 20, grammar="100"))
    step_until(cluster, lambda: len(cluster.tokens["r"]) >= 3)
    grammar = cluster.groups["r"].grammar
    assert grammar is not None
    assert grammar.us == 100
    grammar.took(3_000_000)
    assert grammar.us == 100
    grammar.took(3_000_000)
    assert grammar.us == 250_000


def test_its_time_is_booked_to_the_tenant(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_num_seqs=2)
    cluster.join(num_blocks=2000)
    cluster.core.replicas[1].stats.tokens_computed, cluster.core.replicas[1].stats.model_us = 1000, 1_000_000
    cluster.submit(make_request("a", 5, 50, tenant="a", grammar=HEAVY), make_request("b", 5, 50, tenant="b"))
    for _ in range(20):
        cluster.step()
    served = {tenant.name: tenant.virtual_time for tenant in cluster.core.waiting.tenants}
    computed = len(cluster.tokens["a"])
    # A thousand tokens a second: fifteen in fifteen milliseconds, once it is known that it takes so long.
    assert computed > 5
    assert served["a"] - served["b"] > 15 * (computed - 3) - 20


@pytest.mark.parametrize("preemption", [Preemption.SWAP, Preemption.RECOMPUTE])
@pytest.mark.parametrize("kind", ["sampling", "parallel", "beams"])
def test_what_waits_for_its_turn_may_be_preempted_and_comes_back(
    make_cluster: MakeCluster, preemption: Preemption, kind: str
) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "sampling": {},
        "parallel": {"num_sequences": 3, "temperature": 1.0},
        "beams": {"beam": beams(2)},
    }

    def run(num_blocks: int) -> dict[str, list[list[int]]]:
        cluster = make_cluster(preemption=preemption, watermark=0.0)
        cluster.join(num_blocks=num_blocks, num_cpu_blocks=num_blocks, block_size=2)
        cluster.submit(make_request("old", 9, 60), *attackers(3, max_tokens=12, **kinds[kind]))
        cluster.run()
        assert (sum(deltas[-1].preemptions for deltas in cluster.deltas.values()) > 0) == (num_blocks < 100)
        return {name: cluster.outputs(name) for name, _ in cluster.streams}

    assert run(48) == run(400)
