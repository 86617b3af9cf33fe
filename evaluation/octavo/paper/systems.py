"""Builds the systems that the paper compares: each is the production scheduler with a configuration, a KV memory and a
step policy."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import inf
from typing import Final, NamedTuple

import msgspec

from octavo.paper.contiguous_kv import (
    Reserve,
    contiguous_kv,
    exactly,
    longest_possible,
    next_power_of_two,
)
from octavo.scheduler.core.config import Policy, Preemption, SchedulerConfig
from octavo.scheduler.core.sequence import SequenceGroup
from octavo.scheduler.core.step import running
from octavo.scheduler.core.step.builder import StepBuilder
from octavo.scheduler.core.step.policies import CHUNKED, PAPER, StepPolicy
from octavo.scheduler.kv.manager import paged_memory
from octavo.scheduler.kv.memory import MakeMemory
from octavo.simulator.cell import Probe
from octavo.simulator.device import ReplicaSpec
from octavo.simulator.engine import Cluster, Simulation, SimulationOutcome
from octavo.wire.requests import Prefix
from octavo.workload.job import Job
from octavo.workload.measures import Served

# -- batches of whole requests ----------------------------------------------------------------------------------------


def _begin_batch(builder: StepBuilder, head: SequenceGroup | None, now: float) -> bool:
    """Goes on with the batch, if there is one."""
    replica = builder.replica
    builder.prefills = not replica.running
    if builder.prefills:
        return True
    found = running.runnable(replica)
    if not running.decode(builder, found, head):
        return False
    running.continue_prefills(builder, found.prefilling)
    return True


def _admits_to_batch(builder: StepBuilder) -> bool:
    """Returns whether this step begins a batch, which others may still join."""
    return builder.prefills and builder.budget > 0


def _end_batch(builder: StepBuilder) -> bool:
    """Returns True: nothing is left to be added once the waiting queue has been looked at."""
    return True


REQUEST_LEVEL: Final = StepPolicy(_begin_batch, _admits_to_batch, _end_batch, lookahead=1, whole_prompts=True)


def hand_out_by_batch(served: Iterable[Served]) -> None:
    """Moves the answers of one replica's requests to the end of their batch.

    All of a batch have their first tokens before its end, and those of the next after it. What has not ended has no
    batch that has.
    """
    batch: list[Served] = []
    batch_end = 0.0
    for each in sorted((each for each in served if each.first_token_s is not None), key=_first_token_s):
        if batch and _first_token_s(each) > batch_end:
            _hand_out(batch, batch_end)
            batch = []
        batch.append(each)
        batch_end = max(batch_end, float("inf") if each.finished_s is None else each.finished_s)
    _hand_out(batch, batch_end)


def _first_token_s(served: Served) -> float:
    assert served.first_token_s is not None
    return served.first_token_s


def _hand_out(batch: list[Served], end: float) -> None:
    for each in batch:
        each.first_token_s = each.finished_s = None if end == float("inf") else end


# -- systems ----------------------------------------------------------------------------------------------------------


# Limits of vLLM's first release: tokens that a step computes at most, and sequences side by side.
MAX_NUM_BATCHED_TOKENS = 2560
MAX_NUM_SEQS = 256
# Orca's batching: requests in order of arrival. After every iteration those that have ended leave, and new ones join as
# soon as there is memory for them, with their whole prompts beside the others' decodes.
ITERATION_LEVEL: Final = replace(CHUNKED, lookahead=1, whole_prompts=True)


class System(NamedTuple):
    """Holds what a cluster needs to be one of these systems."""

    config: SchedulerConfig
    make_memory: MakeMemory
    policy: StepPolicy


def common_config(spec: ReplicaSpec, preemption: Preemption = Preemption.AUTO) -> SchedulerConfig:
    """Limits that all systems share: queues without an end, nothing found again in a cache, one step in flight."""
    return SchedulerConfig(
        max_num_batched_tokens=max(MAX_NUM_BATCHED_TOKENS, spec.max_model_len),
        max_num_seqs=MAX_NUM_SEQS,
        max_waiting=1 << 40,
        max_steps_in_flight=1,
        policy=Policy.PAPER,
        preemption=preemption,
        prefix_caching=False,
    )


def _contiguous(reserve: Reserve, policy: StepPolicy) -> Callable[[ReplicaSpec], System]:
    return lambda spec: System(common_config(spec), contiguous_kv(reserve), policy)


def _faster_transformer(spec: ReplicaSpec) -> System:
    # A batch's prompts are one step, however many they are.
    slots = spec.num_blocks * spec.block_size
    config = msgspec.structs.replace(common_config(spec), max_num_batched_tokens=slots)
    return System(config, contiguous_kv(longest_possible), REQUEST_LEVEL)


def vllm_system(spec: ReplicaSpec, preemption: Preemption = Preemption.AUTO) -> System:
    """Returns vLLM as it was published: the production scheduler's paged memory under its first policy, a step at a
    time, in blocks of `spec.block_size`. As its release it recomputes what is preempted, and swaps it where several
    sequences would have to be recomputed."""
    return System(common_config(spec, preemption), paged_memory, PAPER)


FASTER_TRANSFORMER: Final = "FasterTransformer"
VLLM: Final = "vLLM"
# In the order of the paper's legends. All have one replica's slots, `spec.num_blocks * spec.block_size`.
SYSTEMS: Final[dict[str, Callable[[ReplicaSpec], System]]] = {
    FASTER_TRANSFORMER: _faster_transformer,
    "Orca (Max)": _contiguous(longest_possible, ITERATION_LEVEL),
    "Orca (Pow2)": _contiguous(next_power_of_two, ITERATION_LEVEL),
    "Orca (Oracle)": _contiguous(exactly, ITERATION_LEVEL),
    VLLM: vllm_system,
}


def run(
    name: str,
    spec: ReplicaSpec,
    jobs: Sequence[Job],
    *,
    seed: int = 0,
    sample_every_s: float = 0.0,
    probe: Probe | None = None,
    horizon_s: float = inf,
    preemption: Preemption | None = None,
    pinned: Sequence[Prefix] = (),
) -> SimulationOutcome:
    """Runs jobs on one replica under a system of `SYSTEMS` and returns what became of them.

    FasterTransformer's answers come at the end of their batch; the outcome's gaps are still those between tokens as
    they are generated. Raises `ValueError` for a `preemption` or `pinned` prefixes of a system that has none.
    """
    if name != VLLM and (preemption is not None or pinned):
        raise ValueError(f"{name} neither preempts nor shares prefixes; only {VLLM} does")
    system = SYSTEMS[name](spec) if preemption is None else vllm_system(spec, preemption)
    cluster = Cluster(system.config, [spec], make_memory=system.make_memory, policy=system.policy, pinned=pinned)
    simulation = Simulation(cluster, seed=seed, sample_every_s=sample_every_s, probe=probe)
    outcome = simulation.run(jobs, horizon_s)
    if name == FASTER_TRANSFORMER:
        hand_out_by_batch(outcome.served)
    return outcome
