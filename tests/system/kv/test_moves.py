"""Real processes: requests of a drained worker go on on another one with what is computed of them; where the copy
cannot be made, they start over, with the same tokens."""

import signal
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration

from octavo.runtime.transport.curve_keys import write_keys
from octavo.testbed.stack import GenerateStream, Stack, collect, free_address, token_request
from octavo.v1 import admin_pb2 as pb
from octavo.v1.generation_pb2 import GenerateResponse
from octavo.wire.sampling import SamplingParams
from octavo.worker.fake.runner import FakeVocabulary, expected_tokens

from ..conftest import StartStack

pytestmark = pytest.mark.system

_PROMPTS = [[(7 * i + number) % 250 for i in range(100)] for number in range(4)]
_TOKENS = 200


class Streams:
    """Streams of which each has brought some tokens of the only worker there is, before another one joins."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._streams: list[GenerateStream] = [stack.stream(token_request(each, _TOKENS)) for each in _PROMPTS]
        self._begun: list[list[GenerateResponse]] = [[] for _ in self._streams]
        for stream, told in zip(self._streams, self._begun, strict=True):
            while sum(len(each.delta.token_ids) for each in told if each.HasField("delta")) < 20:
                told.append(next(stream))

    def end_right(self) -> None:
        vocabulary = FakeVocabulary.read(self._stack.model)
        for prompt, stream, told in zip(_PROMPTS, self._streams, self._begun, strict=True):
            right = expected_tokens(prompt, SamplingParams(max_tokens=_TOKENS), 0, _TOKENS, vocabulary)
            assert collect([*told, *stream]).token_ids == right


def two_workers(new_stack: StartStack, **environment: str) -> tuple[Stack, Streams]:
    stack = new_stack(OCTAVO_FAKE_STEP_MS="10", **environment)
    for name in ("scheduler", "frontend", "worker-0"):
        stack.start_named(name)
    stack.wait_ready()
    streams = Streams(stack)
    stack.start_named("worker-1")
    stack.wait_for(lambda: len(stack.load().workers) == 2)
    return stack, streams


def drain(stack: Stack) -> None:
    stack.admin.DrainWorker(pb.DrainWorkerRequest(worker_id="worker-0", grace=Duration()))


def left(stack: Stack) -> pb.Worker:
    stack.wait_for(lambda: [worker.id for worker in stack.load().workers] == ["worker-1"])
    return stack.load().workers[0]


@pytest.mark.parametrize("way", ["ipc", "tcp", "keys"])
def test_streams_of_a_drained_worker_go_on_elsewhere_and_nothing_is_computed_again(
    new_stack: StartStack, way: str, tmp_path: Path
) -> None:
    environment = {}
    if way != "ipc":
        environment = {f"OCTAVO_{wire}_ENDPOINT": f"tcp://{free_address()}" for wire in ("FRONTEND", "WORKER")}
    if way == "keys":
        write_keys(tmp_path / "keys")
        environment["OCTAVO_CURVE_KEYS"] = str(tmp_path / "keys")
    stack, streams = two_workers(new_stack, **environment)
    drain(stack)
    worker = left(stack)
    streams.end_right()
    stack.wait_idle()
    worker = left(stack)
    # A row for each token that it sampled, and none for any before.
    assert worker.tokens_computed == worker.tokens_sampled > 0


def test_a_worker_killed_while_its_blocks_are_copied_loses_nothing_but_time(new_stack: StartStack) -> None:
    stack, streams = two_workers(new_stack)
    stack.processes["worker-0"].send_signal(signal.SIGSTOP)
    drain(stack)
    stack.kill("worker-0")
    streams.end_right()
    assert left(stack).tokens_computed > 4 * len(_PROMPTS[0])
    stack.wait_idle()


def test_a_worker_killed_while_it_copies_takes_nothing_along(new_stack: StartStack) -> None:
    stack, streams = two_workers(new_stack)
    stack.processes["worker-1"].send_signal(signal.SIGSTOP)
    drain(stack)
    stack.kill("worker-1")
    stack.wait_for(lambda: [worker.id for worker in stack.load().workers] == ["worker-0"])
    streams.end_right()
    stack.wait_idle()


def test_what_may_not_be_copied_is_computed_again(new_stack: StartStack) -> None:
    stack, streams = two_workers(new_stack, OCTAVO_PEER_ENDPOINT="none")
    drain(stack)
    streams.end_right()
    worker = left(stack)
    assert worker.tokens_computed - worker.tokens_sampled >= sum(map(len, _PROMPTS))
    stack.wait_idle()


def test_prompts_are_computed_by_one_worker_and_what_follows_by_another(new_stack: StartStack) -> None:
    # By what a fake model's tokens cost, no prompt would hold anybody up.
    stack = new_stack(OCTAVO_FAKE_STEP_MS="10", OCTAVO_CALIBRATE="0")
    for name in ("scheduler", "frontend"):
        stack.start_named(name)
    stack.start_named("worker-0", OCTAVO_ROLE="prefill")
    stack.start_named("worker-1", OCTAVO_ROLE="decode")
    stack.wait_for(lambda: len(stack.load().workers) == 2)
    stack.wait_ready()
    Streams(stack).end_right()
    stack.wait_idle()
    first, second = sorted(stack.load().workers, key=lambda worker: worker.id)
    assert first.tokens_computed >= sum(map(len, _PROMPTS))
    # Not one token of a prompt, and most of what follows.
    assert second.tokens_computed == second.tokens_sampled > len(_PROMPTS) * _TOKENS // 2
