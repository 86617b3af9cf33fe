"""Every state that the scheduler's core can get into at small scope: breadth first, over all orders of all events.

A state is the core, the worker and what the frontend has heard, all of it as one pickle. In every state all invariants
hold and no stream has a wrong token; from every state the plain course of things (plan, answer) leads to the end of
all that is wanted.
"""

import os
import pickle
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from octavo.scheduler.core.config import Policy, Preemption
from octavo.scheduler.core.events import SequenceEnded, StepAnswered
from octavo.scheduler.core.replica import ReplicaStats
from octavo.scheduler.core.sequence import SequenceGroup
from octavo.scheduler.core.step_limits import StepDeadlines
from octavo.scheduler.core.waiting_queue import WaitingQueue
from octavo.testing.cluster import FRONTEND, Cluster, Stream, make_request, reference_tokens, write_fake_model
from octavo.wire.requests import Request
from octavo.wire.steps import StepPlan

from ..expectations import assert_worker_agrees

# Where the names of sequences and steps begin, so that they are known from all other numbers; and how a pickle has
# them: LONG1, six bytes, the lowest first.
_FIRST_NAME = 1 << 40
_NAMES = re.compile(rb"\x8a\x06(..\x00\x00\x00\x01)", re.DOTALL)

Event = tuple[str, ...]
SCHEDULE, ANSWER, FAIL = ("schedule",), ("answer",), ("fail",)


@dataclass
class World:
    """One state. `unwanted` are the streams that the frontend has aborted or found the end of, with their tokens."""

    cluster: Cluster
    unwanted: dict[Stream, list[int]] = field(default_factory=dict)
    failures: int = 0

    def apply(self, event: Event, request: Request | None) -> set[str]:
        """What the plans that this led to have in them."""
        cluster = self.cluster
        match event:
            case ("submit", _) if request:
                cluster.submit(request)
            case ("abort", name) if request:
                cluster.abort(name)
                self._give_up([(name, index) for index in range(request.sampling.num_sequences)])
            case ("end", name, index):
                cluster.handle(SequenceEnded(FRONTEND, name, 1, int(index)))
                self._give_up([(name, int(index))])
            case ("schedule",):
                cluster.schedule()
            case (outcome,):
                self.failures += outcome == "fail"
                cluster.handle(StepAnswered(1, cluster.replicas[1].execute(fail=outcome == "fail")))
        seen = {part for plan in cluster.replicas[1].received if isinstance(plan, StepPlan) for part in _parts(plan)}
        self._forget_the_past()
        return seen

    def _give_up(self, streams: list[Stream]) -> None:
        heard = {stream: list(self.cluster.streams.get(stream, [])) for stream in streams}
        # In one order, whatever came first.
        self.unwanted = dict(sorted((heard | self.unwanted).items()))

    def _forget_the_past(self) -> None:
        """What no decision depends on would make every state a new one."""
        cluster, replica = self.cluster, self.cluster.core.replicas[1]
        cluster.to_frontend.clear()
        cluster.deltas.clear()
        cluster.replicas[1].received.clear()
        cluster.core.preemptions = cluster.core.swaps = 0
        replica.stats = ReplicaStats()
        for group in cluster.core.groups:
            group.preemptions = group.swaps = group.failed_steps = 0


def _parts(plan: StepPlan) -> set[str]:
    moves = plan.moves
    found = {
        "swap out": moves.swap_out,
        "swap in": moves.swap_in,
        "copy": moves.copy,
        "fork": plan.forks,
        "remap": plan.remaps,
        "recompute": [start for start in plan.starts if start.generated_token_ids],
        "hit": [start for start in plan.starts if start.num_computed],
    }
    return {part for part, values in found.items() if values}


class Search:
    """All states that `requests` can lead to from an empty cluster, with at most `max_failures` failed steps."""

    def __init__(self, cluster: Cluster, requests: list[Request], max_failures: int) -> None:
        self.max_failures = max_failures
        self.requests = {request.request_id: request for request in requests}
        self.references = {
            (request.request_id, index): reference_tokens(request, index)
            for request in requests
            for index in range(request.sampling.num_sequences)
        }
        self.num_transitions = 0
        self.seen: set[str] = set()
        # States by number, in the order they were found; and of each the one that the plain course leads to.
        self._numbers: dict[bytes, int] = {}
        self._next: dict[int, int] = {}
        self._frontier: deque[tuple[int, bytes]] = deque()
        self._visit(World(cluster))

    @property
    def num_states(self) -> int:
        return len(self._numbers)

    def run(self) -> None:
        while self._frontier:
            number, frozen = self._frontier.popleft()
            world = pickle.loads(frozen)
            successors = {event: self._after(frozen, event) for event in self._events(world)}
            self.num_transitions += len(successors)
            # Where nothing is left to be planned, an answer comes next.
            planned = successors[SCHEDULE]
            self._next[number] = planned if planned != number else successors.get(ANSWER, number)
            assert self._next[number] != number or not world.cluster.core.groups, "the scheduler is stuck"
        self._assert_that_all_ends()

    def _after(self, frozen: bytes, event: Event) -> int:
        world = pickle.loads(frozen)
        self.seen |= world.apply(event, self.requests[event[1]] if len(event) > 1 else None)
        return self._visit(world)

    def _events(self, world: World) -> Iterator[Event]:
        cluster = world.cluster
        yield SCHEDULE
        if cluster.replicas[1].plans:
            yield ANSWER
            if world.failures < self.max_failures:
                yield FAIL
        yield from (("submit", name) for name in self.requests if (name, 0) not in cluster.streams)
        for name, group in cluster.groups.items():
            yield "abort", name
            # Of one that is alone it is the same.
            if len(group.live) > 1:
                yield from (("end", name, str(sequence.index)) for sequence in group.live)

    def _visit(self, world: World) -> int:
        """The number of a state, which is checked when it is seen for the first time."""
        frozen = pickle.dumps(world)
        digest = _fingerprint(frozen)
        if digest in self._numbers:
            return self._numbers[digest]
        number = self._numbers[digest] = len(self._numbers)
        self._frontier.append((number, frozen))
        self._check(world)
        return number

    def _check(self, world: World) -> None:
        cluster = world.cluster
        assert_worker_agrees(cluster.core.replicas[1], cluster.replicas[1])
        assert not cluster.rejected
        for stream, tokens in cluster.streams.items():
            assert tokens == self.references[stream][: len(tokens)]
            if stream in world.unwanted:
                assert tokens == world.unwanted[stream], "a token after the end"
            elif stream in cluster.ended:
                assert tokens == self.references[stream]
            else:
                assert stream[0] in cluster.groups, "a sequence without an end"

    def _assert_that_all_ends(self) -> None:
        """The plain course leads from every state to one that it does not leave."""
        for number in range(self.num_states):
            passed = set()
            while self._next[number] != number:
                assert number not in passed, "the scheduler goes round in circles"
                passed.add(number)
                number = self._next[number]


def _fingerprint(frozen: bytes) -> bytes:
    """Equal for states that differ only in the names of steps and sequences: these are replaced by their ranks."""
    names = sorted(set(_NAMES.findall(frozen)), key=lambda name: int.from_bytes(name, "little"))
    ranks = {name: b"%d" % rank for rank, name in enumerate(names)}
    return blake2b(_NAMES.sub(lambda match: ranks[match[1]], frozen), digest_size=16).digest()


class NoDeadlines:
    """Steps here take no time."""

    def observe(self, num_tokens: int, seconds: float) -> None:
        pass


class NoAccounts(WaitingQueue):
    """There is one tenant."""

    def charge(self, group: SequenceGroup, num_tokens: int) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class Scope:
    """What is searched, and what must have been met with for the search to be worth anything."""

    requests: list[Request]
    num_blocks: int
    block_size: int
    num_cpu_blocks: int = 1
    config: dict[str, Any] = field(default_factory=dict)
    max_failures: int = 1
    parts: set[str]
    least_states: int


def request(name: str, prompt: list[int], max_tokens: int, **sampling: Any) -> Request:
    return msgspec.structs.replace(make_request(name, len(prompt), max_tokens, **sampling), prompt_token_ids=prompt)


# Prompts begin alike; two long ones do not fit side by side with all that they generate.
SHORT = [request("a", [0], 2), request("b", [0, 1], 1)]
LONG = [request("a", [0], 3), request("b", [0, 1], 2)]
# A prompt that takes two steps.
SAMPLES = [request("a", [0, 1, 2], 2, num_sequences=2, temperature=1.0), request("b", [0], 1)]
LONG_SAMPLES = [request("a", [0], 3, num_sequences=2, temperature=1.0), request("b", [0, 1], 2)]

SWAP = {"preemption": Preemption.SWAP}
ONE_DEEP = {"max_steps_in_flight": 1}
SCOPES = {
    "recomputation, two steps deep": Scope(
        requests=LONG,
        num_blocks=4,
        block_size=1,
        max_failures=0,
        parts={"hit", "recompute", "remap"},
        least_states=800,
    ),
    "a failed step, two steps deep": Scope(
        requests=SHORT,
        num_blocks=3,
        block_size=1,
        parts={"hit", "recompute"},
        least_states=1000,
    ),
    "no room to swap to": Scope(
        requests=LONG,
        num_blocks=4,
        block_size=1,
        config=SWAP | ONE_DEEP,
        parts={"hit", "recompute", "remap"},
        least_states=1000,
    ),
    "swapping": Scope(
        requests=LONG,
        num_blocks=3,
        block_size=2,
        config=SWAP | ONE_DEEP,
        parts={"hit", "recompute", "swap out", "swap in"},
        least_states=1200,
    ),
    "the paper's policy": Scope(
        requests=LONG,
        num_blocks=3,
        block_size=2,
        config=SWAP | ONE_DEEP | {"policy": Policy.PAPER},
        parts={"hit", "recompute", "swap out", "swap in"},
        least_states=1000,
    ),
}
LONG_SCOPES = {
    "two samples, two steps deep": Scope(
        requests=SAMPLES,
        num_blocks=6,
        block_size=2,
        max_failures=0,
        parts={"fork", "copy", "remap"},
        least_states=2000,
    ),
    "swapping, two steps deep": Scope(
        requests=LONG,
        num_blocks=3,
        block_size=2,
        config=SWAP,
        parts={"hit", "recompute", "swap out", "swap in"},
        least_states=5000,
    ),
    "two samples and a failed step": Scope(
        requests=SAMPLES,
        num_blocks=6,
        block_size=2,
        config=ONE_DEEP,
        parts={"fork", "copy", "remap", "recompute"},
        least_states=1500,
    ),
    "two samples swapped, two steps deep": Scope(
        requests=LONG_SAMPLES,
        num_blocks=4,
        block_size=2,
        num_cpu_blocks=2,
        config=SWAP | {"max_num_batched_tokens": 3},
        max_failures=0,
        parts={"fork", "copy", "remap", "swap out", "swap in"},
        least_states=10_000,
    ),
}
if "OCTAVO_TEST_LONG" in os.environ:
    SCOPES |= LONG_SCOPES


@pytest.mark.parametrize("name", SCOPES)
def test_every_state_is_sound_and_leads_to_the_end(tmp_path: Path, name: str) -> None:
    scope = SCOPES[name]
    search = Search(_empty_cluster(tmp_path, scope), scope.requests, scope.max_failures)
    search.run()
    print(f"{name}: {search.num_states} states, {search.num_transitions} transitions")
    assert search.seen >= scope.parts
    assert search.num_states >= scope.least_states


def _empty_cluster(tmp_path: Path, scope: Scope) -> Cluster:
    config = {"watermark": 0.0, "max_num_batched_tokens": 2} | scope.config
    cluster = Cluster(write_fake_model(tmp_path / "model"), **config)
    cluster.join(num_blocks=scope.num_blocks, block_size=scope.block_size, num_cpu_blocks=scope.num_cpu_blocks)
    cluster.core.request_table.waiting = NoAccounts()
    replica = cluster.core.replicas[1]
    replica.next_step_id = replica._next_sequence_id = _FIRST_NAME
    replica._deadlines = cast(StepDeadlines, NoDeadlines())
    return cluster
