"""Real processes: what a worker has written to its disk is found by its next life, and by another worker of the machine
when it is killed."""

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.testbed.stack import FinishedStream, Stack, collect, token_request
from octavo.testing.depth import deep
from octavo.v1.admin_pb2 import REQUEST_STATE_ENDED, TIER_DISK, CacheLookup, ExplainRequestRequest
from octavo.v1.generation_pb2 import GenerateResponse
from octavo.wire.sampling import SamplingParams
from octavo.worker.fake.runner import FakeVocabulary, expected_tokens

from ..conftest import StartStack

pytestmark = pytest.mark.system

# Of blocks of 16 tokens.
_PROMPT = [(7 * i) % 250 for i in range(100)]


def with_disk(new_stack: StartStack, directory: Path, **environment: str) -> Stack:
    # Where that is measured, a fake model's tokens are computed sooner than any disk reads.
    kept = {"OCTAVO_KV_DISK": str(directory), "OCTAVO_KV_DISK_MEMORY": "64MiB", "OCTAVO_KV_MIRROR": "1"}
    return new_stack(OCTAVO_CALIBRATE="0", **kept, **environment)


def right_tokens(stack: Stack, prompt: list[int], count: int) -> list[int]:
    vocabulary = FakeVocabulary.read(stack.model)
    return expected_tokens(prompt, SamplingParams(max_tokens=count), 0, count, vocabulary)


def test_a_worker_killed_and_started_again_finds_what_it_had_computed(new_stack: StartStack, tmp_path: Path) -> None:
    stack = with_disk(new_stack, tmp_path / "kv").start_all()

    def ask() -> FinishedStream:
        return stack.generate(token_request(_PROMPT, 4))

    assert ask().usage.cached_prompt_tokens == 0
    stack.wait_idle()
    before = stack.load().workers[0].id
    assert list((tmp_path / "kv").rglob("*.kv"))
    stack.kill("worker-0")
    stack.wait_for(lambda: not stack.load().workers)
    stack.start_named("worker-0")
    stack.wait_for(lambda: [worker.id for worker in stack.load().workers] == [before])
    answer = ask()
    assert answer.token_ids == right_tokens(stack, _PROMPT, 4)
    assert answer.usage.cached_prompt_tokens == 96
    stack.wait_idle()


def flip(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(max(1, len(content) // 200)):
        content[chance.randrange(len(content))] ^= chance.randrange(1, 256)
    path.write_bytes(content)


def cut(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size))


def replace(path: Path, chance: random.Random) -> None:
    path.write_bytes(chance.randbytes(path.stat().st_size))


def forbid(path: Path, chance: random.Random) -> None:
    """As root may read everything, a directory stands in the file's place."""
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("harm", [flip, *deep(cut, replace, forbid)])
def test_whatever_became_of_its_files_a_worker_computes_the_same_tokens(
    new_stack: StartStack, tmp_path: Path, harm: Callable[[Path, random.Random], None]
) -> None:
    stack, chance = with_disk(new_stack, tmp_path / "kv").start_all(), random.Random(harm.__name__)
    stack.generate(token_request(_PROMPT, 4))
    stack.wait_idle()
    disk = stack.load().workers[0].tiers[2]
    assert disk.tier == TIER_DISK
    stack.wait_for(lambda: stack.load().workers[0].tiers[2].blocks >= 6)
    stack.kill("worker-0")
    stack.wait_for(lambda: not stack.load().workers)
    segments = list((tmp_path / "kv").rglob("*.kv"))
    assert segments
    for segment in segments:
        harm(segment, chance)
    stack.start_named("worker-0")
    stack.wait_for(lambda: len(stack.load().workers) == 1)
    # The first finds what is whole, if anything; the second what has been computed again.
    for prompt in (_PROMPT, _PROMPT[:60], _PROMPT):
        assert stack.generate(token_request(prompt, 4)).token_ids == right_tokens(stack, prompt, 4)
    stack.wait_idle()
    load = stack.load().workers[0]
    assert load.blocks_free == load.blocks_total
    stack.wait_for(lambda: stack.load().workers[0].cpu_blocks_free == load.cpu_blocks_total)


def test_operators_are_told_where_a_prompt_was_found(new_stack: StartStack, tmp_path: Path) -> None:
    stack = with_disk(new_stack, tmp_path / "kv").start_all()

    def found(name: str, prompt: list[int]) -> CacheLookup:
        stack.generate(token_request(prompt, 4, request_id=name))
        [told] = stack.admin.ExplainRequest(ExplainRequestRequest(request_id=name), timeout=60).explanations
        assert told.status.state == REQUEST_STATE_ENDED
        cache: CacheLookup = told.cache
        return cache

    assert found("first", _PROMPT).reason == CacheLookup.REASON_UNKNOWN
    other = [*_PROMPT[:50], 251, *_PROMPT[51:]]
    told = found("other", other)
    assert (told.device_tokens, told.reason) == (48, CacheLookup.REASON_DIFFERS)
    assert (told.position, told.token, told.other_token) == (50, 251, _PROMPT[50])
    stack.wait_idle()
    stack.kill("worker-0")
    stack.wait_for(lambda: not stack.load().workers)
    stack.start_named("worker-0")
    stack.wait_for(lambda: len(stack.load().workers) == 1)
    told = found("restarted", _PROMPT)
    assert (told.tokens, told.device_tokens, told.cpu_tokens, told.disk_tokens) == (100, 0, 0, 96)
    assert told.reason == CacheLookup.REASON_SHORT


def test_streams_of_a_killed_worker_go_on_from_its_mirror(new_stack: StartStack, tmp_path: Path) -> None:
    stack = with_disk(new_stack, tmp_path / "kv", OCTAVO_FAKE_STEP_MS="10")
    for name in ("scheduler", "frontend", "worker-0"):
        stack.start_named(name)
    stack.wait_ready()
    prompts = [[*_PROMPT, number] for number in range(4)]
    streams = [stack.stream(token_request(prompt, 120)) for prompt in prompts]
    begun: list[list[GenerateResponse]] = [[] for _ in streams]
    for stream, told in zip(streams, begun, strict=True):
        while sum(len(each.delta.token_ids) for each in told if each.HasField("delta")) < 40:
            told.append(next(stream))
    stack.start_named("worker-1")
    stack.wait_for(lambda: len(stack.load().workers) == 2)
    stack.kill("worker-0")
    for prompt, stream, told in zip(prompts, streams, begun, strict=True):
        assert collect([*told, *stream]).token_ids == right_tokens(stack, prompt, 120)
    (left,) = stack.load().workers
    assert left.id == "worker-1"
    # Beside a token for each that it has sampled: of each stream the last block, and one or two not written yet.
    assert left.tokens_computed - left.tokens_sampled < 4 * 48
    stack.wait_idle()
