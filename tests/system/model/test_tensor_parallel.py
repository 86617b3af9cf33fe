"""A replica of two ranks gives the tokens of one, and takes nobody with it when a rank dies."""

import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from octavo.testbed.models import transformers_greedy
from octavo.testbed.stack import FinishedStream, Stack, collect, free_address, token_request

pytestmark = [pytest.mark.system, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

NUM_TOKENS = 120
PROMPTS = [[(7 * i + j) % 250 for j in range(3 + 5 * i)] for i in range(4)]
REQUESTS = [token_request(prompt, NUM_TOKENS) for prompt in PROMPTS]
# Ranks of one thread each, small enough to start quickly.
SETTINGS = {"OCTAVO_DEVICE": "cpu", "OCTAVO_DTYPE": "float32", "OCTAVO_THREADS": "1", "OCTAVO_NUM_BLOCKS": "256"}


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[list[int]]:
    """What transformers makes of `PROMPTS`."""
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model)
    return [transformers_greedy(model, prompt, NUM_TOKENS) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def scheduled(tiny_model: Path) -> Iterator[Stack]:
    """A scheduler and a frontend for all tests: workers take long enough to start."""
    with (
        tempfile.TemporaryDirectory(prefix="octavo-") as directory,
        Stack(tiny_model, Path(directory), SETTINGS) as stack,
    ):
        stack.start("scheduler")
        stack.start("frontend")
        yield stack


@pytest.fixture
def stack(scheduled: Stack) -> Stack:
    """The two with worker-0, which has two ranks; it is started anew if a test has ended it."""
    former = scheduled.processes.get("worker-0")
    if former is None or former.poll() is not None:
        others = sum(1 for name in scheduled.processes if name == "worker-1")
        scheduled.start("worker", "worker-0", arguments=["--tp", "2"])
        scheduled.wait_for(lambda: len(scheduled.load().workers) == 1 + others, 240)
    scheduled.wait_ready()
    return scheduled


@pytest.fixture
def with_spare(stack: Stack) -> Stack:
    """The same with worker-1, which has one rank."""
    if "worker-1" not in stack.processes:
        stack.start("worker", "worker-1")
    stack.wait_for(lambda: len(stack.load().workers) == 2, 240)
    return stack


class Streams:
    """All of `REQUESTS` under way: the first events of each are read, the rest is not."""

    def __init__(self, stack: Stack) -> None:
        self._streams = [stack.stream(request) for request in REQUESTS]
        self._read = [[next(stream) for _ in range(3)] for stream in self._streams]

    def finish(self) -> list[FinishedStream]:
        return [collect([*read, *stream]) for read, stream in zip(self._read, self._streams, strict=True)]


def second_rank(stack: Stack) -> int:
    """The process id of worker-0's other rank."""
    pid = stack.processes["worker-0"].pid
    [child] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def token_ids(generations: Sequence[FinishedStream]) -> list[list[int]]:
    return [generation.token_ids for generation in generations]


def test_two_ranks_give_the_tokens_of_the_whole_model(stack: Stack, expected: list[list[int]]) -> None:
    assert token_ids(stack.generate_all(REQUESTS)) == expected
    assert "2 ranks of cpu" in stack.log("worker-0")
    stack.wait_idle()


@pytest.mark.deep
def test_all_ranks_end_when_the_first_is_asked_to(stack: Stack) -> None:
    follower = second_rank(stack)
    assert stack.kill("worker-0", signal.SIGTERM) == 0
    assert is_gone(follower)
    assert "has ended with" not in stack.log("worker-0")


@pytest.mark.deep
def test_ranks_that_are_started_one_by_one_meet_at_an_address(scheduled: Stack, expected: list[list[int]]) -> None:
    stack, ranks = scheduled, ["rank-0", "rank-1"]
    address = free_address()
    for rank, name in enumerate(ranks):
        arguments = ["--tp", "2", "--tp-rank", str(rank), "--tp-rendezvous", address]
        stack.start("worker", name, arguments=arguments, OCTAVO_HEALTH_ADDRESS=f"unix:{stack.directory}/{name}.sock")
    stack.wait_for(lambda: len(stack.load().workers) == 1, 120)
    stack.wait_ready()
    assert token_ids(stack.generate_all(REQUESTS)) == expected
    for name in reversed(ranks):
        stack.processes[name].terminate()
    assert [stack.processes[name].wait(60) for name in ranks] == [0, 0]


def test_a_dead_rank_takes_its_replica_and_no_stream(with_spare: Stack, expected: list[list[int]]) -> None:
    stack = with_spare
    streams = Streams(stack)
    os.kill(second_rank(stack), signal.SIGKILL)
    assert token_ids(streams.finish()) == expected
    # The first rank ends as the other did, so that whoever started them can tell how.
    assert stack.processes["worker-0"].wait(60) == -signal.SIGKILL
    assert "rank" in stack.log("worker-0").splitlines()[-1]
    stack.wait_for(lambda: len(stack.load().workers) == 1)
    stack.wait_idle()


@pytest.mark.deep
def test_a_dead_first_rank_takes_the_others_and_no_stream(with_spare: Stack, expected: list[list[int]]) -> None:
    stack = with_spare
    follower = second_rank(stack)
    streams = Streams(stack)
    stack.kill("worker-0")
    assert token_ids(streams.finish()) == expected
    stack.wait_for(lambda: is_gone(follower))
    stack.wait_for(lambda: len(stack.load().workers) == 1)
    stack.wait_idle()
    assert not list(stack.directory.glob("tp-*"))


@pytest.mark.deep
def test_a_rank_that_hangs_takes_its_replica_and_no_stream(with_spare: Stack, expected: list[list[int]]) -> None:
    stack = with_spare
    follower = second_rank(stack)
    streams = Streams(stack)
    os.kill(follower, signal.SIGSTOP)
    assert token_ids(streams.finish()) == expected
    stack.wait_for(lambda: len(stack.load().workers) == 1)
    stack.wait_idle()
    stack.kill("worker-0")
    stack.wait_for(lambda: is_gone(follower))
