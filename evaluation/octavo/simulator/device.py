"""Simulates a replica that computes nothing: it runs plans one after the other, each as long as its latency model
says, copies blocks of others beside them, and has a disk, which keeps blocks beyond its life."""

import random
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

from octavo.runtime.models.step_times import StepShape
from octavo.scheduler.core.sequence import Sequence, SequenceGroup
from octavo.scheduler.core.steps_in_flight import OutstandingStep
from octavo.simulator.speculation import Outputs
from octavo.wire.base import SCHEMA_VERSION
from octavo.wire.costs import StepCosts, attended_pairs
from octavo.wire.steps import (
    BlockServer,
    BlocksFetched,
    Candidates,
    DiskUse,
    FurtherTokens,
    KVDisk,
    KVGroup,
    ModelInfo,
    SampledToken,
    StepOutcome,
    StepPlan,
    StepResult,
    StepTimes,
    WorkerHello,
    WorkerRole,
)


class LatencyModel(Protocol):
    """Computes the seconds of a step from its shape: measured (`octavo.runtime.models.step_times`) or computed
    (`octavo.simulator.hardware`)."""

    def seconds(self, shape: StepShape) -> float: ...


# The most probable next token of a beam has a logprob of minus an exponential variable with mean 1; each next one is
# less likely by another with this mean: how soon the beams of a search have a common past follows from it.
BEAM_GAP = 1.0


@dataclass(frozen=True)
class DiskSpec:
    """Describes a replica's disk: it holds `num_blocks` blocks, and reads one in `read_s` seconds. With a `mirror` it
    keeps all that steps fill."""

    num_blocks: int
    read_s: float = 0.0
    mirror: bool = False


class Disk:
    """Keeps contents, those read or written last."""

    def __init__(self, spec: DiskSpec) -> None:
        self._spec = spec
        self._contents: OrderedDict[tuple[int, bytes], None] = OrderedDict()
        self._num_evicted = 0
        self._free_at = 0.0

    @property
    def use(self) -> DiskUse:
        """Returns what a worker would tell of it."""
        return DiskUse(len(self._contents), self._spec.num_blocks, self._num_evicted)

    def store(self, plan: StepPlan) -> None:
        """Keeps what the plan has it store, or forgets all."""
        assert plan.disk is not None
        if plan.disk.clear:
            self._contents.clear()
        for content in plan.disk.store:
            self._use(content.kv_group, content.value)
        while len(self._contents) > self._spec.num_blocks:
            self._contents.popitem(last=False)
            self._num_evicted += 1

    def fetch(self, plan: StepPlan, now: float) -> tuple[list[bool], float]:
        """Returns which of the contents that the plan has it fetch are there, and when they have been read: one after
        the other, and after those before."""
        assert plan.disk is not None
        found = [(content.kv_group, content.value) in self._contents for content in plan.disk.fetch]
        for content, is_there in zip(plan.disk.fetch, found, strict=True):
            if is_there:
                self._use(content.kv_group, content.value)
        self._free_at = max(now, self._free_at) + sum(found) * self._spec.read_s
        return found, self._free_at

    def _use(self, kv_group: int, value: bytes) -> None:
        self._contents[kv_group, value] = None
        self._contents.move_to_end((kv_group, value))


@dataclass(frozen=True)
class PeerLink:
    """Describes how replicas read each other's blocks, those of their devices too: a copy takes `copy_s` seconds, and
    `block_s` for each of its blocks. A replica reads from one other at a time, and is read by one."""

    block_s: float
    copy_s: float = 0.0


@dataclass(frozen=True)
class ReplicaSpec:
    """Describes a replica's memory and speed, and what it is for. `costs` is what the replica would report of itself to
    the scheduler (None: nothing). Of the tokens that a beam may go on with, each has on average a logprob smaller than
    the one before by `beam_gap`. Without a `peer_link` nothing moves to it, or from it."""

    num_blocks: int
    block_size: int
    latency: LatencyModel
    num_cpu_blocks: int = 0
    max_model_len: int = 1 << 20
    vocab_size: int = 1 << 16
    device: str = "cuda"
    costs: StepCosts | None = None
    name: str = "simulated"
    beam_gap: float = BEAM_GAP
    disk: DiskSpec | None = None
    kv_bytes_per_token: int = 0
    role: WorkerRole = WorkerRole.BOTH
    peer_link: PeerLink | None = None

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.kv_bytes_per_token

    @property
    def model(self) -> ModelInfo:
        return ModelInfo(self.name, self.name, "none", self.vocab_size, self.max_model_len)

    def hello(self, incarnation: int, number: int) -> WorkerHello:
        """Returns the message with which the worker of replica `number` would register as this incarnation."""
        return WorkerHello(
            schema_version=SCHEMA_VERSION,
            worker_id=f"worker-{number}",
            incarnation=incarnation,
            process=incarnation,
            model=self.model,
            device=self.device,
            world_size=1,
            num_blocks=self.num_blocks,
            num_cpu_blocks=self.num_cpu_blocks,
            block_size=self.block_size,
            kv_bytes_per_token=self.kv_bytes_per_token,
            kv_groups=[KVGroup(window=0)],
            costs=self.costs,
            kv_disk=KVDisk(self.disk.read_s, self.disk.mirror, f"disk-{number}") if self.disk else None,
            block_server=BlockServer(f"replica-{number}", self.name) if self.peer_link else None,
            role=self.role,
        )


class Device:
    """Runs one replica's steps. Sequences choose what `outputs` says; beams draw. The `disk` may have been another
    incarnation's."""

    def __init__(
        self,
        spec: ReplicaSpec,
        incarnation: int,
        outputs: Outputs,
        beam_random: random.Random,
        disk: Disk | None = None,
    ) -> None:
        self.spec = spec
        self.disk = disk
        self.busy_s = 0.0
        self._incarnation = incarnation
        self._outputs = outputs
        self._random = beam_random
        self._computed: dict[int, int] = {}
        self._durations: list[float] = []
        # Plans that have the disk fetch something once they are done, by their steps.
        self._fetches: dict[int, StepPlan] = {}
        self._free_at = 0.0
        # When it has read all that it was asked to of others, and others of it.
        self._reads_until = self._is_read_until = 0.0

    def take(self, plan: StepPlan, num_sampled: int, now: float) -> float:
        """Puts a plan behind those that it has; when it will be done."""
        seconds = self.spec.latency.seconds(self._shape(plan, num_sampled))
        self._free_at = max(now, self._free_at) + seconds
        self._durations.append(seconds)
        self.busy_s += seconds
        if plan.disk is not None and self.disk is not None:
            # What is stored was computed by the plans before.
            self.disk.store(plan)
            if plan.disk.fetch:
                self._fetches[plan.step_id] = plan
        return self._free_at

    def fetched(self, step_id: int, epoch: int, now: float) -> tuple[BlocksFetched, float] | None:
        """Returns the answer of the disk to a step that is done now, and when it comes; None if nothing was asked."""
        plan = self._fetches.pop(step_id, None)
        if plan is None or self.disk is None:
            return None
        found, at = self.disk.fetch(plan, now)
        return BlocksFetched(epoch, self._incarnation, step_id, found), at

    def copy(self, num_blocks: int, source: "Device", now: float) -> float:
        """Returns when so many blocks of the source are here: nothing is written before the plans that it has are
        done."""
        link = self.spec.peer_link
        assert link is not None, "a replica copies that reads from no other"
        begins = max(now, self._free_at, self._reads_until, source._is_read_until)
        self._reads_until = source._is_read_until = begins + link.copy_s + num_blocks * link.block_s
        return self._reads_until

    def _shape(self, plan: StepPlan, num_sampled: int) -> StepShape:
        computed = self._computed
        for sequence_id in plan.forget:
            computed.pop(sequence_id, None)
        for start in plan.starts:
            computed[start.sequence_id] = start.num_computed
        for fork in plan.forks:
            computed[fork.sequence_id] = computed[fork.parent_id]
        guesses = {draft.sequence_id: len(draft.token_ids) for draft in plan.drafts}
        num_tokens = context = 0
        pairs = 0.0
        for work in plan.work:
            count, before = work.num_tokens, computed[work.sequence_id]
            further = guesses.get(work.sequence_id, 0)
            num_tokens += count + further
            if count == 1:
                # What is guessed is computed beside the token before it like a prompt's.
                context += before + 1
                pairs += attended_pairs(before + 1, further, (0,)) if further else 0.0
            else:
                pairs += attended_pairs(before, count, (0,))
            computed[work.sequence_id] = before + count
            for follower_id in work.follower_ids:
                computed[follower_id] = before + count
        moves = plan.moves
        return StepShape(
            num_tokens, num_sampled, context, pairs, len(moves.swap_out), len(moves.swap_in), len(moves.copy)
        )

    def answer(self, step: OutstandingStep, epoch: int) -> StepResult:
        """Answers the oldest plan that is not answered, which asked for `step`."""
        sampled: list[SampledToken] = []
        further: list[FurtherTokens] = []
        for group, sequence in step.samplers:
            sequence_id, draft = sequence.placement.sequence_id, step.drafts.get(sequence.placement.sequence_id)
            token_id, *others = self._chosen(group, sequence, draft.token_ids if draft else [])
            sampled.append(SampledToken(sequence_id, token_id))
            if others:
                further.append(FurtherTokens(sequence_id, others))
                self._computed[sequence_id] += len(others)
        candidates = [self._candidates(group, beam.placement.sequence_id) for group, beam in step.beams]
        times = StepTimes(0, int(self._durations.pop(0) * 1e6), 0)
        return StepResult(
            epoch, self._incarnation, step.step_id, StepOutcome.DONE, sampled, candidates, [], [], times, "", further
        )

    def _chosen(self, group: SequenceGroup, sequence: Sequence, guesses: list[int]) -> list[int]:
        """Returns the tokens that a sequence chooses: one, and one for each guess before the first wrong one."""
        token_ids = self._outputs.tokens(group.request_id, sequence.index, sequence.num_generated, 1 + len(guesses))
        pairs = enumerate(zip(guesses, token_ids, strict=False))
        num_right = next((place for place, (guess, token_id) in pairs if guess != token_id), len(guesses))
        return token_ids[: 1 + num_right]

    def _candidates(self, group: SequenceGroup, sequence_id: int) -> Candidates:
        assert group.search is not None
        count = group.search.num_candidates
        logprobs = [-self._random.expovariate(1.0)]
        for _ in range(count - 1):
            logprobs.append(logprobs[-1] - self._random.expovariate(1 / self.spec.beam_gap))
        first = self._random.randrange(self.spec.vocab_size)
        token_ids = [(first + number) % self.spec.vocab_size for number in range(count)]
        return Candidates(sequence_id, token_ids, logprobs)
