"""Real processes: after a reset by gRPC, command or HTTP a prompt is computed anew, and whoever runs goes on."""

import subprocess
import sys

import pytest

from octavo.testbed.stack import FinishedStream, Stack, collect, token_request
from octavo.v1 import admin_pb2 as pb
from octavo.wire.sampling import SamplingParams
from octavo.worker.fake.runner import FakeVocabulary, expected_tokens

from ..conftest import StartStack

pytestmark = pytest.mark.system

_PROMPT, _RUNNING, _NUM_TOKENS = [7] * 70, [9] * 70, 60


def reset_by_command(stack: Stack) -> None:
    command = [sys.executable, "-m", "octavo.cli.main", "cache", "reset", "--admin-address", stack.admin_address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("dropped ")


def reset_by_http(stack: Stack) -> None:
    with stack.http() as http:
        answer = http.post("/reset_prefix_cache")
    assert answer.status_code == 200
    assert answer.json()["dropped_blocks"] > 0


def reset_by_grpc(stack: Stack) -> None:
    assert stack.admin.ResetPrefixCache(pb.ResetPrefixCacheRequest(), timeout=60).dropped_blocks > 0


def test_a_reset_by_any_way_is_followed_by_no_hit_and_changes_no_answer(new_stack: StartStack) -> None:
    stack = new_stack(OCTAVO_FAKE_STEP_MS="20", OCTAVO_ENABLE_CACHE_RESET="1").start_all()

    def ask(prompt: list[int]) -> FinishedStream:
        return stack.generate(token_request(prompt, 4))

    for reset in (reset_by_grpc, reset_by_command, reset_by_http):
        ask(_PROMPT)
        assert ask(_PROMPT).usage.cached_prompt_tokens >= 64, reset
        running = stack.stream(token_request(_RUNNING, _NUM_TOKENS))
        begun = [next(running)]
        while not begun[-1].HasField("delta"):
            begun.append(next(running))
        assert ask(_RUNNING).usage.cached_prompt_tokens >= 64
        reset(stack)
        assert ask(_PROMPT).usage.cached_prompt_tokens == 0
        assert ask(_RUNNING).usage.cached_prompt_tokens == 0
        answer = collect([*begun, *running])
        sampling = SamplingParams(max_tokens=_NUM_TOKENS)
        expected = expected_tokens(_RUNNING, sampling, 0, _NUM_TOKENS, FakeVocabulary.read(stack.model))
        assert answer.token_ids == expected
        reset_by_grpc(stack)
    stack.wait_idle()
