"""A step for which a worker has no memory is tried again in parts; only what is too large alone is refused."""

from typing import Any

import pytest

from octavo.scheduler.core.config import Policy
from octavo.scheduler.core.events import PrefixPinned
from octavo.scheduler.core.steps_in_flight import MIN_PATIENCE
from octavo.testing.cluster import Cluster, make_request, reference_tokens
from octavo.testing.scenarios import plans, step_until
from octavo.wire.requests import Prefix, RejectReason, Request

from ...conftest import MakeCluster

# All prompts begin with it.
FIRST = 7


def starting(name: str, length: int, max_tokens: int, first: int = FIRST, **sampling: Any) -> Request:
    request = make_request(name, length, max_tokens, **sampling)
    request.prompt_token_ids[0] = first
    return request


def assert_served(cluster: Cluster, *requests: Request) -> None:
    cluster.run()
    for request in requests:
        for index in range(request.sampling.num_sequences):
            assert cluster.streams[request.request_id, index] == reference_tokens(request, index)


@pytest.mark.parametrize("config", [{}, {"policy": Policy.PAPER}, {"max_steps_in_flight": 1}], ids=str)
@pytest.mark.parametrize("limit", [1, 3, 7])
def test_nothing_is_lost_where_large_steps_find_no_memory(
    make_cluster: MakeCluster, config: dict[str, Any], limit: int
) -> None:
    cluster = make_cluster(max_num_seqs=16, **config)
    cluster.join(num_blocks=256, faults=f"oom=*>{limit}")
    requests = [make_request(f"r{i}", 5 + i, 6 + i % 5) for i in range(16)]
    cluster.submit(*requests)
    assert_served(cluster, *requests)
    assert cluster.rejected == {}
    assert set(cluster.core.replicas) == {1}


def test_steps_are_half_as_large_after_one_that_ran_out(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_num_seqs=8, max_num_batched_tokens=64)
    replica = cluster.join(num_blocks=256, faults="oom=*>4")
    cluster.submit(*(make_request(f"r{i}", 6, 40) for i in range(8)))
    cluster.step()
    size = cluster.core.replicas[1].size
    assert (size.tokens, size.seqs) == (24, 4)
    step_until(cluster, lambda: len(cluster.core.replicas[1].running) == 4)
    failed = len(plans(replica))
    for _ in range(20):
        cluster.step()
    assert all(len(plan.work) <= 4 for plan in plans(replica)[failed:])


def test_steps_grow_again(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_num_seqs=4, max_num_batched_tokens=64)
    cluster.join(num_blocks=256, faults=f"oom={FIRST}>3")
    # The first of them is the fault's, and ends soon.
    requests = [starting("r0", 6, 3), *(starting(f"r{i}", 6, 2 * MIN_PATIENCE + 20, first=1) for i in range(1, 4))]
    cluster.submit(*requests)
    cluster.step()
    assert cluster.core.replicas[1].size.seqs == 2
    step_until(cluster, lambda: len(cluster.core.replicas[1].running) == 3)
    assert_served(cluster, *requests)


def test_a_request_that_finds_no_memory_alone_is_refused_and_no_other(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_num_batched_tokens=64)
    cluster.join(num_blocks=256, faults=f"oom={FIRST}")
    others = [make_request(f"r{i}", 9, 9) for i in range(5)]
    cluster.submit(*others[:2], starting("large", 50, 9), *others[2:])
    assert_served(cluster, *others)
    assert cluster.rejected.keys() == {"large"}
    assert cluster.rejected["large"].reason is RejectReason.OUT_OF_MEMORY


def test_a_decode_that_finds_no_memory_alone_twice_is_refused(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    replica = cluster.join(num_blocks=256, faults=f"oom={FIRST}@4")
    cluster.submit(large := starting("large", 50, 9))
    cluster.run()
    assert cluster.rejected["large"].reason is RejectReason.OUT_OF_MEMORY
    assert cluster.tokens["large"] == reference_tokens(large)[:4]
    assert len([plan for plan in plans(replica) if plan.starts]) > 1


@pytest.mark.parametrize("block_size", [1, 4])
def test_several_sequences_of_one_request_are_no_reason_to_wait_for_ever(
    make_cluster: MakeCluster, block_size: int
) -> None:
    cluster = make_cluster(max_num_seqs=8)
    cluster.join(num_blocks=512, block_size=block_size, faults="oom=*>3")
    several = make_request("several", 9, 9, num_sequences=3, temperature=1.0)
    others = [make_request(f"r{i}", 9, 9) for i in range(5)]
    cluster.submit(*others, several)
    assert_served(cluster, several, *others)
    assert cluster.rejected == {}


def test_a_request_of_more_sequences_than_there_is_memory_for_is_refused(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_num_seqs=8)
    cluster.join(num_blocks=512, faults="oom=*>3")
    cluster.submit(make_request("several", 9, 9, num_sequences=4, temperature=1.0), other := make_request("r", 9, 9))
    assert_served(cluster, other)
    assert {name: each.reason for name, each in cluster.rejected.items()} == {"several": RejectReason.OUT_OF_MEMORY}


def test_requests_that_find_no_memory_beside_each_other_are_never_refused(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join(num_blocks=256, faults="oom=*>1")
    # Long enough for steps to grow and find no memory three times.
    requests = [make_request(name, 1, 4 * MIN_PATIENCE) for name in "ab"]
    cluster.submit(*requests)
    assert_served(cluster, *requests)
    assert cluster.rejected == {}


def test_steps_have_room_for_all_sequences_that_run(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.join(num_blocks=256, block_size=1)
    cluster.core.replicas[1].size.ran_out(2, 2)
    cluster.submit(several := make_request("several", 5, 9, num_sequences=4, temperature=1.0))
    assert_served(cluster, several)


def test_a_prefix_that_finds_no_memory_is_given_up(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_num_batched_tokens=64)
    cluster.join(num_blocks=256, faults=f"oom={FIRST}")
    cluster.handle(PrefixPinned(Prefix("p", [FIRST] * 40)))
    step_until(cluster, lambda: bool(cluster.given_up), 30)
    assert [given_up.name for given_up in cluster.given_up] == ["p"]


def test_what_failed_otherwise_shrinks_nothing(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_num_batched_tokens=64)
    cluster.join()
    cluster.submit(request := make_request("r", 9, 9))
    cluster.step(fail=True)
    assert cluster.core.replicas[1].size.tokens == 64
    assert_served(cluster, request)


def test_a_swapped_group_of_more_sequences_than_a_step_has_tokens_comes_back(make_cluster: MakeCluster) -> None:
    """`first` runs out of memory again and again, after which a step has a block's four tokens; eight wait for them."""
    cluster = make_cluster()
    cluster.join(num_blocks=48, num_cpu_blocks=48, faults=f"oom={FIRST}@14")
    first = starting("first", 4, 20, num_sequences=8, temperature=1.0)
    second = starting("second", 4, 20, first=1, num_sequences=8, temperature=1.0)
    cluster.submit(first, second)
    size = cluster.core.replicas[1].size
    step_until(cluster, lambda: size.tokens == 4 and bool(cluster.core.replicas[1].swapped))
    assert_served(cluster, second)
    assert {name: each.reason for name, each in cluster.rejected.items()} == {"first": RejectReason.OUT_OF_MEMORY}


def test_a_swapped_group_comes_back_to_a_step_of_a_single_token(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(watermark=0.0, max_num_seqs=16)
    cluster.join(num_blocks=48, num_cpu_blocks=48)
    requests = [make_request(name, 4, 20, num_sequences=8, temperature=1.0) for name in ("first", "second")]
    cluster.submit(*requests)
    replica = cluster.core.replicas[1]
    step_until(cluster, lambda: bool(replica.swapped))
    replica.size.tokens = replica.size.seqs = 1
    assert_served(cluster, *requests)
