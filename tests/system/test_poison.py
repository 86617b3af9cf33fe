"""Requests that break what computes them: others get their tokens, and the service goes on."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from octavo.chaos.poison import Supervisor
from octavo.testbed.grpc_calls import reason_of
from octavo.testbed.stack import Stack, token_request
from octavo.testing.depth import deep
from octavo.v1 import admin_pb2
from octavo.wire.sampling import SamplingParams
from octavo.worker.fake.runner import FakeVocabulary, expected_tokens

from .conftest import StartStack

pytestmark = pytest.mark.system

NUM_TOKENS = 40
PROMPTS = [[(7 * i + j) % 250 for j in range(3 + 2 * i)] for i in range(16)]
# No other prompt has these tokens.
POISON = [1, 2, 251, 252, 3]


@contextmanager
def supervised(stack: Stack) -> Iterator[Supervisor]:
    """Workers that die are started again."""
    supervisor, over = Supervisor(stack), threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            supervisor.look()

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        try:
            yield supervisor
        finally:
            over.set()
        watching.result()


def assert_served(stack: Stack) -> None:
    """All innocents, to their ends, with the tokens they would have had."""
    generations = stack.generate_all([token_request(prompt, NUM_TOKENS) for prompt in PROMPTS])
    vocabulary, sampling = FakeVocabulary.read(stack.model), SamplingParams(max_tokens=NUM_TOKENS)
    expected = [expected_tokens(prompt, sampling, 0, NUM_TOKENS, vocabulary) for prompt in PROMPTS]
    assert [generation.token_ids for generation in generations] == expected


def refusal(stack: Stack, prompt: list[int]) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as raised:
        stack.generate(token_request(prompt, NUM_TOKENS))
    return raised.value


def test_a_request_that_kills_workers_is_quarantined_and_no_innocent_is_failed(new_stack: StartStack) -> None:
    stack = new_stack(OCTAVO_FAKE_STEP_MS="5", OCTAVO_FAKE_FAULT="die=251+252@1").start_all(workers=3)
    with supervised(stack) as supervisor, ThreadPoolExecutor(2) as pool:
        serving = pool.submit(assert_served, stack)
        poisoning = pool.submit(refusal, stack, POISON)
        serving.result()
        error = poisoning.result()
        assert error.code() is grpc.StatusCode.INTERNAL
        assert reason_of(error) == "QUARANTINED"
        assert "which computed nothing else" in (error.details() or "")
        again = refusal(stack, POISON)
        assert (again.code(), reason_of(again)) == (grpc.StatusCode.INTERNAL, "QUARANTINED")
        stack.wait_for(lambda: len(stack.load().workers) == 3)
    assert len(supervisor.died) <= 3
    assert_served(stack)
    stack.wait_idle()


@pytest.mark.parametrize("workers", [*deep(1), 2])
def test_kills_from_outside_accuse_no_prompt_and_an_operator_clears_what_is_refused(
    new_stack: StartStack, workers: int
) -> None:
    # A prefill of two hundred steps.
    stack = new_stack(OCTAVO_FAKE_STEP_MS="20", OCTAVO_MAX_NUM_BATCHED_TOKENS="8", OCTAVO_FAKE_FAULT="die=251+252")
    stack.start("serve", arguments=["--workers", str(workers)])
    stack.wait_ready()
    stack.wait_for(lambda: len(stack.load().workers) == workers)
    prompt = [n % 250 for n in range(1600)]
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(stack.generate, token_request(prompt, 5))
        for deaths in range(1, 4):
            kill_busy_worker(stack)
            wait_for_deaths(stack, deaths)
        sampling = SamplingParams(max_tokens=5)
        expected = expected_tokens(prompt, sampling, 0, 5, FakeVocabulary.read(stack.model))
        assert serving.result().token_ids == expected
    assert "quarantine" not in stack.log("serve")
    # As only their supervisor knows.
    stack.wait_for(lambda: stack.log("serve").count("did not leave in order: signal SIGKILL") == 3)
    assert "lost (unreachable): its connection has ended" in stack.log("serve")
    if workers == 1:
        # A supervisor gives up after four deaths.
        return
    error = refusal(stack, POISON)
    assert reason_of(error) == "QUARANTINED"
    assert "signal SIGSEGV, Fatal Python error: Segmentation fault" in (error.details() or "")
    [payload] = stack.admin.ListQuarantine(admin_pb2.ListQuarantineRequest()).payloads
    assert payload.prompt_tokens == len(POISON)
    stack.admin.ClearQuarantine(admin_pb2.ClearQuarantineRequest(payload=payload.payload))
    assert not stack.admin.ListQuarantine(admin_pb2.ListQuarantineRequest()).payloads


def wait_for_deaths(stack: Stack, count: int) -> None:
    stack.wait_for(lambda: stack.log("serve").count("ended with signal SIGKILL") == count)


def kill_busy_worker(stack: Stack) -> None:
    """kill -9 of the worker that computes, as soon as one does and runs: the scheduler may not have noticed yet that
    one has ended."""

    def is_killed() -> bool:
        return any(kill_worker(stack, each.id) for each in stack.load().workers if each.running)

    stack.wait_for(is_killed)


def kill_worker(stack: Stack, worker_id: str) -> bool:
    """kill -9 of the process that has this name; tells whether there is one."""
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            settings = environ.read_bytes().split(b"\0")
            mine = f"OCTAVO_RUNTIME_DIR={stack.directory}".encode() in settings
            if mine and f"OCTAVO_WORKER_ID={worker_id}".encode() in settings:
                os.kill(int(environ.parent.name), signal.SIGKILL)
                return True
    return False


def test_steps_too_large_for_the_memory_are_cut_and_no_request_is_lost(new_stack: StartStack) -> None:
    stack = new_stack(OCTAVO_FAKE_STEP_MS="2", OCTAVO_FAKE_FAULT="oom=*>4").start_all()
    assert_served(stack)
    stack.wait_idle()
    stack.assert_alive()


def test_a_request_too_large_for_the_memory_alone_is_refused(new_stack: StartStack) -> None:
    stack = new_stack(OCTAVO_FAKE_FAULT="oom=251+252").start_all()
    error = refusal(stack, POISON)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert reason_of(error) == "OUT_OF_MEMORY"
    assert_served(stack)
    stack.assert_alive()


def test_a_worker_that_gives_nothing_finite_is_ended_and_nobody_notices(new_stack: StartStack) -> None:
    stack = new_stack(OCTAVO_FAKE_STEP_MS="2")
    stack.start("scheduler")
    stack.start("frontend")
    broken = stack.start("worker", "broken", OCTAVO_FAKE_FAULT="nan=*>1")
    stack.wait_ready()
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(assert_served, stack)
        assert broken.wait(60) == 1
        stack.start("worker", "sound")
        serving.result()
    assert "gave nothing finite" in stack.log("scheduler")
    stack.wait_idle()
