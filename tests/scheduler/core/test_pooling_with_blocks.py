"""Requests for outputs of a decoder: computed in chunks, over KV blocks that come back, whatever happens in between."""

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.scheduler.core.config import Preemption
from octavo.scheduler.core.events import LossCause, PrefixPinned, WorkerDrained
from octavo.scheduler.core.sequence import SequenceStatus
from octavo.scheduler.core.step.builder import StepBuilder
from octavo.testing.cluster import Cluster, FakeDisk, FakeReplica, make_request, write_fake_model
from octavo.testing.fakes.spoilable import SpoilableRunner
from octavo.wire.pooling import PoolingParams, PoolingTask
from octavo.wire.requests import Prefix, RejectReason, Request
from octavo.wire.steps import PullBlocks, StepPlan
from octavo.worker.fake.encoder import expected_output

BLOCK = 4
POOLINGS = ("last", "mean")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_fake_model(tmp_path)


def text(request_id: str, num_tokens: int, **changes: Any) -> Request:
    request = make_request(request_id, num_tokens, 1, **changes)
    return msgspec.structs.replace(request, pooling=PoolingParams(PoolingTask.EMBED))


def join(cluster: Cluster, directory: Path, pooling: str, incarnation: int = 1, **options: Any) -> FakeReplica:
    sizes = {name: options.pop(name, size) for name, size in (("num_blocks", 64), ("num_cpu_blocks", 0))}
    windows = options.pop("windows", (0,))
    runner = SpoilableRunner(directory, block_size=BLOCK, windows=windows, pooling=pooling, **sizes)
    return cluster.join(incarnation, runner=runner, **options)


def answered(cluster: Cluster, *texts: Request) -> bool:
    return cluster.pooled == {each.request_id: expected_output(each.prompt_token_ids) for each in texts}


def plans(replica: FakeReplica) -> list[StepPlan]:
    return [message for message in replica.received if isinstance(message, StepPlan)]


def starts(replica: FakeReplica) -> list[int]:
    """Returns how many tokens each sequence was said to have computed when it started."""
    return [start.num_computed for plan in plans(replica) for start in plan.starts]


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("windows", [(0,), (0, 8)])
def test_a_text_is_computed_in_chunks_over_blocks_that_come_back(
    model: Path, pooling: str, windows: tuple[int, ...]
) -> None:
    cluster = Cluster(model, max_num_batched_tokens=16)
    replica = join(cluster, model, pooling, windows=windows)
    texts = text("long", 50), text("short", 3), text("one", 1)
    cluster.submit(*texts)
    cluster.run()
    assert answered(cluster, *texts)
    assert sum(len(plan.work) for plan in plans(replica)) > len(texts)
    core = cluster.core.replicas[1]
    assert not core.running
    assert core.kv.num_free == 64


def test_the_last_state_is_found_behind_a_prefix_and_a_mean_is_not(model: Path) -> None:
    found = {}
    for pooling in POOLINGS:
        cluster = Cluster(model)
        replica = join(cluster, model, pooling)
        texts = [text(f"{number}", 30, shared=24) for number in range(3)]
        cluster.submit(texts[0])
        cluster.run()
        cluster.submit(*texts[1:])
        cluster.run()
        assert answered(cluster, *texts)
        found[pooling] = starts(replica)
        assert [each.cached_prompt_tokens for _, deltas in sorted(cluster.deltas.items()) for each in deltas] == (
            found[pooling]
        )
    assert found == {"last": [0, 24, 24], "mean": [0, 0, 0]}


def test_nothing_of_a_mean_is_read_from_a_disk_or_from_cpu_memory(model: Path) -> None:
    for pooling, finds in (("last", True), ("mean", False)):
        cluster, disk = Cluster(model), FakeDisk()
        join(cluster, model, pooling, num_blocks=12, num_cpu_blocks=12, disk=disk, mirror=True)
        texts = [text(name, 40, shared=36 if name in "ad" else 0) for name in "abcd"]
        for each in texts:
            cluster.submit(each)
            cluster.run()
        assert answered(cluster, *texts)
        assert bool(disk) is finds
        assert any(each.cached_prompt_tokens for each in cluster.deltas["d", 0]) is finds


@pytest.mark.parametrize(("pooling", "status"), [("last", SequenceStatus.SWAPPED), ("mean", SequenceStatus.WAITING)])
def test_blocks_are_no_use_to_a_mean_without_what_was_gathered(
    model: Path, pooling: str, status: SequenceStatus
) -> None:
    cluster = Cluster(model, max_num_batched_tokens=16, preemption=Preemption.SWAP, max_steps_in_flight=1)
    join(cluster, model, pooling, num_cpu_blocks=64)
    cluster.submit(text("one", 60))
    cluster.step()
    core = cluster.core.replicas[1]
    [group] = core.running
    # Nothing that pools grows, so nothing makes way of itself.
    StepBuilder(core, 16).preempt(group)
    assert group.status is status


@pytest.mark.parametrize("pooling", POOLINGS)
def test_texts_of_a_lost_worker_are_computed_elsewhere_from_their_first_token(model: Path, pooling: str) -> None:
    cluster = Cluster(model, max_num_batched_tokens=16)
    join(cluster, model, pooling)
    texts = [text(f"{number}", 30) for number in range(4)]
    cluster.submit(*texts)
    cluster.step()
    cluster.step()
    cluster.leave(1, LossCause.OVERDUE)
    assert len(cluster.pooled) < len(texts)
    other = join(cluster, model, pooling, 2)
    cluster.run()
    assert answered(cluster, *texts)
    assert not any(starts(other))


def test_off_a_drained_worker_texts_move_but_for_means_which_begin_anew(model: Path) -> None:
    moved = {}
    for pooling in POOLINGS:
        cluster = Cluster(model, max_num_batched_tokens=8)
        join(cluster, model, pooling, num_cpu_blocks=64, is_read=True)
        texts = [text(f"{number}", 60) for number in range(2)]
        cluster.submit(*texts)
        cluster.step()
        cluster.step()
        join(cluster, model, pooling, 2, num_cpu_blocks=64, is_read=True)
        replicas = list(cluster.replicas.values())
        cluster.handle(WorkerDrained("worker-1", 0.0))
        cluster.run()
        assert answered(cluster, *texts)
        moved[pooling] = any(isinstance(message, PullBlocks) for each in replicas for message in each.received)
    assert moved == {"last": True, "mean": False}


def test_workers_that_pool_in_other_ways_do_not_serve_together(model: Path) -> None:
    cluster = Cluster(model)
    join(cluster, model, "last")
    replica = join(cluster, model, "mean", 2)
    assert "start it with the same model" in str(replica.received)
    assert list(cluster.core.replicas) == [1]


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_prefix_is_pinned_where_it_is_of_use(model: Path, pooling: str) -> None:
    cluster = Cluster(model, max_pinned_share=0.5)
    replica = join(cluster, model, pooling)
    prefix = Prefix("instruction", list(range(22)))
    refusal = cluster.core.pin_refusal(prefix)
    if pooling == "mean":
        assert refusal is not None
        assert "outputs of all tokens" in refusal
        return
    assert refusal is None
    cluster.handle(PrefixPinned(prefix))
    cluster.step()
    one = text("one", 30, shared=22)
    cluster.submit(one)
    cluster.run()
    assert answered(cluster, one)
    assert starts(replica) == [0, 22]


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_text_is_too_long_for_the_context_or_for_the_blocks(model: Path, pooling: str) -> None:
    cluster = Cluster(model)
    replica = join(cluster, model, pooling, num_blocks=8)
    longest = replica.runner.model.max_model_len
    cluster.submit(text("context", longest + 1), text("blocks", 33), text("fits", 32))
    cluster.run()
    assert {name: each.reason for name, each in cluster.rejected.items()} == {
        "context": RejectReason.PROMPT_TOO_LONG,
        "blocks": RejectReason.NEVER_FITS_KV,
    }
    assert list(cluster.pooled) == ["fits"]


@pytest.mark.parametrize("pooling", POOLINGS)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=10, deadline=None)
def test_whatever_happens_each_text_gets_its_output(
    tmp_path_factory: pytest.TempPathFactory, pooling: str, seed: int
) -> None:
    _random_history(tmp_path_factory.mktemp("model"), pooling, seed)


@pytest.mark.deep
@pytest.mark.parametrize("pooling", POOLINGS)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_whatever_happens_each_text_gets_its_output_at_length(
    tmp_path_factory: pytest.TempPathFactory, pooling: str, seed: int
) -> None:
    _random_history(tmp_path_factory.mktemp("model"), pooling, seed)


def _random_history(directory: Path, pooling: str, seed: int) -> None:
    """Texts that begin alike come and go, and so do workers, of which steps fail, that give groups to each other, swap
    them, and have a disk. The cluster checks every invariant after every event."""
    chance = random.Random(seed)
    directory = write_fake_model(directory)
    cluster = Cluster(
        directory,
        max_num_batched_tokens=chance.choice([4, 16, 64]),
        max_num_seqs=chance.choice([2, 16]),
        max_steps_in_flight=chance.choice([1, 2]),
        preemption=chance.choice(list(Preemption)),
    )
    disk = chance.choice([None, FakeDisk()])
    options: dict[str, Any] = {
        "num_blocks": chance.choice([12, 40]),
        "num_cpu_blocks": chance.choice([0, 12]),
        "windows": chance.choice([(0,), (0, 8)]),
        "is_read": True,
        "disk": disk,
        "mirror": True,
    }
    if options["windows"] != (0,):
        options["num_blocks"] *= 2
    join(cluster, directory, pooling, **options)
    texts: dict[str, Request] = {}
    aborted: set[str] = set()
    for number in range(50):
        match chance.randrange(10):
            case 0 | 1 | 2 | 3:
                shared = chance.choice([0, 0, 10, 21])
                new = text(f"{number}", shared + chance.randint(1, 20), shared=shared, tenant=chance.choice("ab"))
                texts[new.request_id] = new
                cluster.submit(new)
            case 4 if texts:
                aborted.add(gone := chance.choice(list(texts)))
                cluster.abort(gone)
            case 5 if len(cluster.replicas) > 1:
                cluster.leave(chance.choice(list(cluster.replicas)), LossCause.GOODBYE)
            case 6 if len(cluster.replicas) < 3:
                join(cluster, directory, pooling, 100 + number, **options)
            case 7:
                cluster.step(fail=True)
            case _:
                cluster.step()
    cluster.run()
    for request_id, request in texts.items():
        if request_id in cluster.pooled:
            assert cluster.pooled[request_id] == expected_output(request.prompt_token_ids)
        else:
            assert request_id in aborted | set(cluster.rejected)
    assert all(each.reason is RejectReason.STEP_FAILED for each in cluster.rejected.values())
