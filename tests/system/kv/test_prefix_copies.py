"""Real processes: a worker takes a prompt's beginning from another one that has computed it; where either dies over it,
the prompt is computed, with the same tokens."""

import signal

import pytest

from octavo.testbed.stack import Stack, collect, token_request
from octavo.v1 import admin_pb2 as pb
from octavo.wire.sampling import SamplingParams
from octavo.worker.fake.runner import FakeVocabulary, expected_tokens

from ..conftest import StartStack

pytestmark = pytest.mark.system

# Of blocks of 16 tokens.
_PROMPT = [(7 * i) % 250 for i in range(100)]


def two_workers(new_stack: StartStack) -> Stack:
    """Two workers, of which the first has served the prompt and gets nothing new."""
    # A fake model's tokens are computed sooner than any copy is made, where that is measured.
    stack = new_stack(OCTAVO_CALIBRATE="0")
    for name in ("scheduler", "frontend", "worker-0"):
        stack.start_named(name)
    stack.wait_ready()
    stack.generate(token_request(_PROMPT, 4))
    stack.wait_idle()
    stack.start_named("worker-1")
    stack.wait_for(lambda: len(stack.load().workers) == 2)
    stack.admin.CordonWorker(pb.CordonWorkerRequest(worker_id="worker-0"))
    return stack


def right_tokens(stack: Stack, count: int) -> list[int]:
    vocabulary = FakeVocabulary.read(stack.model)
    return expected_tokens(_PROMPT, SamplingParams(max_tokens=count), 0, count, vocabulary)


def told(stack: Stack, name: str) -> pb.Explanation:
    explanation: pb.Explanation
    [explanation] = stack.admin.ExplainRequest(pb.ExplainRequestRequest(request_id=name), timeout=60).explanations
    return explanation


def test_a_worker_takes_what_another_one_has_computed(new_stack: StartStack) -> None:
    stack = two_workers(new_stack)
    answer = stack.generate(token_request(_PROMPT, 4, request_id="again"))
    assert answer.token_ids == right_tokens(stack, 4)
    assert answer.usage.cached_prompt_tokens == 96
    cache = told(stack, "again").cache
    assert (cache.worker_id, cache.replica_tokens, cache.source) == ("worker-1", 96, "worker-0")
    stack.wait_idle()
    (worker,) = (worker for worker in stack.load().workers if worker.id == "worker-1")
    # Of the prompt the last block; and a row may have been under way as the request ended.
    assert worker.tokens_computed <= 4 + 4


@pytest.mark.parametrize("victim", ["worker-0", "worker-1"])
def test_a_worker_killed_in_the_middle_of_a_copy_costs_time_alone(new_stack: StartStack, victim: str) -> None:
    stack = two_workers(new_stack)
    stack.processes["worker-0"].send_signal(signal.SIGSTOP)
    stream = stack.stream(token_request(_PROMPT, 4, request_id="again"))
    stack.wait_for(lambda: [each.kind for each in told(stack, "again").obstacles] == [pb.Obstacle.KIND_PREFIX_COPY])
    stack.kill(victim)
    if victim == "worker-1":
        stack.processes["worker-0"].send_signal(signal.SIGCONT)
        stack.admin.ReadmitWorker(pb.ReadmitWorkerRequest(worker_id="worker-0"))
    assert collect(list(stream)).token_ids == right_tokens(stack, 4)
    stack.wait_idle()
