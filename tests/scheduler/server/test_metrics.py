"""The scheduler's metrics agree with what its core did, and with the books that were published last."""

from dataclasses import fields
from typing import Any

import pytest

from octavo.scheduler.core.config import Preemption
from octavo.scheduler.core.events import CacheReset, ReplicaHeard, WorkerCordoned, WorkerDrained
from octavo.scheduler.core.sequence import Sequence, SequenceGroup, Tier, TierTokens
from octavo.scheduler.core.speculation.draft import DraftSource
from octavo.scheduler.server.admin_messages import write_load
from octavo.scheduler.server.metrics import RequestSpans, SchedulerMetrics, tier_name
from octavo.testing.cluster import VOCABULARY, FakeDisk, make_request
from octavo.testing.fakes.drafters import Foresight, ScriptedDrafter
from octavo.testing.metrics import told
from octavo.v1 import admin_pb2 as pb
from octavo.v1.admin_pb2 import GetLoadResponse
from octavo.wire.requests import RejectReason, Request
from octavo.wire.steps import DiskUse

from ..conftest import MakeCluster
from ..views import kv_of


class Watched:
    """A cluster and the metrics that its core tells."""

    def __init__(self, make_cluster: MakeCluster, **config: Any) -> None:
        self.now = 0.0
        self.metrics = SchedulerMetrics(lambda: self.now, RequestSpans(lambda: self.now))
        self.cluster = make_cluster(observer=self.metrics, **config)

    def told(self) -> dict[str, float]:
        self.now = self.cluster.now
        self.metrics.publish(write_load(self.cluster.core, 3))
        return told(self.metrics, "reason", "kind", "cause", "worker", "state", "source", "position")


def test_requests_and_steps_are_counted(make_cluster: MakeCluster) -> None:
    watched = Watched(make_cluster)
    watched.cluster.join(num_blocks=64, block_size=4)
    watched.cluster.submit(make_request("a", 8, 5), make_request("b", 8, 3, shared=8))
    watched.cluster.step()
    found = watched.told()
    assert found["octavo_requests_running"] == found["vllm:num_requests_running"] == 2
    assert found["octavo_blocks_referenced worker-1"] + found["octavo_blocks_free worker-1"] == 64
    assert found["vllm:kv_cache_usage_perc"] == found["octavo_blocks_referenced worker-1"] / 64
    assert found["octavo_dropped_messages_total"] == 3
    watched.cluster.run()
    found = watched.told()
    assert "octavo_requests_running" not in found
    assert found["octavo_queue_time_seconds_count"] == 2
    assert found["octavo_scheduler_sequences_finished_total length"] == 2
    assert found["octavo_prefix_lookup_tokens_total"] == 16
    assert found["octavo_tokens_sampled_total"] == 8
    assert found["octavo_tokens_computed_total"] == found["octavo_step_tokens_sum"] >= 16 + 6
    assert found["octavo_step_seconds_count"] == found["octavo_step_tokens_count"] > 0


def test_a_prompt_that_is_found_computed_is_counted_as_such(make_cluster: MakeCluster) -> None:
    watched = Watched(make_cluster)
    watched.cluster.join(block_size=4)
    watched.cluster.submit(make_request("a", 9, 2, shared=9))
    watched.cluster.run()
    watched.cluster.submit(make_request("b", 9, 2, shared=9))
    watched.cluster.run()
    found = watched.told()
    assert (found["octavo_prefix_lookup_tokens_total"], found["octavo_prefix_hit_tokens_total"]) == (18, 8)
    assert found["octavo_blocks_cached worker-1"] >= 2


def test_what_moves_to_another_worker_is_counted(make_cluster: MakeCluster) -> None:
    watched = Watched(make_cluster)
    watched.cluster.join(1, block_size=4, num_cpu_blocks=20, is_read=True)
    watched.cluster.submit(make_request("a", 9, 8))
    for _ in range(3):
        watched.cluster.step()
    watched.cluster.join(2, block_size=4, num_cpu_blocks=20, is_read=True)
    watched.cluster.handle(WorkerDrained("worker-1", 0.0))
    watched.cluster.run()
    found = watched.told()
    # Of 9 prompt tokens and one or two others.
    assert (found["octavo_moved_requests_total"], found["octavo_moved_blocks_total"]) == (1, 3)


def cache(watched: Watched, what: str) -> dict[str, float]:
    """One of the cache's figures by tier, of all workers together."""
    found: dict[str, float] = {}
    for family in watched.metrics.collect():
        for sample in family.samples:
            if sample.name == f"octavo_cache_{what}" and sample.value:
                label = " to ".join(sample.labels[each] for each in ("tier", "to") if each in sample.labels)
                found[label] = found.get(label, 0) + sample.value
    return found


def serve(watched: Watched, *requests: Request) -> None:
    for request in requests:
        watched.cluster.submit(request)
        watched.cluster.run()
    watched.told()


def test_hits_and_found_tokens_are_counted_in_the_tier_where_they_were_found(make_cluster: MakeCluster) -> None:
    watched = Watched(make_cluster, watermark=0.0, max_steps_in_flight=1)
    watched.cluster.join(num_blocks=14, block_size=2, num_cpu_blocks=20)
    serve(watched, make_request("a", 16, 3, shared=16))
    assert cache(watched, "hits_total") == {}
    # Two beginnings of 14 tokens.
    serve(watched, make_request("b", 16, 3, shared=16), make_request("c", 16, 3, shared=16))
    assert cache(watched, "hits_total") == {"device": 2}
    assert cache(watched, "hit_tokens_total") == {"device": 28}
    assert cache(watched, "blocks")["device"] == len(kv_of(watched.cluster)._cache)
    assert cache(watched, "capacity_blocks") == {"device": 14, "cpu": 20}
    # Another takes the device's blocks, whose content goes on in CPU memory, and is found there and in what is left.
    before, other = cache(watched, "blocks"), make_request("other", 24, 3)
    serve(watched, other)
    assert cache(watched, "evicted_blocks_total")["device"] > 0
    assert cache(watched, "moved_blocks_total") == {"device to cpu": cache(watched, "blocks")["cpu"]}
    assert "cpu" not in before
    serve(watched, make_request("d", 16, 3, shared=16))
    hits, tokens = cache(watched, "hits_total"), cache(watched, "hit_tokens_total")
    assert hits["cpu"] == 1
    assert tokens["cpu"] == 2 * cache(watched, "moved_blocks_total")["cpu to device"]
    assert sum(tokens.values()) == watched.told()["octavo_prefix_hit_tokens_total"] == 42


def test_content_of_cpu_blocks_that_makes_way_is_evicted_there(make_cluster: MakeCluster) -> None:
    watched = Watched(make_cluster, watermark=0.0, max_steps_in_flight=1)
    watched.cluster.join(num_blocks=14, block_size=2, num_cpu_blocks=4)
    serve(watched, *(make_request(name, 24, 3) for name in "abc"))
    evicted, moved = cache(watched, "evicted_blocks_total"), cache(watched, "moved_blocks_total")
    assert cache(watched, "blocks")["cpu"] == 4
    assert evicted["cpu"] == moved["device to cpu"] - 4 > 0
    # A reset is no eviction.
    watched.cluster.handle(CacheReset(None))
    watched.told()
    assert cache(watched, "evicted_blocks_total") == evicted
    assert cache(watched, "blocks") == {}


def test_prefixes_that_are_copied_from_another_worker_are_counted(make_cluster: MakeCluster) -> None:
    watched = Watched(make_cluster)
    watched.cluster.join(1, block_size=4, num_cpu_blocks=20, is_read=True)
    watched.cluster.submit(make_request("a", 9, 2, shared=9))
    watched.cluster.run()
    watched.cluster.handle(WorkerCordoned("worker-1"))
    watched.cluster.join(2, block_size=4, num_cpu_blocks=20, is_read=True)
    watched.cluster.submit(make_request("b", 9, 2, shared=9))
    watched.cluster.run()
    found = watched.told()
    names = ("copied_blocks", "copied_found_blocks", "late_copies")
    assert [found.get(f"octavo_prefix_{name}_total", 0) for name in names] == [2, 2, 0]


def test_what_disks_are_given_and_asked_for_is_counted(make_cluster: MakeCluster) -> None:
    watched, disk = Watched(make_cluster), FakeDisk()
    for incarnation, name in ((1, "a"), (2, "b")):
        watched.cluster.join(incarnation, block_size=4, num_cpu_blocks=20, disk=disk, mirror=True)
        watched.cluster.submit(make_request(name, 9, 8, shared=9))
        watched.cluster.run()
        watched.cluster.step()
        watched.told()
        if incarnation == 1:
            # It asks for one in vain.
            assert cache(watched, "missed_blocks_total") == {"disk": 1}
            assert cache(watched, "moved_blocks_total") == {"device to disk": 4}
            watched.cluster.leave(1)
    # The second asks for one, and then for the other.
    assert cache(watched, "missed_blocks_total") == {}
    assert cache(watched, "hits_total") == {"disk": 1}
    assert cache(watched, "hit_tokens_total") == {"disk": 8}
    # Of those that it has computed itself it does not know that they are there.
    assert cache(watched, "moved_blocks_total") == {"device to disk": 2, "disk to cpu": 2, "cpu to device": 2}
    assert len(disk) == 4


def test_what_a_disk_holds_is_what_its_worker_said_last(make_cluster: MakeCluster) -> None:
    watched = Watched(make_cluster)
    watched.cluster.join(1, block_size=4, num_cpu_blocks=20, disk=FakeDisk())
    watched.cluster.join(2, block_size=4, num_cpu_blocks=20)
    watched.told()
    assert "disk" not in cache(watched, "blocks")
    watched.cluster.handle(ReplicaHeard(1, disk=DiskUse(30, 400, 5)))
    # One without a disk says nothing of it, and is not believed.
    watched.cluster.handle(ReplicaHeard(2, disk=DiskUse(1, 1, 1)))
    watched.told()
    assert cache(watched, "blocks")["disk"] == 30
    assert cache(watched, "capacity_blocks")["disk"] == 400
    assert cache(watched, "evicted_blocks_total") == {"disk": 5}


def test_every_tier_has_a_name_for_operators() -> None:
    declared = (pb.TIER_UNSPECIFIED, pb.TIER_DEVICE, pb.TIER_CPU, pb.TIER_DISK)
    assert {tier_name(tier) for tier in declared} == {*Tier, "unspecified"}
    assert len(declared) == len(pb.Tier.items())
    assert {field.name for field in fields(TierTokens)} == {*Tier, "replica", "source"}


def test_drafts_are_counted_by_source_and_place(make_cluster: MakeCluster) -> None:
    foresight = Foresight(VOCABULARY)

    def guess(group: SequenceGroup, sequence: Sequence, most: int) -> list[int]:
        first, second, third = foresight(group, sequence, 3)
        return [first, second, third ^ 1] if most >= 3 else []

    drafter = ScriptedDrafter(guess, DraftSource.PREDICTION)
    watched = Watched(make_cluster, speculation=8, drafter=drafter)
    watched.cluster.join(num_blocks=64, block_size=4)
    watched.cluster.submit(make_request("a", 8, 10))
    watched.cluster.run()
    found = watched.told()
    # One token comes with the prompt, three with each draft until no room is left for one.
    [told] = watched.cluster.deltas["a", 0][-1:]
    drafts = told.drafted // 3
    assert (drafts, told.accepted) == (2, 4)
    for name, count in (("drafts", 2), ("draft_tokens", 6), ("accepted_draft_tokens", 4)):
        assert found[f"octavo_{name}_total prediction"] == count
        assert found.get(f"octavo_{name}_total store", 0) == 0
    for name, count in (("num_drafts", 2), ("num_draft_tokens", 6), ("num_accepted_tokens", 4)):
        assert found[f"vllm:spec_decode_{name}_total"] == count
    places = {name[-1]: count for name, count in found.items() if "accepted_tokens_per_pos_total" in name}
    assert places == {"0": 2, "1": 2}
    assert found["octavo_worker_draft_tokens_total worker-1"] == 6
    assert found["octavo_worker_accepted_draft_tokens_total worker-1"] == 4


@pytest.mark.parametrize("kind", [Preemption.SWAP, Preemption.RECOMPUTE])
def test_preemptions_are_counted_by_their_kind(make_cluster: MakeCluster, kind: Preemption) -> None:
    watched = Watched(make_cluster, preemption=kind, watermark=0.0)
    watched.cluster.join(num_blocks=6, block_size=4, num_cpu_blocks=6)
    watched.cluster.submit(make_request("a", 8, 12), make_request("b", 8, 12))
    watched.cluster.run()
    found = watched.told()
    assert found[f"octavo_preemptions_total {kind}"] == found["vllm:num_preemptions_total"]
    assert found["vllm:num_preemptions_total"] == watched.cluster.core.preemptions > 0


def test_what_ends_otherwise_is_counted_by_its_reason(make_cluster: MakeCluster) -> None:
    watched = Watched(make_cluster, max_waiting=2)
    watched.cluster.submit(*(make_request(name, 8, 4) for name in "abc"))
    watched.cluster.abort("a")
    watched.cluster.join()
    watched.cluster.leave(1)
    found = watched.told()
    assert found[f"octavo_requests_rejected_total {RejectReason.QUEUE_FULL}"] == 1
    assert found["octavo_requests_aborted_total"] == 1
    assert found["octavo_workers_lost_total goodbye"] == 1
    assert found["octavo_requests_waiting"] == found["vllm:num_requests_waiting"] == 1
    assert found["octavo_frontends"] == 1


def test_workers_are_told_by_state_and_what_waits_by_its_tokens(make_cluster: MakeCluster) -> None:
    watched = Watched(make_cluster)
    watched.cluster.join(1)
    watched.cluster.submit(make_request("a", 8, 5))
    watched.cluster.step()
    watched.cluster.join(2)
    watched.cluster.handle(ReplicaHeard(1, draining=True))
    watched.cluster.handle(WorkerCordoned("worker-2"))
    watched.cluster.submit(make_request("b", 8, 5))
    found = watched.told()
    assert found["octavo_workers worker-1 draining"] == found["octavo_workers worker-2 cordoned"] == 1
    assert found["octavo_waiting_tokens"] == 8
    for _ in range(6):
        watched.cluster.step()
    found = watched.told()
    workers = {name for name in found if name.startswith("octavo_workers")}
    assert workers == {"octavo_workers worker-2 cordoned"}, "one that is dismissed is not lost"


def test_the_age_of_the_last_step_grows_with_the_clock_and_not_with_the_books(make_cluster: MakeCluster) -> None:
    watched = Watched(make_cluster)
    watched.cluster.join()
    watched.cluster.submit(make_request("a", 8, 5))
    watched.cluster.now = 20.0
    assert watched.told()["octavo_last_step_age_seconds"] == 20
    watched.cluster.step()
    watched.now = watched.cluster.now
    watched.cluster.step()
    watched.now = 50.0
    family = next(each for each in watched.metrics.collect() if each.name == "octavo_last_step_age_seconds")
    assert family.samples[0].value == pytest.approx(50 - 20.01)


def test_blocks_of_all_workers_of_one_size_are_told_together(make_cluster: MakeCluster) -> None:
    watched = Watched(make_cluster)
    watched.cluster.join(1, num_blocks=10, block_size=4)
    watched.cluster.join(2, num_blocks=20, block_size=4)
    watched.told()
    family = next(each for each in watched.metrics.collect() if each.name == "vllm:cache_config_info")
    assert [sample.labels for sample in family.samples] == [{"block_size": "4", "num_gpu_blocks": "30"}]


def test_what_is_swapped_out_waits_as_other_servers_count_it() -> None:
    metrics = SchedulerMetrics(lambda: 0.0, RequestSpans(lambda: 0.0))
    metrics.publish(GetLoadResponse(waiting=2, swapped=3))
    found = told(metrics)
    assert (found["octavo_requests_waiting"], found["vllm:num_requests_waiting"]) == (2, 5)


def test_before_anything_is_published_there_is_nothing() -> None:
    metrics = SchedulerMetrics(lambda: 0.0, RequestSpans(lambda: 0.0))
    # Without a block, none is free.
    assert told(metrics) == {"vllm:kv_cache_usage_perc": 1}
    metrics.publish(GetLoadResponse(waiting=2))
    assert told(metrics) == {
        "octavo_requests_waiting": 2,
        "vllm:num_requests_waiting": 2,
        "vllm:kv_cache_usage_perc": 1,
    }
