"""A request goes where its prompt would be computed first: little to wait for, much of it cached, a fast worker."""

from msgspec import structs

from octavo.scheduler.core.events import StepAnswered
from octavo.testing.cluster import Cluster, make_request
from octavo.wire.steps import StepTimes

from ..conftest import MakeCluster


def home(cluster: Cluster, request_id: str) -> int:
    """The replica on which a request runs."""
    (found,) = (
        incarnation
        for incarnation, replica in cluster.core.replicas.items()
        for group in replica.running
        if group.request_id == request_id
    )
    return found


def step(cluster: Cluster, *, model_us: dict[int, int]) -> None:
    """A step of every replica that has a plan, and how long its model takes for it."""
    cluster.schedule()
    for incarnation, replica in cluster.replicas.items():
        if replica.plans:
            times = StepTimes(prepare_us=0, model_us=model_us[incarnation], sample_us=0)
            result = structs.replace(replica.execute(), times=times)
            cluster.handle(StepAnswered(incarnation, result))


def a_large_replica_with_a_long_prompt(make_cluster: MakeCluster, num_running: int) -> Cluster:
    """Two replicas. The second, for which alone they are small enough, has computed a prompt of 40 tokens that are
    everybody's, and runs `num_running` requests."""
    cluster = make_cluster(max_steps_in_flight=1)
    cluster.join(1, num_blocks=8, block_size=4)
    cluster.join(2, num_blocks=200, block_size=4)
    cluster.submit(make_request("long", 40, 1, shared=40))
    cluster.run()
    cluster.submit(*(make_request(f"running{i}", 40, 20) for i in range(num_running)))
    cluster.step()
    return cluster


def test_the_one_with_fewer_tokens_to_compute_is_chosen(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_steps_in_flight=1)
    cluster.join(1)
    cluster.submit(*(make_request(f"running{i}", 8, 20) for i in range(3)))
    cluster.step()
    cluster.join(2)
    cluster.submit(make_request("new", 8, 20))
    cluster.schedule()
    assert home(cluster, "new") == 2


def test_the_one_that_holds_the_prompt_is_chosen(make_cluster: MakeCluster) -> None:
    cluster = a_large_replica_with_a_long_prompt(make_cluster, num_running=0)
    cluster.submit(make_request("known", 12, 4, shared=8), make_request("new", 12, 4))
    cluster.schedule()
    assert (home(cluster, "known"), home(cluster, "new")) == (2, 1)


def test_what_is_held_counts_by_the_tokens_it_saves(make_cluster: MakeCluster) -> None:
    """Six wait on the second replica: a hit of eight tokens outweighs them, one of four does not."""
    cluster = a_large_replica_with_a_long_prompt(make_cluster, num_running=6)
    cluster.submit(make_request("most", 12, 4, shared=11), make_request("half", 12, 4, shared=7))
    cluster.schedule()
    assert (home(cluster, "most"), home(cluster, "half")) == (2, 1)


def test_the_faster_one_is_chosen(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(max_num_batched_tokens=8, max_steps_in_flight=1)
    cluster.join(1)
    cluster.join(2)
    cluster.submit(*(make_request(f"first{i}", 8, 2) for i in range(2)))
    for _ in range(2):
        step(cluster, model_us={1: 3000, 2: 1000})
    assert not cluster.groups
    cluster.submit(make_request("new", 8, 2))
    cluster.schedule()
    assert home(cluster, "new") == 2


def test_each_gets_work_by_its_speed(make_cluster: MakeCluster) -> None:
    """The first computes three times as much in a second as the second."""
    cluster = make_cluster(max_steps_in_flight=1)
    for incarnation in (1, 2):
        cluster.join(incarnation, num_blocks=1000)
    cluster.submit(*(make_request(f"first{i}", 8, 2) for i in range(2)))
    for _ in range(2):
        step(cluster, model_us={1: 1000, 2: 3000})
    cluster.submit(*(make_request(f"new{i}", 8, 2) for i in range(60)))
    cluster.schedule()
    running = [len(cluster.core.replicas[incarnation].running) for incarnation in (1, 2)]
    assert sum(running) == 60
    assert 2.0 < running[0] / running[1] < 6.0, running


def test_a_new_one_counts_as_fast_as_the_others(make_cluster: MakeCluster) -> None:
    """Neither everything goes there nor nothing."""
    cluster = make_cluster(max_steps_in_flight=1)
    cluster.join(1, num_blocks=1000)
    cluster.submit(make_request("first", 8, 2))
    step(cluster, model_us={1: 1000})
    cluster.join(2, num_blocks=1000)
    cluster.submit(*(make_request(f"new{i}", 8, 20) for i in range(20)))
    cluster.schedule()
    running = [len(cluster.core.replicas[incarnation].running) for incarnation in (1, 2)]
    assert sorted(running) == [10, 11]


def test_what_fits_only_a_large_one_waits_for_it(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(watermark=0.0)
    cluster.join(1, num_blocks=8)
    cluster.join(2, num_blocks=20)
    cluster.submit(make_request("full", 60, 20))
    cluster.step()
    cluster.submit(make_request("large", 40, 4))
    cluster.submit(make_request("small", 8, 4))
    cluster.step()
    assert (home(cluster, "full"), home(cluster, "small")) == (2, 1)
    assert [group.request_id for group in cluster.core.waiting] == ["large"]
    while "full" in cluster.groups:
        cluster.step()
    cluster.step()
    assert home(cluster, "large") == 2
