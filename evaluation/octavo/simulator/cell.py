"""Runs one scheduler, its replicas and its clients in virtual time, from event to event: requests come, steps end, the
scheduler plans."""

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from functools import partial

from msgspec import structs

from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.core.events import (
    DiskAnswered,
    Effect,
    FrontendJoined,
    LossCause,
    PrefixPinned,
    PullAnswered,
    ReplicaHeard,
    ReplicaJoined,
    ReplicaLeft,
    ReplicaLost,
    RequestSubmitted,
    SchedulerObserver,
    SendToFrontend,
    SendToReplica,
    StepAnswered,
    Tick,
)
from octavo.scheduler.core.scheduler import Scheduler
from octavo.scheduler.core.sequence import Tier
from octavo.scheduler.core.step.policies import StepPolicy
from octavo.scheduler.core.steps_in_flight import OutstandingStep
from octavo.scheduler.kv.manager import paged_memory
from octavo.scheduler.kv.memory import MakeMemory
from octavo.simulator.device import Device, Disk, ReplicaSpec
from octavo.simulator.speculation import Acceptance, Outputs, SimulatedDrafter
from octavo.wire.requests import CacheKey, Deltas, Prefix, Rejected, Request
from octavo.wire.sampling import BeamSearch, EarlyStopping, SamplingParams
from octavo.wire.steps import BlocksFetched, BlocksPulled, PullBlocks, StepPlan, StepResult
from octavo.workload.conversations import LaterTurns
from octavo.workload.guesses import Guesses
from octavo.workload.job import Job, Transcript
from octavo.workload.measures import Gaps, Served

# -- clients ----------------------------------------------------------------------------------------------------------


_NO_CACHE_KEY = CacheKey()


@dataclass(slots=True)
class _Stream:
    """Holds an open request, and when each of its sequences had its last token."""

    served: Served
    num_open: int
    last_at: dict[int, float] = field(default_factory=dict)
    # Of a conversation: the prompt, and what was generated behind it.
    said: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Due:
    """Describes the next turn of a conversation, number `index` of its workload, at the time at which it comes; `said`
    is what was said before."""

    index: int
    job: Job
    said: list[int]


class Clients:
    """Records what becomes of every request, with the number of its job. They speak the later turns of conversations
    once the ones before have been answered."""

    def __init__(self) -> None:
        self.served: list[tuple[int, Served]] = []
        self.gaps = Gaps()
        # Later turns of which the time is known now.
        self.due: list[Due] = []
        self._open: dict[str, _Stream] = {}
        self._later = LaterTurns[int]()

    def hold(self, index: int, job: Job) -> None:
        """Keeps a later turn of a conversation until the one before has been answered."""
        self._later.hold(job, index)

    def expect(self, index: int, job: Job, prompt_token_ids: Sequence[int] = ()) -> None:
        """Expects the answers to the job's request, which comes now."""
        served = Served(job, None, None, 0)
        self.served.append((index, served))
        said = list(prompt_token_ids) if job.turn else []
        self._open[_request_id(index)] = _Stream(served, job.n, said=said)

    def take_due(self) -> list[Due]:
        """Returns the later turns of which the time has become known since the last call."""
        due, self.due = self.due, []
        return due

    def _ended(self, stream: _Stream, now: float) -> None:
        """Finds the next turn of a conversation; those behind one that has failed fail too."""
        while (found := self._later.after(stream.served.job)) is not None:
            job, index = found
            if not stream.served.error:
                self.due.append(Due(index, replace(job, arrival_s=max(job.arrival_s, now + job.think_s)), stream.said))
                return
            stream = _Stream(Served(replace(job, arrival_s=now), error="conversation_broken: a turn before failed"), 0)
            self.served.append((index, stream.served))

    def take(self, message: Deltas | Rejected, now: float) -> None:
        """Takes a message for clients at the virtual time `now`."""
        if isinstance(message, Rejected):
            stream = self._open.pop(message.request_id)
            stream.served.error = f"{message.reason.value}: {message.detail}"
            self._ended(stream, now)
            return
        add_gap = self.gaps.add
        for delta in message.deltas:
            stream = self._open[delta.request_id]
            served, last_at, index = stream.served, stream.last_at, delta.sequence_index
            served.num_tokens += len(delta.token_ids)
            if served.job.turn:
                stream.said += delta.token_ids
            if served.first_token_s is None:
                served.first_token_s = now
                served.cached_tokens = delta.cached_prompt_tokens
            if index in last_at:
                add_gap(now - last_at[index])
            last_at[index] = now
            if delta.finish_reason is not None:
                stream.num_open -= 1
                if not stream.num_open:
                    served.finished_s = now
                    served.preemptions = delta.preemptions
                    del self._open[delta.request_id]
                    self._ended(stream, now)


def ask(index: int, job: Job, prompt_token_ids: list[int], model_fingerprint: str) -> Request:
    """Makes the request of job number `index`."""
    transcript = job.transcript
    return Request(
        request_id=_request_id(index),
        attempt=1,
        resubmitted=False,
        model_fingerprint=model_fingerprint,
        prompt_token_ids=prompt_token_ids,
        generated=[],
        sampling=_sampling(job, index),
        priority=job.priority,
        tenant=job.tenant,
        cache_key=CacheKey("", transcript.salt, transcript.salted_from) if transcript else _NO_CACHE_KEY,
        age_ms=0,
        predicted_token_ids=transcript.predicted_token_ids if transcript else [],
    )


def _request_id(index: int) -> str:
    return str(index)


def _sampling(job: Job, seed: int) -> SamplingParams:
    if job.beam_width:
        beam = BeamSearch(job.beam_width, length_penalty=1.0, early_stopping=EarlyStopping.OFF)
        return SamplingParams(max_tokens=job.output_tokens, num_sequences=job.n, beam=beam)
    return SamplingParams(max_tokens=job.output_tokens, temperature=1.0, num_sequences=job.n, seed=seed)


# -- the scheduler and its replicas -----------------------------------------------------------------------------------


_FRONTEND = 1


class SimulationError(Exception):
    """Says why a simulation cannot go on."""


@dataclass(frozen=True, slots=True)
class Pending:
    """Describes a step that will be done, or what a disk will have read."""

    time: float
    incarnation: int
    fetched: BlocksFetched | None = None


@dataclass(frozen=True, slots=True)
class Copying:
    """Describes blocks that a replica will have copied from another one, if that is still there."""

    time: float
    pull: PullBlocks


@dataclass
class Copied:
    """Counts what replicas have copied of each other: requests that moved, with so many blocks; blocks of prefixes; the
    bytes of all that arrived, and copies that came to nothing."""

    requests: int = 0
    blocks: int = 0
    prefix_blocks: int = 0
    nbytes: int = 0
    failed: int = 0

    def merge(self, other: "Copied") -> None:
        """Adds what another cell's replicas have copied."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


class _CopyCounts(SchedulerObserver):
    """Counts copies, and the tokens of prompts that were found computed in any tier."""

    def __init__(self) -> None:
        self.copied = Copied()
        self.cached_tokens = 0

    def prefix_lookup(self, prompt_tokens: int, cached_tokens: int) -> None:
        self.cached_tokens += cached_tokens

    def moved(self, num_blocks: int) -> None:
        self.copied.requests += 1
        self.copied.blocks += num_blocks

    def prefix_copied(self, num_blocks: int, num_found: int, *, is_late: bool) -> None:
        self.copied.prefix_blocks += num_found


# Heartbeats and renewals of leases are not simulated, so nobody is lost for their lack.
_NEVER_S = 1e12


def _patient(config: SchedulerConfig) -> SchedulerConfig:
    return structs.replace(
        config, lease_s=_NEVER_S, idle_timeout_s=_NEVER_S, step_timeout_s=_NEVER_S, first_step_timeout_s=_NEVER_S
    )


@dataclass(frozen=True, slots=True)
class Restart:
    """Has the worker of the first replica end at a time, in seconds, as one that is told to at once, and come back
    `down_s` seconds later with nothing but what is on its disk."""

    at_s: float
    down_s: float

    @classmethod
    def parse(cls, text: str) -> "Restart":
        """Reads such as "60:5". Raises `ValueError`."""
        at, _, down = text.partition(":")
        try:
            times = float(at), float(down)
        except ValueError:
            times = (-1.0, -1.0)
        if not all(0.0 <= time < float("inf") for time in times):
            raise ValueError(f"{text!r} is no restart: write AT:DOWN, as 60:5 for after 60 seconds, and back 5 later")
        return cls(*times)


class SimulatedCell:
    """Runs the scheduler's core in virtual time, in the place of its shell. `take` gets the messages for clients."""

    def __init__(
        self,
        config: SchedulerConfig,
        replicas: Sequence[ReplicaSpec],
        take: Callable[[Deltas | Rejected, float], None],
        *,
        make_memory: MakeMemory = paged_memory,
        policy: StepPolicy | None = None,
        link_s: float = 0.0,
        acceptance: Acceptance | None = None,
        seed: int = 0,
    ) -> None:
        self._outputs = Outputs(replicas[0].vocab_size)
        drafter, self._counts = SimulatedDrafter(acceptance, self._outputs, f"{seed} guesses"), _CopyCounts()
        self._has_links = any(spec.peer_link for spec in replicas)
        self.core = Scheduler(
            _patient(config) if self._has_links else config, 1, self._counts, make_memory, policy, drafter
        )
        # By incarnation.
        self.devices: dict[int, Device] = {}
        self._specs, self._seed, self._num_incarnations = list(replicas), seed, 0
        # By the number of their replicas.
        self._disks = {number: Disk(spec.disk) for number, spec in enumerate(replicas, start=1) if spec.disk}
        self._incarnation_of: dict[int, int] = {}
        # Of workers that have ended.
        self._busy_s = 0.0
        self._found: Counter[Tier] = Counter()
        self._copying: list[Copying] = []
        # How often a sequence has chosen in a step; and what became of the guesses there.
        self.turns = 0
        self.guesses = Guesses()
        self._take = take
        self._link_s = link_s
        self.core.handle(FrontendJoined(_FRONTEND), 0.0)
        for number in range(1, len(replicas) + 1):
            self.join(number, 0.0)

    def join(self, number: int, now: float) -> None:
        """Registers the worker of replica `number`, for the first time or again."""
        self._num_incarnations += 1
        incarnation, spec = self._num_incarnations, self._specs[number - 1]
        beams, disk = random.Random(f"{self._seed} {incarnation}"), self._disks.get(number)
        self.devices[incarnation] = Device(spec, incarnation, self._outputs, beams, disk)
        self._incarnation_of[number] = incarnation
        effects = self.core.handle(ReplicaJoined(spec.hello(incarnation, number)), now)
        if incarnation not in self.core.replicas:
            raise SimulationError(f"replica {number} may not join: {effects}")
        self._deliver(effects, now)

    def leave(self, number: int, now: float) -> None:
        """Ends the worker of replica `number`: what it held is computed elsewhere, or when it is back."""
        incarnation = self._incarnation_of[number]
        self._busy_s += self.devices.pop(incarnation).busy_s
        self._found += self.core.replicas[incarnation].stats.hit_tokens
        left = ReplicaLeft(incarnation, LossCause.GOODBYE, "said goodbye")
        effects = self.core.handle(left, now)
        self._deliver([effect for effect in effects if not isinstance(effect, ReplicaLost)], now)

    @property
    def num_replicas(self) -> int:
        """Counts those that are down too."""
        return len(self._specs)

    @property
    def busy_s(self) -> float:
        """Returns the seconds in which workers have computed."""
        return self._busy_s + sum(device.busy_s for device in self.devices.values())

    @property
    def found(self) -> dict[str, int]:
        """Counts the tokens of prompts that were found computed, by tier; the others came from another replica."""
        found = sum((replica.stats.hit_tokens for replica in self.core.replicas.values()), self._found)
        by_tier = {tier.value: found[tier] for tier in Tier if found[tier]}
        num_copied = self._counts.cached_tokens - found.total()
        return {**by_tier, "replica": num_copied} if num_copied else by_tier

    @property
    def copied(self) -> Copied:
        """Counts what replicas have copied of each other."""
        return self._counts.copied

    @property
    def work_tokens(self) -> int:
        """Returns the tokens still to be computed of all that is held, as the cell's scheduler reports to frontends."""
        return sum(group.work_tokens for group in self.core.groups)

    @property
    def is_idle(self) -> bool:
        """Returns whether the core holds no request of a client."""
        return not any(self.core.request_table.held.values())

    def pin(self, prefix: Prefix) -> None:
        """Keeps a prefix computed on every replica."""
        if refusal := self.core.pin_refusal(prefix):
            raise SimulationError(f"prefix {prefix.name} cannot be pinned: {refusal}")
        self.core.handle(PrefixPinned(prefix), 0.0)

    def submit(self, request: Request, transcript: Transcript | None, now: float) -> None:
        """Submits a request, whose sequences will say what the transcript says."""
        if transcript is not None:
            self._outputs.expect(request.request_id, transcript.outputs)
        self._deliver(self.core.handle(RequestSubmitted(_FRONTEND, request), now), now)

    def answer(self, incarnation: int, now: float) -> Iterator[Pending]:
        """Answers a replica's oldest step; what its disk reads from then on will be there. A replica that has left
        answers nothing."""
        if incarnation not in self.devices:
            return
        step, device = self.core.replicas[incarnation].outstanding[0], self.devices[incarnation]
        result = device.answer(step, self.core.epoch)
        self._count(step, result)
        self._deliver(self.core.handle(StepAnswered(incarnation, result), now), now)
        if (fetched := device.fetched(step.step_id, self.core.epoch, now)) is not None:
            answer, at = fetched
            yield Pending(at + self._link_s, incarnation, answer)

    def read(self, answer: BlocksFetched, now: float) -> None:
        """Tells the core what a disk has read, and what it holds; nothing of a replica that has left."""
        incarnation = answer.incarnation
        if (device := self.devices.get(incarnation)) is not None and device.disk is not None:
            self._deliver(self.core.handle(DiskAnswered(incarnation, answer), now), now)
            self._deliver(self.core.handle(ReplicaHeard(incarnation, disk=device.disk.use), now), now)

    def take_copying(self) -> list[Copying]:
        """Returns the copies that have begun since the last call."""
        copying, self._copying = self._copying, []
        return copying

    def end_copy(self, pull: PullBlocks, now: float) -> None:
        """Tells the core that a replica has copied what it was asked to, or not, where the other is gone; nothing of a
        replica that has left."""
        if pull.incarnation in self.devices:
            is_complete, spec = pull.source in self.devices, self.devices[pull.incarnation].spec
            self.copied.failed += not is_complete
            self.copied.nbytes += is_complete * len(pull.moves) * spec.block_bytes
            answer = BlocksPulled(self.core.epoch, pull.incarnation, pull.pull_id, is_complete)
            self._deliver(self.core.handle(PullAnswered(pull.incarnation, answer), now), now)

    def tick(self, now: float) -> None:
        """Lets the core look at what moves as time passes."""
        if self._has_links:
            self._deliver(self.core.handle(Tick(), now), now)

    def _begin_copy(self, pull: PullBlocks, now: float) -> None:
        device, source = self.devices[pull.incarnation], self.devices.get(pull.source)
        arrives = now + self._link_s
        done = arrives if source is None else device.copy(len(pull.moves), source, arrives)
        self._copying.append(Copying(done + self._link_s, pull))

    def _count(self, step: OutstandingStep, result: StepResult) -> None:
        self.turns += len(step.samplers)
        right = {each.sequence_id: len(each.token_ids) for each in result.further}
        for sequence_id, draft in step.drafts.items():
            self.guesses.add(len(draft.token_ids), right.get(sequence_id, 0))

    def plan(self, now: float) -> Iterator[Pending]:
        """Asks for plans; the steps that will be done, and when their results are here."""
        for effect in self.core.schedule(now):
            if isinstance(effect, SendToReplica) and isinstance(effect.message, StepPlan):
                incarnation = effect.replica_id
                step = self.core.replicas[incarnation].outstanding[-1]
                num_sampled = len(step.samplers) + len(step.beams) + step.num_guesses
                done = self.devices[incarnation].take(effect.message, num_sampled, now + self._link_s)
                yield Pending(done + self._link_s, incarnation)
            else:
                self._deliver([effect], now)

    def _deliver(self, effects: list[Effect], now: float) -> None:
        for effect in effects:
            match effect:
                case SendToFrontend(_, Deltas() | Rejected() as message):
                    self._take(message, now)
                case SendToReplica(_, PullBlocks() as pull):
                    self._begin_copy(pull, now)
                case ReplicaLost(_, cause, reason):
                    raise SimulationError(f"a replica was lost: {cause}, {reason}")


# -- time -------------------------------------------------------------------------------------------------------------


# A shell looks at its core so often even if nothing happens: for what waits for time alone, and for the second step in
# flight. It is given up after so long without any step.
_TICK_S = 0.1
_STALLED_S = 600.0
# The number of the replica of a cell that restarts.
_RESTARTED = 1

Probe = Callable[[float, Scheduler], None]


@dataclass(frozen=True, slots=True)
class Sample:
    """Describes a moment: requests that wait, run or are swapped out, sequences that run, and blocks, of all cells
    together."""

    time: float
    waiting: int
    running: int
    swapped: int
    sequences: int
    blocks_used: int
    blocks_cached: int
    blocks: int

    @classmethod
    def of(cls, time: float, core: Scheduler) -> "Sample":
        """Returns one cell's share of the sample."""
        replicas = core.replicas.values()
        return cls(
            time,
            len(core.waiting),
            sum(len(replica.running) for replica in replicas),
            sum(len(replica.swapped) for replica in replicas),
            sum(replica.num_running_seqs for replica in replicas),
            sum(replica.kv.num_blocks - replica.kv.num_free for replica in replicas),
            sum(replica.kv.num_cached for replica in replicas),
            sum(replica.kv.num_blocks for replica in replicas),
        )

    @classmethod
    def total(cls, shares: Sequence["Sample"]) -> "Sample":
        """Returns the sum of shares at the same time."""
        columns = zip(*map(astuple, shares), strict=True)
        next(columns)
        return cls(shares[0].time, *map(sum, columns))


class Timeline:
    """Holds a cell and what is still to happen to it. The cell is sampled each `sample_every_s` (0: never), where
    `probe` sees its core too. `speak` makes the request of a later turn, whose turn it is now, and `take_due` returns
    those of which the time has become known."""

    def __init__(
        self,
        cell: SimulatedCell,
        sample_every_s: float,
        probe: Probe | None,
        *,
        take_due: Callable[[], Iterable[Due]] = list,
        speak: Callable[[Due], Request] | None = None,
        restarts: Sequence[Restart] = (),
    ) -> None:
        self.cell = cell
        self._take_due, self._speak = take_due, speak
        self.steps = 0
        # When a request came or a step ended last.
        self.moved_at = 0.0
        self.samples: list[Sample] = []
        self._sample_every_s = sample_every_s
        self._probe = probe
        self._arrivals: deque[tuple[Request, Job]] = deque()
        # When, in which order, and what happens.
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._num_events = 0
        self._is_ticking = False
        for restart in restarts:
            self._push(restart.at_s, partial(self._leave, restart.down_s))

    @property
    def next_at(self) -> float:
        """Returns the time at which something happens next; infinite if nothing does."""
        next_arrival = self._arrivals[0][1].arrival_s if self._arrivals else float("inf")
        return min(next_arrival, self._events[0][0]) if self._events else next_arrival

    def expect(self, request: Request, job: Job) -> None:
        """Expects the request of a job, which will come after all that were expected before."""
        self._arrivals.append((request, job))

    def run(self, until: float) -> None:
        """Runs everything that happens before then. Raises `SimulationError` if the cell cannot go on."""
        while (now := self.next_at) < until:
            self._sample_before(now)
            while self._arrivals and self._arrivals[0][1].arrival_s <= now:
                request, job = self._arrivals.popleft()
                self.cell.submit(request, job.transcript, now)
                self.moved_at = now
            while self._events and self._events[0][0] <= now:
                heapq.heappop(self._events)[2](now)
            self._plan(now)
            for copying in self.cell.take_copying():
                self._push(copying.time, partial(self.cell.end_copy, copying.pull))
            for due in self._take_due():
                self._push(due.job.arrival_s, partial(self._submit, due))
            if now - self.moved_at > _STALLED_S and not self._arrivals:
                raise SimulationError(f"nothing has been computed for {_STALLED_S:g} s, though requests wait")

    def _look_again(self, now: float) -> None:
        self._is_ticking = False
        self.cell.tick(now)

    def _end(self, incarnation: int, now: float) -> None:
        """Ends a step of a replica that has not left."""
        if incarnation in self.cell.devices:
            for pending in self.cell.answer(incarnation, now):
                assert pending.fetched is not None
                self._push(pending.time, partial(self.cell.read, pending.fetched))
            self.steps += 1
            self.moved_at = now

    def _submit(self, due: Due, now: float) -> None:
        assert self._speak is not None
        self.cell.submit(self._speak(due), None, now)
        self.moved_at = now

    def _leave(self, down_s: float, now: float) -> None:
        self.cell.leave(_RESTARTED, now)
        self._push(now + down_s, self._come_back)

    def _come_back(self, now: float) -> None:
        self.cell.join(_RESTARTED, now)

    def _plan(self, now: float) -> None:
        for pending in self.cell.plan(now):
            self._push(pending.time, partial(self._end, pending.incarnation))
        if not self._is_ticking and not self.cell.is_idle:
            self._is_ticking = True
            self._push(now + _TICK_S, self._look_again)

    def _push(self, time: float, event: Callable[[float], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time, self._num_events, event))

    def finish(self, end: float) -> None:
        """Takes the samples that are due until the end of the simulation, and no later ones."""
        self._sample_before(end)
        self.samples = [sample for sample in self.samples if sample.time <= end]

    def _sample_before(self, now: float) -> None:
        """Takes the samples that are due up to `now`, for which the present state holds."""
        while self._sample_every_s and (time := len(self.samples) * self._sample_every_s) <= now:
            self.samples.append(Sample.of(time, self.cell.core))
            if self._probe is not None:
                self._probe(time, self.cell.core)
