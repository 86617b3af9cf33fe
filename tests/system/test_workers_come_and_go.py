"""Workers join, are cordoned, drained and killed under load: streams go on with the tokens they would have had."""

import signal
from collections.abc import Iterable, Sequence
from itertools import chain

import pytest

from octavo.testbed.stack import FinishedStream, GenerateStream, Stack, collect, token_request
from octavo.testing.depth import deep
from octavo.v1 import admin_pb2 as pb
from octavo.v1.generation_pb2 import GenerateResponse
from octavo.wire.sampling import SamplingParams
from octavo.worker.fake.runner import FakeVocabulary, expected_tokens

from .conftest import StartStack, all_at_once

pytestmark = pytest.mark.system

PROMPTS = [[(7 * i + j) % 250 for j in range(3 + 5 * i)] for i in range(6)]


def ask(stack: Stack, num_tokens: int) -> list[GenerateStream]:
    return [stack.stream(token_request(prompt, num_tokens)) for prompt in PROMPTS]


def begun(streams: Sequence[GenerateStream]) -> list[Iterable[GenerateResponse]]:
    """The same once all have told something, which is kept: so it is known though some may be over by then."""
    return [chain([next(stream)], stream) for stream in streams]


def assert_undisturbed(
    stack: Stack, streams: Sequence[Iterable[GenerateResponse]], num_tokens: int
) -> list[FinishedStream]:
    vocabulary, sampling = FakeVocabulary.read(stack.model), SamplingParams(max_tokens=num_tokens)
    generations = [collect(stream) for stream in streams]
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        assert generation.token_ids == expected_tokens(prompt, sampling, 0, num_tokens, vocabulary)
    return generations


def start(new_stack: StartStack, workers: int = 2, first_step_ms: int = 10, **environment: str) -> Stack:
    """Workers are called worker-0 and so on, by the scheduler too. The first one's steps may take longer."""
    stack = new_stack(**{"OCTAVO_FAKE_STEP_MS": "10", **environment})
    for name in ("scheduler", "frontend", *(f"worker-{number}" for number in range(1, workers))):
        stack.start_named(name)
    stack.start_named("worker-0", OCTAVO_FAKE_STEP_MS=str(first_step_ms))
    stack.wait_ready()
    stack.wait_for(lambda: len(stack.load().workers) == workers)
    return stack


def worker(stack: Stack, name: str) -> pb.Worker:
    """Raises `StopIteration` if it is not there."""
    return next(worker for worker in stack.load().workers if worker.id == name)


def names(stack: Stack) -> list[str]:
    return sorted(worker.id for worker in stack.load().workers)


def octavo(stack: Stack, *arguments: str) -> str:
    """Runs a command to its end; what it printed."""
    command, *rest = arguments
    process = stack.start(command, f"command-{len(stack.processes)}", arguments=rest)
    name = next(name for name, each in stack.processes.items() if each is process)
    assert process.wait(60) == 0, stack.log(name)
    del stack.processes[name]
    return stack.log(name)


def worker_line(stack: Stack, worker_id: str) -> list[str]:
    """A worker's name and state as `octavo workers` lists them; empty while it lists none of that name."""
    lines = (line.split()[:2] for line in octavo(stack, "workers").splitlines())
    return next((line for line in lines if line[:1] == [worker_id]), [])


@pytest.mark.parametrize("number", [signal.SIGTERM, *deep(signal.SIGINT)])
def test_a_worker_that_is_asked_to_end_moves_its_requests_and_ends_well(
    new_stack: StartStack, number: signal.Signals
) -> None:
    # With their blocks they would move without being preempted: `tests/system/kv/test_moves.py`.
    stack = start(new_stack, first_step_ms=200, OCTAVO_DRAIN_GRACE="0.2", OCTAVO_PEER_ENDPOINT="none")
    streams = begun(ask(stack, 100))
    assert worker(stack, "worker-0").running > 0
    assert stack.kill("worker-0", number) == 0
    generations = assert_undisturbed(stack, streams, 100)
    assert any(generation.usage.preemptions for generation in generations), "it waited for the streams"
    assert "dismissed after step" in stack.log("worker-0")
    assert "was drained and is let go" in stack.log("scheduler")
    assert " lost: " not in stack.log("scheduler")
    stack.wait_idle()


def test_requests_end_at_a_drained_worker_within_the_grace(new_stack: StartStack) -> None:
    stack = start(new_stack)
    streams = begun(ask(stack, 60))
    octavo(stack, "drain", "worker-0", "--wait")
    assert names(stack) == ["worker-1"]
    assert stack.processes["worker-0"].wait(60) == 0
    generations = assert_undisturbed(stack, streams, 60)
    assert not any(generation.usage.preemptions for generation in generations)
    stack.start_named("worker-0")
    stack.wait_for(lambda: names(stack) == ["worker-0", "worker-1"])
    assert worker(stack, "worker-0").state == pb.WORKER_STATE_READY


def test_the_only_worker_finishes_what_runs_and_what_is_new_waits_for_the_next(new_stack: StartStack) -> None:
    stack = start(new_stack, workers=1, OCTAVO_DRAIN_GRACE="0")
    # Keeps the worker from ending before it was seen to drain, however long the others take.
    longest = stack.stream(token_request([9], 1500))
    streams = begun([longest, *ask(stack, 60)])[1:]
    stack.processes["worker-0"].send_signal(signal.SIGTERM)
    stack.wait_for(lambda: worker(stack, "worker-0").state == pb.WORKER_STATE_DRAINING)
    late = stack.stream(token_request([1, 2, 3], 5))
    stack.wait_for(lambda: stack.load().waiting == 1)
    longest.cancel()
    assert_undisturbed(stack, streams, 60)
    assert stack.processes["worker-0"].wait(60) == 0
    assert stack.load().waiting == 1
    assert stack.load().waiting_tokens == 3
    stack.start_named("worker-1")
    assert len(collect(late).token_ids) == 5


def test_a_cordon_holds_until_it_is_taken_back(new_stack: StartStack) -> None:
    stack = start(new_stack)
    streams = begun(ask(stack, 60))
    octavo(stack, "cordon", "worker-0")
    stack.generate(token_request([1, 2, 3], 5))
    assert_undisturbed(stack, streams, 60)
    stack.kill("worker-0")
    stack.start_named("worker-0")
    # Two may be counted before the death is noticed: what came back has made no step yet.
    stack.wait_for(lambda: [each.steps for each in stack.load().workers if each.id == "worker-0"] == [0])
    stack.wait_for(lambda: worker_line(stack, "worker-0") == ["worker-0", "cordoned"])
    assert_undisturbed(stack, ask(stack, 60), 60)
    assert worker(stack, "worker-0").steps == 0
    octavo(stack, "readmit", "worker-0")
    assert_undisturbed(stack, ask(stack, 60), 60)
    assert worker(stack, "worker-0").steps > 0


def test_a_worker_that_joins_under_load_takes_what_waits(new_stack: StartStack) -> None:
    """The other worker stays in its first step for as long as that takes."""
    stack = start(new_stack, workers=1, first_step_ms=60_000, OCTAVO_MAX_NUM_SEQS="2")
    # Else the first alone might fill all steps that go out at a time.
    streams = all_at_once(stack, [token_request(prompt, 15) for prompt in PROMPTS])
    stack.wait_for(lambda: worker(stack, "worker-0").running == 2 and stack.load().waiting == len(PROMPTS) - 2)
    stack.start_named("worker-1")
    stack.wait_for(lambda: stack.load().waiting == 0)
    assert worker(stack, "worker-0").running == 2
    stack.kill("worker-0")
    assert_undisturbed(stack, streams, 15)


def test_a_killed_worker_is_missed_at_once_even_in_a_step(new_stack: StartStack) -> None:
    """A first step may take a minute, and nobody is heard in it: only the end of the connection tells."""
    stack = start(new_stack, workers=1, first_step_ms=60_000)
    streams = ask(stack, 5)
    stack.wait_for(lambda: worker(stack, "worker-0").steps_in_flight > 0)
    stack.kill("worker-0")
    stack.wait_for(lambda: not stack.load().workers)
    assert "worker-0 lost (unreachable): its connection has ended" in stack.log("scheduler")
    stack.start_named("worker-1")
    assert_undisturbed(stack, streams, 5)
