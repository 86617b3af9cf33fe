"""How many tokens a step computes: what was asked for, or what suits the device."""

from pathlib import Path

import msgspec
import pytest

from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.core.events import ReplicaJoined
from octavo.scheduler.core.explain import explain
from octavo.testing.cluster import FakeReplica, make_request, write_fake_model
from octavo.testing.scenarios import plans
from octavo.worker.fake.runner import FakeRunner

from ...conftest import MakeCluster


@pytest.mark.parametrize(
    ("device", "budget"), [("cpu", 512), ("fake", 512), ("cuda", 8192), ("cuda:1", 8192), ("openvino", 512)]
)
def test_follows_the_device_unless_one_is_given(device: str, budget: int) -> None:
    assert SchedulerConfig().token_budget(device) == budget
    assert SchedulerConfig(max_num_batched_tokens=99).token_budget(device) == 99


@pytest.mark.parametrize(
    ("config", "on_cpu", "on_gpu", "anywhere"),
    [
        (SchedulerConfig(), 256, 256, 256),
        (SchedulerConfig(max_num_seqs=1000), 512, 1000, 512),
        (SchedulerConfig(max_num_seqs=1000, max_num_batched_tokens=700), 700, 700, 700),
        (SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=700), 8, 8, 8),
    ],
)
def test_limits_the_sequences_that_run_at_once(
    config: SchedulerConfig, on_cpu: int, on_gpu: int, anywhere: int
) -> None:
    assert (config.max_parallel_on("cpu"), config.max_parallel_on("cuda:0")) == (on_cpu, on_gpu)
    assert config.max_parallel == anywhere


def test_of_each_replica_is_its_own(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """Prompts of 1,000 tokens on a CPU and on a GPU that serve one scheduler."""
    cluster = make_cluster(max_steps_in_flight=1)
    for incarnation, device in ((1, "cpu"), (2, "cuda:0")):
        runner = FakeRunner(write_fake_model(tmp_path / "model"), block_size=16, num_blocks=200)
        replica = cluster.replicas[incarnation] = FakeReplica(runner, incarnation)
        replica.hello = msgspec.structs.replace(replica.hello, device=device)
        cluster.handle(ReplicaJoined(replica.hello))
    cluster.submit(*(make_request(name, 1000, max_tokens=2) for name in ("a", "b", "c", "d")))
    cluster.schedule()
    found = {
        incarnation: sum(work.num_tokens for work in plans(replica)[0].work)
        for incarnation, replica in cluster.replicas.items()
    }
    assert found[1] == 512
    assert found[2] in (2000, 3000)
    cluster.step()
    assert not any(
        explanation.obstacles
        for name in cluster.groups
        for explanation in explain(cluster.core.state, cluster.core.policy, name, 1.0)
    )
    cluster.run()
