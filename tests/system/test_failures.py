"""Any process may be killed: streams go on with the tokens they would have had, and nothing stays behind."""

import re
import resource
import signal
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from octavo.testbed.grpc_calls import reason_of
from octavo.testbed.stack import FinishedStream, Stack, collect, token_request
from octavo.testbed.tiny_model import write_byte_model
from octavo.v1 import generation_pb2
from octavo.wire.sampling import SamplingParams
from octavo.worker.fake.runner import FakeVocabulary, expected_tokens

from .conftest import StartStack, all_at_once

pytestmark = pytest.mark.system

NUM_TOKENS = 60
PROMPTS = [[(7 * i + j) % 250 for j in range(3 + 5 * i)] for i in range(6)]
REQUESTS = [token_request(prompt, NUM_TOKENS) for prompt in PROMPTS]


def assert_undisturbed(stack: Stack, generations: Sequence[FinishedStream]) -> None:
    vocabulary = FakeVocabulary.read(stack.model)
    sampling = SamplingParams(max_tokens=NUM_TOKENS)
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        assert generation.token_ids == expected_tokens(prompt, sampling, 0, NUM_TOKENS, vocabulary)


class Streams:
    """All of `REQUESTS` under way: the first events of each are read, the rest is not."""

    def __init__(self, stack: Stack, num_read: int = 3) -> None:
        self._streams = [stack.stream(request) for request in REQUESTS]
        self._read = [[next(stream) for _ in range(num_read)] for stream in self._streams]

    def finish(self) -> list[FinishedStream]:
        return [collect([*read, *stream]) for read, stream in zip(self._read, self._streams, strict=True)]

    def cancel(self) -> None:
        for stream in self._streams:
            stream.cancel()


def test_streams_wait_for_the_only_worker_to_come_back(new_stack: StartStack) -> None:
    stack = new_stack(OCTAVO_FAKE_STEP_MS="10").start_all()
    streams = Streams(stack)
    stack.kill("worker-0")
    stack.start("worker", "worker-1")
    assert_undisturbed(stack, streams.finish())
    stack.wait_idle()


def test_a_run_with_losses_can_be_replayed(new_stack: StartStack) -> None:
    stack = new_stack(OCTAVO_FAKE_STEP_MS="5", OCTAVO_NUM_BLOCKS="24", OCTAVO_BLOCK_SIZE="8")
    log = stack.directory / "events"
    stack.start("scheduler", OCTAVO_EVENT_LOG=str(log))
    stack.start("frontend")
    for name in ("worker-0", "worker-1"):
        stack.start("worker", name)
    stack.wait_ready()
    streams = Streams(stack)
    stack.kill("worker-0")
    assert_undisturbed(stack, streams.finish())
    stack.kill("scheduler", signal.SIGTERM)
    assert log.stat().st_mode & 0o077 == 0
    assert stack.start("replay", arguments=[str(log)]).wait(60) == 0
    assert "plans: all equal" in stack.log("replay")


def test_a_worker_whose_draft_model_guesses_dies_unnoticed(new_stack: StartStack) -> None:
    stack = new_stack(OCTAVO_SPECULATION="4", OCTAVO_FAKE_STEP_MS="30")
    stack.environment["OCTAVO_DRAFT_MODEL"] = str(stack.model)
    stack.start("scheduler")
    stack.start("frontend")
    for name in ("worker-0", "worker-1"):
        stack.start("worker", name)
    stack.wait_ready()
    streams = Streams(stack)
    stack.kill("worker-0")
    finished = streams.finish()
    assert_undisturbed(stack, finished)
    assert sum(each.usage.accepted_tokens for each in finished) > 0
    stack.wait_idle()


def test_a_prediction_outlives_the_scheduler_that_it_came_to(new_stack: StartStack) -> None:
    stack = new_stack(OCTAVO_SPECULATION="8", OCTAVO_FAKE_STEP_MS="50").start_all()
    request = token_request([7] * 9, 160)
    expected = stack.generate(request).token_ids
    predicted = token_request(
        [7] * 9, 160, prediction=generation_pb2.Prediction(token_ids=generation_pb2.TokenIds(ids=expected))
    )
    stream = stack.stream(predicted)
    events = [next(stream)]
    while not events[-1].HasField("delta"):
        events.append(next(stream))
    stack.kill("scheduler")
    stack.start_named("scheduler")
    events += stream
    got = [token_id for event in events for token_id in event.delta.token_ids]
    assert got == expected
    usage = next(event.usage for event in events if event.HasField("usage"))
    # The new scheduler has no other text to copy the rest from: the store of the old one is gone with it.
    assert usage.accepted_prediction_tokens > 60
    stack.wait_idle()


def test_a_dead_frontends_requests_are_dropped_with_its_lease(new_stack: StartStack) -> None:
    stack = new_stack(OCTAVO_FAKE_STEP_MS="200").start_all()
    streams = Streams(stack, num_read=1)
    assert stack.load().running == len(REQUESTS)
    stack.kill("frontend")
    stack.wait_idle()
    streams.cancel()
    assert stack.load().frontends == 0
    stack.start("frontend")
    stack.wait_ready()
    assert len(stack.generate(token_request(PROMPTS[0], 2)).token_ids) == 2


def test_a_stopped_frontend_lets_its_streams_end(new_stack: StartStack) -> None:
    stack = new_stack(OCTAVO_FAKE_STEP_MS="5").start_all()
    streams = Streams(stack)
    stack.processes["frontend"].send_signal(signal.SIGTERM)
    stack.wait_for(lambda: stack.health() != health_pb2.HealthCheckResponse.SERVING)
    assert_undisturbed(stack, streams.finish())
    assert stack.processes["frontend"].wait(60) == 0


def test_a_tiny_pool_preempts_and_changes_no_token(new_stack: StartStack) -> None:
    stack = new_stack(OCTAVO_NUM_BLOCKS="12", OCTAVO_BLOCK_SIZE="8").start_all()
    generations = [collect(stream) for stream in all_at_once(stack, REQUESTS)]
    assert_undisturbed(stack, generations)
    assert sum(generation.usage.preemptions for generation in generations) > 0
    assert stack.load().preemptions > 0
    stack.wait_idle()


def test_requests_wait_for_a_scheduler_and_a_worker_that_are_still_starting(new_stack: StartStack) -> None:
    stack = new_stack()
    stack.start("frontend")
    stack.wait_for(lambda: stack.health("") == health_pb2.HealthCheckResponse.SERVING)
    assert stack.health() == health_pb2.HealthCheckResponse.NOT_SERVING
    streams = [stack.stream(request) for request in REQUESTS]
    stack.start("scheduler")
    stack.start("worker")
    assert_undisturbed(stack, [collect(stream) for stream in streams])


@pytest.mark.parametrize(("running", "reason"), [((), "SCHEDULER_UNREACHABLE"), (("scheduler",), "NO_WORKER")])
def test_but_not_for_ever(new_stack: StartStack, running: Sequence[str], reason: str) -> None:
    stack = new_stack(OCTAVO_SCHEDULER_GRACE="0.5", OCTAVO_WORKER_GRACE="0.5")
    for command in ("frontend", *running):
        stack.start(command)
    stack.wait_for(lambda: stack.health("") == health_pb2.HealthCheckResponse.SERVING)
    with pytest.raises(grpc.RpcError) as error:
        stack.generate(REQUESTS[0])
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert reason_of(error.value) == reason


def test_a_worker_with_another_model_is_turned_away_with_the_reason(new_stack: StartStack, tmp_path: Path) -> None:
    stack = new_stack().start_all()
    write_byte_model(tmp_path / "other", max_model_len=512)
    stranger = stack.start("worker", "stranger", OCTAVO_MODEL=str(tmp_path / "other"))
    assert stranger.wait(60) == 1
    assert "start it with the same model directory" in stack.log("stranger")
    del stack.processes["stranger"]
    assert_undisturbed(stack, stack.generate_all(REQUESTS))
    stack.assert_alive()


def test_a_frontend_with_another_model_is_never_ready(new_stack: StartStack, tmp_path: Path) -> None:
    stack = new_stack(OCTAVO_WORKER_GRACE="0.5")
    write_byte_model(tmp_path / "other", max_model_len=512)
    stack.start("scheduler")
    stack.start("worker")
    stack.start("frontend", OCTAVO_MODEL=str(tmp_path / "other"))
    stack.wait_for(lambda: len(stack.load().workers) == 1)
    stack.wait_for(lambda: stack.health("") == health_pb2.HealthCheckResponse.SERVING)
    with pytest.raises(grpc.RpcError) as error:
        stack.generate(REQUESTS[0])
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert stack.health() == health_pb2.HealthCheckResponse.NOT_SERVING


def test_aborting_by_id_ends_the_stream_and_frees_its_blocks(new_stack: StartStack) -> None:
    stack = new_stack(OCTAVO_FAKE_STEP_MS="20").start_all()
    stream = stack.stream(token_request(PROMPTS[0], 500, request_id="mine"))
    next(stream)
    request = generation_pb2.AbortRequest(request_ids=["mine", "nobody's"])
    assert list(stack.generation.Abort(request, timeout=60).aborted) == ["mine"]
    with pytest.raises(grpc.RpcError) as error:
        list(stream)
    assert error.value.code() is grpc.StatusCode.CANCELLED
    stack.wait_idle()


def test_a_full_disk_under_the_event_log_ends_the_log_alone(new_stack: StartStack) -> None:
    stack = new_stack(OCTAVO_FAKE_STEP_MS="5", OCTAVO_METRICS_LISTEN="127.0.0.1:0")
    log = stack.directory / "events"
    stack.start("scheduler", OCTAVO_EVENT_LOG=str(log))
    stack.start("frontend")
    stack.start("worker", "worker-0")
    stack.wait_ready()
    scheduler = stack.processes["scheduler"]
    room = log.stat().st_size + 10_000
    # As a full disk would, the kernel takes a part of what is written and then nothing.
    resource.prlimit(scheduler.pid, resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
    for _ in range(3):
        assert_undisturbed(stack, Streams(stack).finish())
    stack.wait_for(lambda: log.stat().st_size == room)
    assert_undisturbed(stack, Streams(stack).finish())
    assert scheduler.poll() is None
    assert stack.log("scheduler").count("event log: [Errno 27]") == 1
    assert 'octavo_optional_failures_total{what="event_log"} 1.0' in metrics_of(stack, "scheduler")
    assert stack.kill("scheduler", signal.SIGTERM) == 0
    assert stack.start("replay", arguments=[str(log)]).wait(60) == 0
    assert "plans: all equal" in stack.log("replay")


def metrics_of(stack: Stack, name: str) -> str:
    (url,) = re.findall(r"http://127\.0\.0\.1:\d+/metrics", stack.log(name))
    with urllib.request.urlopen(url, timeout=60) as response:
        return str(response.read(), "utf-8")
