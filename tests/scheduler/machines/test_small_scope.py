"""Every state that the scheduler's core can get into at small scope: breadth first, over all orders of all events.

A state is the core, the workers and what the frontend has heard, all of it as one pickle. In every state all invariants
hold and no stream has a wrong token; from every state the plain course of things (plan, answer, a worker in the place
of one that was lost, time) leads to the end of all that is wanted.
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
from octavo.scheduler.core.events import PrefixPinned, PrefixUnpinned, SequenceEnded, StepAnswered, Tick
from octavo.scheduler.core.sequence import SequenceGroup
from octavo.scheduler.core.speculation.acceptance import TrackRecord
from octavo.scheduler.core.steps_in_flight import ReplicaStats, StepDeadlines
from octavo.scheduler.core.waiting_queue import WaitingQueue
from octavo.testing.cluster import FRONTEND, Cluster, Stream, make_request, reference_tokens, write_fake_model
from octavo.testing.depth import deep_unless
from octavo.testing.fakes.drafters import adversary
from octavo.testing.fakes.spoilable import SpoilableRunner
from octavo.testing.promises import Promises
from octavo.wire.requests import Prefix, RejectReason, Request
from octavo.wire.steps import StepPlan

from ..expectations import assert_worker_agrees

# Where the names of sequences and steps begin, so that they are known from all other numbers; and how a pickle has
# them: LONG1, six bytes, the lowest first.
_FIRST_NAME = 1 << 40
_NAMES = re.compile(rb"\x8a\x06(..\x00\x00\x00\x01)", re.DOTALL)

Event = tuple[str, ...]
SCHEDULE, TICK = ("schedule",), ("tick",)
# What is wanted may end by these, and by nothing else.
_ENDS = {"tick": RejectReason.NEVER_FITS_KV, "submit": RejectReason.NEVER_FITS_KV, "spoil": RejectReason.NOT_FINITE}
PREFIX = Prefix("pinned", [0])


@dataclass
class World:
    """One state. `unwanted` are the streams that the frontend has aborted or found or been told the end of, with their
    tokens; `lost` workers are to be replaced; `pins` is how often the prefix has been pinned or unpinned."""

    cluster: Cluster
    unwanted: dict[Stream, list[int]] = field(default_factory=dict)
    failures: int = 0
    lost: list[int] = field(default_factory=list)
    pins: int = 0

    @property
    def busy(self) -> list[int]:
        """Workers with plans to answer."""
        return [incarnation for incarnation, replica in self.cluster.replicas.items() if replica.plans]

    def apply(self, event: Event, requests: dict[str, Request], scope: "Scope") -> set[str]:
        """What the plans that this led to have in them."""
        cluster = self.cluster
        match event:
            case ("submit", name):
                cluster.submit(requests[name])
            case ("abort", name):
                cluster.abort(name)
                self._give_up(requests[name])
            case ("end", name, index):
                cluster.handle(SequenceEnded(FRONTEND, name, 1, int(index)))
                self._give_up(requests[name], int(index))
            case ("schedule",):
                cluster.schedule()
            case ("tick",):
                cluster.handle(Tick())
            case ("pin",):
                self.pins += 1
                cluster.handle(PrefixPinned(PREFIX))
            case ("unpin",):
                self.pins += 1
                cluster.handle(PrefixUnpinned(PREFIX.name))
            case ("lose", incarnation):
                self.lost.append(int(incarnation))
                cluster.leave(int(incarnation))
            case ("join", incarnation):
                self.lost.remove(int(incarnation))
                join(cluster, scope, int(incarnation) + len(scope.sizes), scope.replacements[int(incarnation)])
            case ("spoil", name):
                self.failures += 1
                replica = cluster.replicas[1]
                failing = {each.placement.sequence_id for each in cluster.groups[name].live}
                cluster.handle(StepAnswered(1, replica.execute(spoil_output=failing)))
            case (outcome, incarnation):
                self.failures += outcome != "answer"
                replica = cluster.replicas[int(incarnation)]
                result = replica.execute(fail=outcome == "fail", starve=outcome == "starve")
                cluster.handle(StepAnswered(int(incarnation), result))
        self._take_ends(event, requests)
        received = [message for replica in cluster.replicas.values() for message in replica.received]
        seen = {part for plan in received if isinstance(plan, StepPlan) for part in _parts(plan)}
        self._forget_the_past()
        return seen

    def _take_ends(self, event: Event, requests: dict[str, Request]) -> None:
        """What has been told that it ends: by what has just happened, and for the reason that this may be."""
        for name, rejection in self.cluster.rejected.items():
            assert rejection.reason is _ENDS.get(event[0]), f"{name} after {event}: {rejection}"
            assert name in event or event == TICK, f"{name} ends by {event}"
            self._give_up(requests[name])
        self.cluster.rejected.clear()

    def _give_up(self, request: Request, *indexes: int) -> None:
        streams = [(request.request_id, index) for index in indexes or range(request.sampling.num_sequences)]
        heard = {stream: list(self.cluster.streams.get(stream, [])) for stream in streams}
        # In one order, whatever came first.
        self.unwanted = dict(sorted((heard | self.unwanted).items()))

    def _forget_the_past(self) -> None:
        """What no decision depends on would make every state a new one."""
        cluster = self.cluster
        cluster.to_frontend.clear()
        cluster.deltas.clear()
        cluster.given_up.clear()
        cluster.promises = Promises()
        cluster.core.preemptions = cluster.core.swaps = 0
        # Time stands still, and it is always time to look.
        cluster.core._homeless._looked_at = float("-inf")
        # Of one prefix no two are computed at once on a replica.
        cluster.core.prefixes._count = 0
        for replica in cluster.core.replicas.values():
            replica.stats = ReplicaStats()
            replica.steps.non_finite_at.clear()
            # A step that has been made smaller stays so.
            replica.size._passed = 0
        # How often guesses come true, of which more is known by every step.
        guesses = cluster.core.state.speculation._model_guesses
        guesses._acceptance.clear()
        for track in guesses.tracks.values():
            track.acceptance, track.record = guesses._acceptance["draft"], TrackRecord()
        for worker in cluster.replicas.values():
            worker.received.clear()
            assert isinstance(worker.runner, SpoilableRunner)
            worker.runner.to_spoil = worker.runner.to_fail = ()
        for group in cluster.core.groups:
            group.preemptions = group.swaps = group.faults.failed_steps = 0
            for sequence in group.sequences:
                sequence.draft_counts = None


def _parts(plan: StepPlan) -> set[str]:
    moves = plan.moves
    found = {
        "swap out": moves.swap_out,
        "swap in": moves.swap_in,
        "copy": moves.copy,
        "fork": plan.forks,
        "remap": plan.remaps,
        "recompute": [start for start in plan.starts if start.generated_token_ids],
        "draft": plan.drafts,
        "proposal": plan.proposals,
        "hit": [start for start in plan.starts if start.num_computed],
    }
    return {part for part, values in found.items() if values}


class Search:
    """All states of a scope from an empty cluster on."""

    def __init__(self, cluster: Cluster, scope: "Scope") -> None:
        self._scope = scope
        self.requests = {request.request_id: request for request in scope.requests}
        self.references = {
            (request.request_id, index): reference_tokens(request, index)
            for request in scope.requests
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
            # Where nothing is left to be planned, an answer comes next, then workers for those that were lost, then
            # time passes.
            course = (SCHEDULE, *(e for kind in ("answer", "join", "tick") for e in successors if e[0] == kind))
            self._next[number] = next((after for e in course if (after := successors[e]) != number), number)
            assert self._next[number] != number or not world.cluster.core.groups, "the scheduler is stuck"
        self._assert_that_all_ends()

    def _after(self, frozen: bytes, event: Event) -> int:
        world = pickle.loads(frozen)
        self.seen |= world.apply(event, self.requests, self._scope)
        return self._visit(world)

    def _events(self, world: World) -> Iterator[Event]:
        cluster, scope = world.cluster, self._scope
        yield SCHEDULE
        yield from (("answer", str(incarnation)) for incarnation in world.busy)
        if world.failures < scope.max_failures:
            yield from ((how, str(incarnation)) for how in scope.failures for incarnation in world.busy)
            if scope.spoils and world.busy:
                # Of those that the oldest plan computes, each may turn out not finite.
                groups = dict.fromkeys(cluster.core.replicas[1].outstanding[0].groups)
                yield from (("spoil", group.request_id) for group in groups if group.request_id in cluster.groups)
        unknown = [name for name in self.requests if (name, 0) not in cluster.streams]
        yield from (("submit", name) for name in (unknown[:1] if scope.in_order else unknown))
        if scope.ends:
            for name, group in cluster.groups.items():
                yield "abort", name
                # Of one that is alone it is the same.
                if len(group.live) > 1:
                    yield from (("end", name, str(sequence.index)) for sequence in group.live)
        yield from self._changes(world)

    def _changes(self, world: World) -> Iterator[Event]:
        """Of workers and pins, and the time that homeless requests have."""
        cluster, scope = world.cluster, self._scope
        if world.pins < scope.max_pins:
            if cluster.core.prefixes.get(PREFIX.name):
                yield ("unpin",)
            elif cluster.core.pin_refusal(PREFIX) is None:
                yield ("pin",)
        yield from (("lose", str(each)) for each in scope.replacements if each in cluster.replicas)
        yield from (("join", str(each)) for each in world.lost)
        if scope.replacements:
            yield TICK

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
        for incarnation, worker in cluster.replicas.items():
            assert_worker_agrees(cluster.core.replicas[incarnation], worker)
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

    def allowance(self, num_tokens: int) -> float:
        return 1.0


class NoAccounts(WaitingQueue):
    """There is one tenant."""

    def charge(self, group: SequenceGroup, num_tokens: int) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class Scope:
    """What is searched, and what must have been met with for the search to be worth anything.

    There are workers of these `sizes` (in blocks), from 1 on; those named in `replacements` may be lost, once, and then
    others of that size come. Steps may go wrong in the ways `failures`, and with `spoils` what comes of a sequence may
    not be finite, `max_failures` times in all. Requests come in any order unless `in_order`, and with `ends` are given
    up at any time. The prefix is pinned or unpinned `max_pins` times. With a `draft_hit_rate` workers
    have draft models."""

    requests: list[Request]
    sizes: tuple[int, ...]
    replacements: dict[int, int] = field(default_factory=dict)
    block_size: int
    num_cpu_blocks: int = 1
    config: dict[str, Any] = field(default_factory=dict)
    failures: tuple[str, ...] = ("fail",)
    spoils: bool = False
    max_failures: int = 1
    in_order: bool = False
    ends: bool = True
    max_pins: int = 0
    draft_hit_rate: float | None = None
    parts: set[str]


def request(name: str, prompt: list[int], max_tokens: int, **sampling: Any) -> Request:
    return msgspec.structs.replace(make_request(name, len(prompt), max_tokens, **sampling), prompt_token_ids=prompt)


# Prompts begin alike; two long ones do not fit side by side with all that they generate.
SHORT = [request("a", [0], 2), request("b", [0, 1], 1)]
LONG = [request("a", [0], 3), request("b", [0, 1], 2)]
# A prompt that takes two steps.
SAMPLES = [request("a", [0, 1, 2], 2, num_sequences=2, temperature=1.0), request("b", [0], 1)]
LONG_SAMPLES = [request("a", [0], 3, num_sequences=2, temperature=1.0), request("b", [0, 1], 2)]

# The first is computed in two steps, in the second of which the other shares what is still to be computed.
SHARED = [request("a", [0, 1, 2], 1), request("b", [0, 1, 2, 3], 1)]
# Of two sequences, which swapped out wait for as many tokens of a step.
WIDE = [request("b", [1, 2], 5), request("a", [0], 3, num_sequences=2, temperature=1.0)]
# The last is swapped out, and for the one before it CPU memory has no room.
THREE = [request("a", [0], 8), request("b", [1, 2], 5), request("c", [3], 4)]
# The first two fit only the larger of two workers.
TWO_SIZES = [request("a", [0, 1], 3), request("b", [1, 2], 3), request("c", [2], 2)]
# It fits beside the pinned prefix where it began, and elsewhere only without that.
PINNED = [request("a", [0], 2)]
# What comes in the place of a worker holds only the second.
SHRUNK = [request("a", [0], 2), request("b", [1], 1)]

# Of the first guesses are right and wrong, and fill blocks; the second begins with what is guessed.
GUESSED = [request("a", [0], 5), request("b", [0, 1], 3)]

SWAP = {"preemption": Preemption.SWAP}
ONE_DEEP = {"max_steps_in_flight": 1}
SCOPES = {
    "recomputation, two steps deep": Scope(
        requests=LONG,
        sizes=(4,),
        block_size=1,
        max_failures=0,
        parts={"hit", "recompute", "remap"},
    ),
    "a failed step, two steps deep": Scope(
        requests=SHORT,
        sizes=(3,),
        block_size=1,
        parts={"hit", "recompute"},
    ),
    "no room to swap to": Scope(
        requests=LONG,
        sizes=(4,),
        block_size=1,
        config=SWAP | ONE_DEEP,
        parts={"hit", "recompute", "remap"},
    ),
    "swapping": Scope(
        requests=LONG,
        sizes=(3,),
        block_size=2,
        config=SWAP | ONE_DEEP,
        parts={"hit", "recompute", "swap out", "swap in"},
    ),
    "the paper's policy": Scope(
        requests=LONG,
        sizes=(3,),
        block_size=2,
        config=SWAP | ONE_DEEP | {"policy": Policy.PAPER},
        parts={"hit", "recompute", "swap out", "swap in"},
    ),
    "a sequence that fails, two steps deep": Scope(
        requests=SHARED,
        sizes=(8,),
        block_size=1,
        failures=(),
        spoils=True,
        ends=False,
        parts={"hit"},
    ),
    "steps that shrink under a wide group": Scope(
        requests=WIDE,
        sizes=(8,),
        block_size=1,
        num_cpu_blocks=8,
        config=SWAP | ONE_DEEP | {"max_num_batched_tokens": 4},
        failures=("starve",),
        in_order=True,
        ends=False,
        parts={"swap out", "swap in"},
    ),
    "one swapped and one recomputed": Scope(
        requests=THREE,
        sizes=(12,),
        block_size=1,
        num_cpu_blocks=4,
        config=SWAP | ONE_DEEP | {"max_num_batched_tokens": 4, "prefix_caching": False},
        max_failures=0,
        in_order=True,
        ends=False,
        parts={"swap out", "swap in", "recompute"},
    ),
    "drafts and a failed step": Scope(
        requests=GUESSED,
        sizes=(6,),
        block_size=1,
        config=ONE_DEEP | {"speculation": 2, "max_num_batched_tokens": 5},
        in_order=True,
        ends=False,
        parts={"draft", "hit", "recompute"},
    ),
    "drafts of a sequence that fails, two steps deep": Scope(
        requests=GUESSED,
        sizes=(8,),
        block_size=1,
        config={"speculation": 2, "max_num_batched_tokens": 5},
        failures=(),
        spoils=True,
        in_order=True,
        ends=False,
        parts={"draft", "hit"},
    ),
    "proposals and a failed step": Scope(
        requests=GUESSED,
        sizes=(6,),
        block_size=1,
        config=ONE_DEEP | {"speculation": 2, "max_num_batched_tokens": 5},
        draft_hit_rate=0.7,
        in_order=True,
        ends=False,
        parts={"draft", "proposal", "recompute"},
    ),
    "proposals where blocks are short": Scope(
        requests=GUESSED,
        sizes=(3,),
        block_size=2,
        config=SWAP | {"speculation": 2, "max_num_batched_tokens": 4},
        draft_hit_rate=0.7,
        max_failures=0,
        in_order=True,
        parts={"draft", "proposal", "swap out", "swap in"},
    ),
    "drafts where blocks are short": Scope(
        requests=GUESSED,
        sizes=(3,),
        block_size=2,
        config=SWAP | {"speculation": 2, "max_num_batched_tokens": 4},
        max_failures=0,
        in_order=True,
        parts={"draft", "swap out", "swap in"},
    ),
    "two sizes": Scope(
        requests=TWO_SIZES,
        sizes=(6, 4),
        block_size=1,
        config=ONE_DEEP | {"overtaking_s": 0.0},
        max_failures=0,
        in_order=True,
        ends=False,
        parts=set(),
    ),
    "a smaller worker comes back": Scope(
        requests=SHRUNK,
        sizes=(3,),
        replacements={1: 2},
        block_size=1,
        config=ONE_DEEP,
        max_failures=0,
        in_order=True,
        ends=False,
        parts=set(),
    ),
}
LONG_SCOPES = {
    "pins on what is left": Scope(
        requests=PINNED,
        sizes=(4, 3),
        replacements={1: 3},
        block_size=1,
        config=ONE_DEEP,
        max_failures=0,
        ends=False,
        max_pins=1,
        parts={"hit"},
    ),
    "two samples, two steps deep": Scope(
        requests=SAMPLES,
        sizes=(6,),
        block_size=2,
        max_failures=0,
        parts={"fork", "copy", "remap"},
    ),
    "swapping, two steps deep": Scope(
        requests=LONG,
        sizes=(3,),
        block_size=2,
        config=SWAP,
        parts={"hit", "recompute", "swap out", "swap in"},
    ),
    "two samples and a failed step": Scope(
        requests=SAMPLES,
        sizes=(6,),
        block_size=2,
        config=ONE_DEEP,
        parts={"fork", "copy", "remap", "recompute"},
    ),
    "two samples swapped, two steps deep": Scope(
        requests=LONG_SAMPLES,
        sizes=(4,),
        block_size=2,
        num_cpu_blocks=2,
        config=SWAP | {"max_num_batched_tokens": 3},
        max_failures=0,
        parts={"fork", "copy", "remap", "swap out", "swap in"},
    ),
}
# Whoever wants one may search it, whatever this run does.
ALL_SCOPES = SCOPES | LONG_SCOPES
if "OCTAVO_TEST_LONG" in os.environ:
    SCOPES |= LONG_SCOPES


# Every mechanism in few states. The others have thousands.
SHALLOW = {
    "a sequence that fails, two steps deep",
    "steps that shrink under a wide group",
    "one swapped and one recomputed",
    "two sizes",
    "pins on what is left",
    "drafts and a failed step",
}


@pytest.mark.parametrize("name", deep_unless(SHALLOW.__contains__, SCOPES))
def test_every_state_is_sound_and_leads_to_the_end(tmp_path: Path, name: str) -> None:
    scope = SCOPES[name]
    search = search_of(scope, write_fake_model(tmp_path / "model"))
    search.run()
    print(f"{name}: {search.num_states} states, {search.num_transitions} transitions")
    assert search.seen >= scope.parts


def search_of(scope: Scope, directory: Path) -> Search:
    """The search of a scope, with the fake model in `directory`."""
    config: dict[str, Any] = {
        "watermark": 0.0,
        "speculation": "off",
        "max_num_batched_tokens": 2,
        "misfit_grace_s": 0.0,
    } | scope.config
    # What a router knows has come in some order, by which equal states would differ.
    cluster = Cluster(directory, is_routed=False, drafter=adversary(), **config)
    cluster.core.request_table.waiting = NoAccounts()
    for incarnation, num_blocks in enumerate(scope.sizes, 1):
        join(cluster, scope, incarnation, num_blocks)
    return Search(cluster, scope)


def join(cluster: Cluster, scope: Scope, incarnation: int, num_blocks: int) -> None:
    """A worker of this size comes, whose steps take no time and whose names are known from all other numbers."""
    cluster.join(
        incarnation,
        num_blocks=num_blocks,
        block_size=scope.block_size,
        num_cpu_blocks=scope.num_cpu_blocks,
        draft_hit_rate=scope.draft_hit_rate,
    )
    replica = cluster.core.replicas[incarnation]
    replica.next_plan.step_id = replica.next_plan.sequence_id = _FIRST_NAME
    replica.steps.deadlines = cast(StepDeadlines, NoDeadlines())
