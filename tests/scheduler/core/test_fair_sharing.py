"""Tenants share the tokens that are computed by their weights, whatever they ask for and whenever they come."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from octavo.scheduler.core.config import Policy
from octavo.testing.cluster import Cluster, make_request
from octavo.wire.requests import Request

from ..conftest import MakeCluster


@dataclass
class Flood:
    """A tenant that always has `depth` requests waiting."""

    tenant: str
    prompt: int = 8
    max_tokens: int = 8
    depth: int = 8
    num_sequences: int = 1
    requests: list[Request] = field(default_factory=list)

    def top_up(self, cluster: Cluster) -> None:
        waiting = sum(group.request.tenant == self.tenant for group in cluster.core.waiting)
        for _ in range(self.depth - waiting):
            name = f"{self.tenant}{len(self.requests)}"
            request = make_request(
                name, self.prompt, self.max_tokens, tenant=self.tenant, num_sequences=self.num_sequences
            )
            self.requests.append(request)
            cluster.submit(request)

    def is_away(self, cluster: Cluster) -> bool:
        return not any(group.request.tenant == self.tenant for group in cluster.core.groups)

    def served(self, cluster: Cluster) -> int:
        """Tokens of prompts and answers so far."""
        outputs = [cluster.outputs(request.request_id) for request in self.requests]
        return sum(self.prompt + sum(map(len, sequences)) for sequences in outputs if any(sequences))


def contend(cluster: Cluster, floods: list[Flood], num_steps: int) -> list[int]:
    """Lets the floods run against each other; what each was served meanwhile."""
    before = [flood.served(cluster) for flood in floods]
    for _ in range(num_steps):
        for flood in floods:
            flood.top_up(cluster)
        cluster.step()
    return [flood.served(cluster) - served for flood, served in zip(floods, before, strict=True)]


def narrow(make_cluster: MakeCluster, **config: Any) -> Cluster:
    cluster = make_cluster(max_num_seqs=4, prefix_caching=False, **config)
    cluster.join(num_blocks=512)
    return cluster


class TestShares:
    @pytest.mark.parametrize("policy", list(Policy))
    @pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 2.0), (5.0, 1.0), (1.0, 2.0, 3.0)])
    def test_are_as_the_weights(self, make_cluster: MakeCluster, weights: tuple[float, ...], policy: Policy) -> None:
        floods = [Flood(f"t{i}") for i in range(len(weights))]
        named = {flood.tenant: weight for flood, weight in zip(floods, weights, strict=True)}
        cluster = narrow(make_cluster, tenant_weights=named, policy=policy)
        served = contend(cluster, floods, 300)
        total = sum(served)
        assert all(served)
        for tokens, weight in zip(served, weights, strict=True):
            assert tokens / total == pytest.approx(weight / sum(weights), rel=0.05)

    def test_are_counted_in_tokens_not_in_requests(self, make_cluster: MakeCluster) -> None:
        """Long prompts, long answers and short both: the same tokens, whatever they are made of."""
        floods = [Flood("short", 4, 4), Flood("prompts", 60, 2), Flood("answers", 2, 40)]
        cluster = narrow(make_cluster)
        served = contend(cluster, floods, 600)
        assert all(tokens == pytest.approx(sum(served) / 3, rel=0.08) for tokens in served)

    def test_are_counted_for_all_sequences_of_a_request(self, make_cluster: MakeCluster) -> None:
        floods = [Flood("one"), Flood("four", num_sequences=4)]
        served = contend(narrow(make_cluster), floods, 300)
        assert served[0] / served[1] == pytest.approx(1.0, rel=0.08)

    def test_do_not_depend_on_how_many_requests_wait(self, make_cluster: MakeCluster) -> None:
        floods = [Flood("patient"), Flood("greedy", depth=60)]
        cluster = narrow(make_cluster)
        served = contend(cluster, floods, 300)
        assert served[0] / served[1] == pytest.approx(1.0, rel=0.05)

    def test_of_weights_that_are_not_given_are_one(self, make_cluster: MakeCluster) -> None:
        floods = [Flood("named"), Flood("other")]
        cluster = narrow(make_cluster, tenant_weights={"named": 3.0})
        served = contend(cluster, floods, 300)
        assert served[0] / served[1] == pytest.approx(3.0, rel=0.05)


class TestWorkConservation:
    @pytest.mark.parametrize("weight", [0.01, 1.0])
    def test_a_tenant_that_is_alone_gets_all(self, make_cluster: MakeCluster, weight: float) -> None:
        cluster = narrow(make_cluster, tenant_weights={"light": weight})
        (alone,) = contend(cluster, [Flood("light")], 200)
        (reference,) = contend(narrow(make_cluster), [Flood("")], 200)
        assert alone == reference

    def test_what_one_does_not_use_the_other_gets(self, make_cluster: MakeCluster) -> None:
        """A tenant with nine tenths of the weight that asks for one request at a time has one slot of four."""
        heavy, light = Flood("heavy", depth=1), Flood("light")
        cluster = narrow(make_cluster, tenant_weights={"heavy": 9.0})
        for _ in range(300):
            if heavy.is_away(cluster):
                heavy.top_up(cluster)
            light.top_up(cluster)
            cluster.step()
        assert light.served(cluster) / heavy.served(cluster) == pytest.approx(3.0, rel=0.25)


class TestAbsence:
    """What a tenant did not use while it was away is gone; what it used too much is not forgiven."""

    def test_idle_time_earns_nothing(self, make_cluster: MakeCluster) -> None:
        busy, idle = Flood("busy"), Flood("idle")
        cluster = narrow(make_cluster)
        contend(cluster, [busy, idle], 40)
        contend(cluster, [busy], 200)
        served = contend(cluster, [busy, idle], 250)
        assert served[1] / served[0] == pytest.approx(1.0, rel=0.1)

    def test_keeping_one_slow_request_alive_earns_nothing(self, make_cluster: MakeCluster) -> None:
        """It is served all that it asks for, however little that is."""
        busy, slow = Flood("busy"), Flood("slow")
        cluster = narrow(make_cluster)
        cluster.submit(make_request("lasting", 4, 600, tenant="slow"))
        contend(cluster, [busy], 200)
        assert "lasting" in cluster.groups
        served = contend(cluster, [busy, slow], 200)
        assert served[1] / served[0] <= 1.1

    def test_coming_and_going_earns_nothing(self, make_cluster: MakeCluster) -> None:
        """One long request at a time, sent when the one before it has ended, against many short ones."""
        cluster = make_cluster(max_num_seqs=1, prefix_caching=False)
        cluster.join(num_blocks=512)
        steady, hopping = Flood("steady"), Flood("hopping", prompt=100, max_tokens=60, depth=1)
        for _ in range(1000):
            steady.top_up(cluster)
            if hopping.is_away(cluster):
                hopping.top_up(cluster)
            cluster.step()
        assert hopping.served(cluster) / steady.served(cluster) <= 1.15

    def test_a_newcomer_is_served_as_soon_as_anything_is_free(self, make_cluster: MakeCluster) -> None:
        """However long the queue of the others and however much they have been served."""
        old = [Flood(f"old{i}", depth=20) for i in range(3)]
        cluster = narrow(make_cluster)
        contend(cluster, old, 300)
        new = make_request("new", 8, 8, tenant="new")
        cluster.submit(new)
        steps = 0
        while not cluster.tokens["new"]:
            contend(cluster, old, 1)
            steps += 1
        # 8 tokens for one of those that run, and two steps in flight.
        assert steps <= 12
