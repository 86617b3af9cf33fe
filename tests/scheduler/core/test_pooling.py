"""Requests for an output of the model: computed whole, with no blocks, under the rules that hold for all requests."""

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.scheduler.core.events import LossCause, StepAnswered, WorkerDrained
from octavo.testing.cluster import Cluster, FakeReplica, make_request, resubmitted, write_fake_model
from octavo.wire.pooling import PoolingParams, PoolingTask
from octavo.wire.requests import FinishReason, RejectReason, Request
from octavo.wire.steps import StepOutcome, StepPlan, StepResult
from octavo.wire.versions import encode_for
from octavo.worker.fake.encoder import FakeEncoderRunner, expected_output
from octavo.worker.fake.faults import parse_faults

LONGEST = 64


@pytest.fixture
def encoders(tmp_path: Path) -> Path:
    return write_encoder(tmp_path / "encoder")


def write_encoder(directory: Path) -> Path:
    write_fake_model(directory, LONGEST)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "model_type": "bert"}))
    return directory


def text(request_id: str, num_tokens: int, *, pair_start: int = 0, **changes: Any) -> Request:
    request = make_request(request_id, num_tokens, 1, **changes)
    return msgspec.structs.replace(request, pooling=PoolingParams(PoolingTask.EMBED, pair_start))


def output_of(request: Request) -> bytes:
    assert request.pooling is not None
    return expected_output(request.prompt_token_ids, request.pooling.pair_start)


def join(cluster: Cluster, directory: Path, incarnation: int = 1, faults: str = "", **options: Any) -> FakeReplica:
    runner = FakeEncoderRunner(directory, block_size=16, faults=parse_faults(faults))
    return cluster.join(incarnation, runner=runner, **options)


def planned(replica: FakeReplica) -> list[list[int]]:
    """Returns how many tokens of each sequence each plan computes."""
    plans = [message for message in replica.received if isinstance(message, StepPlan)]
    return [[work.num_tokens for work in plan.work] for plan in plans if plan.work]


def test_texts_share_steps_as_far_as_the_budget_goes_and_none_is_cut(encoders: Path) -> None:
    cluster = Cluster(encoders, max_num_batched_tokens=LONGEST, max_num_seqs=8)
    replica = join(cluster, encoders)
    texts = [text(f"t{size}", size, pair_start=size // 3) for size in (30, 30, 40, 5, 64, 1)]
    texts = [msgspec.structs.replace(each, request_id=f"{i}") for i, each in enumerate(texts)]
    cluster.submit(*texts)
    cluster.run()
    assert cluster.pooled == {each.request_id: output_of(each) for each in texts}
    assert set(cluster.ended.values()) == {FinishReason.STOP}
    steps = planned(replica)
    assert sorted(size for step in steps for size in step) == [1, 5, 30, 30, 40, 64]
    assert all(sum(step) <= LONGEST for step in steps)
    assert len(steps) < len(texts)
    # One delta each, of no token.
    assert all([delta.token_ids for delta in deltas] == [[]] for deltas in cluster.deltas.values())


def test_a_text_longer_than_the_usual_budget_is_computed_whole(encoders: Path) -> None:
    cluster = Cluster(encoders, max_num_batched_tokens=16, max_num_seqs=4)
    replica = join(cluster, encoders)
    long = text("long", LONGEST)
    cluster.submit(text("short", 3), long)
    cluster.run()
    assert cluster.pooled["long"] == output_of(long)
    assert [LONGEST] in planned(replica)


def test_as_long_as_the_context_is_no_token_too_long(encoders: Path) -> None:
    cluster = Cluster(encoders)
    join(cluster, encoders)
    cluster.submit(text("fits", LONGEST), text("too-long", LONGEST + 1))
    cluster.run()
    assert list(cluster.pooled) == ["fits"]
    assert cluster.rejected["too-long"].reason is RejectReason.PROMPT_TOO_LONG


def test_two_steps_are_under_way_at_once(encoders: Path) -> None:
    cluster = Cluster(encoders, max_num_batched_tokens=LONGEST, max_num_seqs=64)
    replica = join(cluster, encoders)
    cluster.submit(*(text(f"{i}", LONGEST) for i in range(3)))
    cluster.schedule()
    cluster.schedule()
    assert len(replica.plans) == 2
    cluster.run()
    assert len(cluster.pooled) == 3


@pytest.mark.parametrize("num_answered", [0, 1])
def test_texts_of_a_lost_worker_are_computed_elsewhere(encoders: Path, num_answered: int) -> None:
    cluster = Cluster(encoders, max_num_batched_tokens=LONGEST, max_num_seqs=64)
    join(cluster, encoders, 1)
    texts = [text(f"{i}", 20) for i in range(12)]
    cluster.submit(*texts)
    cluster.schedule()
    cluster.schedule()
    for _ in range(num_answered):
        cluster.answer(1)
    cluster.leave(1, LossCause.OVERDUE)
    assert len(cluster.pooled) < len(texts)
    join(cluster, encoders, 2)
    cluster.run()
    assert cluster.pooled == {each.request_id: output_of(each) for each in texts}


def test_a_drained_worker_ends_its_texts_or_gives_them_away(encoders: Path) -> None:
    cluster = Cluster(encoders, max_num_batched_tokens=LONGEST)
    join(cluster, encoders, 1)
    texts = [text(f"{i}", 40) for i in range(6)]
    cluster.submit(*texts)
    cluster.schedule()
    cluster.handle(WorkerDrained("worker-1", 0.0))
    join(cluster, encoders, 2)
    cluster.tick(1.0)
    cluster.run()
    cluster.tick(1.0)
    assert cluster.pooled == {each.request_id: output_of(each) for each in texts}
    assert list(cluster.replicas) == [2]


def test_a_failed_step_is_computed_again_and_one_that_always_fails_ends_its_texts(encoders: Path) -> None:
    cluster = Cluster(encoders)
    join(cluster, encoders)
    cluster.submit(text("a", 9), text("b", 9))
    cluster.step(fail=True)
    assert not cluster.rejected
    cluster.run()
    assert len(cluster.pooled) == 2
    cluster.submit(text("c", 9))
    for _ in range(20):
        if "c" in cluster.rejected:
            break
        cluster.step(fail=True)
    assert cluster.rejected["c"].reason is RejectReason.STEP_FAILED


def test_a_text_for_which_memory_never_suffices_ends_and_others_do_not(encoders: Path) -> None:
    cluster = Cluster(encoders, max_num_seqs=8)
    big = text("big", 50)
    marked = "+".join(map(str, big.prompt_token_ids[:3]))
    join(cluster, encoders, faults=f"oom={marked}")
    small = [text(f"s{i}", 4) for i in range(6)]
    cluster.submit(big, *small)
    cluster.run()
    assert cluster.rejected["big"].reason is RejectReason.OUT_OF_MEMORY
    assert set(cluster.pooled) == {each.request_id for each in small}


def test_an_output_that_is_not_finite_ends_its_text_alone(encoders: Path) -> None:
    cluster = Cluster(encoders)
    bad, good = text("bad", 7), text("good", 7)
    join(cluster, encoders, faults="nan=" + "+".join(map(str, bad.prompt_token_ids[:3])))
    cluster.submit(bad, good)
    cluster.run()
    assert cluster.rejected["bad"].reason is RejectReason.NOT_FINITE
    assert cluster.pooled == {"good": output_of(good)}


def test_a_model_is_asked_for_nothing_that_it_cannot_do(encoders: Path, tmp_path: Path) -> None:
    cluster = Cluster(encoders)
    classes = msgspec.structs.replace(text("classes", 5), pooling=PoolingParams(PoolingTask.CLASSIFY))
    # One comes before any worker has said what it can.
    cluster.submit(make_request("early", 5, 3))
    join(cluster, encoders)
    cluster.submit(make_request("late", 5, 3), classes)
    assert {request_id: each.reason for request_id, each in cluster.rejected.items()} == dict.fromkeys(
        ("early", "late", "classes"), RejectReason.WRONG_TASK
    )
    assert "embed" in cluster.rejected["late"].detail
    generating = Cluster(write_fake_model(tmp_path / "decoder"))
    generating.join()
    generating.submit(text("vector", 5))
    assert generating.rejected["vector"].reason is RejectReason.WRONG_TASK


def test_a_frontend_of_the_schema_before_is_told_in_words_that_it_knows(encoders: Path) -> None:
    cluster = Cluster(encoders)
    join(cluster, encoders)
    cluster.submit(make_request("late", 5, 3))
    frame = encode_for(cluster.rejected["late"], 8)
    assert frame is not None
    assert msgspec.msgpack.decode(frame)[4] == "model_mismatch"


def test_a_request_for_an_output_has_one_sequence_and_no_tokens(encoders: Path) -> None:
    cluster = Cluster(encoders)
    join(cluster, encoders)
    cluster.submit(resubmitted(text("tokens", 5), [1]), text("several", 5, num_sequences=2))
    assert {each.reason for each in cluster.rejected.values()} == {
        RejectReason.ALREADY_COMPLETE,
        RejectReason.TOO_MANY_SEQUENCES,
    }


def test_an_aborted_text_frees_its_place_and_its_output_is_dropped(encoders: Path) -> None:
    cluster = Cluster(encoders, max_num_seqs=1)
    join(cluster, encoders)
    cluster.submit(text("gone", 5), text("stays", 5))
    cluster.schedule()
    cluster.abort("gone")
    cluster.run()
    assert list(cluster.pooled) == ["stays"]


def test_a_text_submitted_again_is_answered_once_under_its_new_attempt(encoders: Path) -> None:
    cluster = Cluster(encoders)
    join(cluster, encoders)
    first = text("t", 5)
    cluster.submit(first)
    cluster.schedule()
    cluster.submit(resubmitted(first))
    cluster.run()
    assert [delta.attempt for delta in cluster.deltas["t", 0]] == [2]


def test_tenants_share_a_worker_of_texts(encoders: Path) -> None:
    cluster = Cluster(encoders, max_num_batched_tokens=LONGEST, max_num_seqs=64, max_steps_in_flight=1)
    join(cluster, encoders)
    cluster.submit(*(text(f"many-{i}", 32, tenant="many") for i in range(20)))
    cluster.submit(*(text(f"few-{i}", 32, tenant="few") for i in range(4)))
    for _ in range(5):
        cluster.step()
    assert sum(name.startswith("few") for name in cluster.pooled) == 4
    cluster.run()


def test_a_text_of_higher_priority_comes_first(encoders: Path) -> None:
    cluster = Cluster(encoders, max_num_batched_tokens=LONGEST, max_steps_in_flight=1)
    join(cluster, encoders)
    cluster.submit(*(text(f"{i}", LONGEST) for i in range(4)), text("urgent", LONGEST, priority=5))
    cluster.step()
    assert list(cluster.pooled) == ["urgent"]
    cluster.run()


def test_a_text_that_waited_too_long_is_told_so(encoders: Path) -> None:
    cluster = Cluster(encoders)
    join(cluster, encoders)
    cluster.abort("nobody")
    late = msgspec.structs.replace(text("late", 5), max_queue_ms=100)
    cluster.submit(late)
    cluster.now += 1.0
    cluster.schedule()
    assert cluster.rejected["late"].reason is RejectReason.QUEUE_TIMEOUT


def test_an_answer_without_an_output_that_was_asked_for_loses_the_worker(encoders: Path) -> None:
    cluster = Cluster(encoders)
    replica = join(cluster, encoders)
    cluster.submit(text("t", 5))
    cluster.schedule()
    whole = replica.execute()
    assert whole.outcome is StepOutcome.DONE
    lacking: StepResult = msgspec.structs.replace(whole, pooled=[])
    cluster.handle(StepAnswered(1, lacking))
    assert not cluster.replicas
    join(cluster, encoders, 2)
    cluster.run()
    assert list(cluster.pooled) == ["t"]


@given(seed=st.integers(0, 2**32))
@settings(max_examples=15, deadline=None)
def test_whatever_happens_each_text_gets_its_output_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    _random_history(tmp_path_factory.mktemp("model"), seed)


@pytest.mark.deep
@given(seed=st.integers(0, 2**32))
@settings(max_examples=500, deadline=None)
def test_whatever_happens_each_text_gets_its_output_or_an_error_at_length(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    _random_history(tmp_path_factory.mktemp("model"), seed)


def _random_history(directory: Path, seed: int) -> None:
    """Texts come and go, and so do workers, of which steps fail. The cluster checks every invariant after every
    event."""
    chance = random.Random(seed)
    directory = write_encoder(directory)
    cluster = Cluster(
        directory,
        max_num_batched_tokens=chance.choice([16, LONGEST, 200]),
        max_num_seqs=chance.choice([1, 4, 64]),
        max_steps_in_flight=chance.choice([1, 2]),
    )
    join(cluster, directory)
    texts: dict[str, Request] = {}
    aborted: set[str] = set()
    for number in range(60):
        match chance.randrange(10):
            case 0 | 1 | 2 | 3:
                size = chance.randint(1, LONGEST)
                new = text(f"{number}", size, pair_start=chance.randrange(size), tenant=chance.choice("ab"))
                texts[new.request_id] = new
                cluster.submit(new)
            case 4 if texts:
                aborted.add(gone := chance.choice(list(texts)))
                cluster.abort(gone)
            case 5 if len(cluster.replicas) > 1:
                cluster.leave(chance.choice(list(cluster.replicas)), LossCause.GOODBYE)
            case 6 if len(cluster.replicas) < 3:
                join(cluster, directory, 100 + number)
            case 7:
                cluster.step(fail=True)
            case _:
                cluster.step()
    cluster.run()
    for request_id, request in texts.items():
        if request_id in cluster.pooled:
            assert cluster.pooled[request_id] == output_of(request)
        else:
            assert request_id in aborted | set(cluster.rejected)
    assert all(each.reason is RejectReason.STEP_FAILED for each in cluster.rejected.values())
