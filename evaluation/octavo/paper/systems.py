"""The systems that the paper compares, each as a configuration and a strategy of the production scheduler."""

from collections.abc import Callable, Sequence
from math import inf
from typing import Final, NamedTuple

import msgspec

from octavo.paper.baselines import iteration_level, request_level, vllm
from octavo.paper.baselines.contiguous_kv import (
    Reserve,
    contiguous_kv,
    exactly,
    longest_possible,
    next_power_of_two,
)
from octavo.scheduler.core.config import Preemption, SchedulerConfig
from octavo.scheduler.core.step.strategy import StepPolicy, Strategy
from octavo.simulator.device import ReplicaSpec
from octavo.simulator.engine import Cluster, Outcome, Simulation
from octavo.simulator.timeline import Probe
from octavo.wire.requests import Prefix
from octavo.workload.job import Job


class System(NamedTuple):
    """What a cluster needs to be one of these systems."""

    config: SchedulerConfig
    strategy: Strategy


def _contiguous(reserve: Reserve, policy: StepPolicy) -> Callable[[ReplicaSpec], System]:
    return lambda spec: System(vllm.common_config(spec), Strategy(policy, contiguous_kv(reserve)))


def _faster_transformer(spec: ReplicaSpec) -> System:
    # A batch's prompts are one step, however many they are.
    slots = spec.num_blocks * spec.block_size
    config = msgspec.structs.replace(vllm.common_config(spec), max_num_batched_tokens=slots)
    return System(config, Strategy(request_level.POLICY, contiguous_kv(longest_possible)))


def vllm_system(spec: ReplicaSpec, preemption: Preemption = Preemption.AUTO) -> System:
    """The paper's own system. As its release it recomputes what is preempted, and swaps it where several sequences
    would have to be recomputed."""
    return System(*vllm.paged(spec, preemption))


FASTER_TRANSFORMER: Final = "FasterTransformer"
VLLM: Final = "vLLM"
# In the order of the paper's legends. All have one replica's slots, `spec.num_blocks * spec.block_size`.
SYSTEMS: Final[dict[str, Callable[[ReplicaSpec], System]]] = {
    FASTER_TRANSFORMER: _faster_transformer,
    "Orca (Max)": _contiguous(longest_possible, iteration_level.POLICY),
    "Orca (Pow2)": _contiguous(next_power_of_two, iteration_level.POLICY),
    "Orca (Oracle)": _contiguous(exactly, iteration_level.POLICY),
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
) -> Outcome:
    """What becomes of jobs on one replica under a system of `SYSTEMS`.

    FasterTransformer's answers come at the end of their batch; the outcome's gaps are still those between tokens as
    they are generated. Raises `ValueError` for a `preemption` or `pinned` prefixes of a system that has none.
    """
    if name != VLLM and (preemption is not None or pinned):
        raise ValueError(f"{name} neither preempts nor shares prefixes; only {VLLM} does")
    system = SYSTEMS[name](spec) if preemption is None else vllm_system(spec, preemption)
    cluster = Cluster(system.config, [spec], strategy=system.strategy, pinned=pinned)
    simulation = Simulation(cluster, seed=seed, sample_every_s=sample_every_s, probe=probe)
    outcome = simulation.run(jobs, horizon_s)
    if name == FASTER_TRANSFORMER:
        request_level.hand_out_by_batch(outcome.served)
    return outcome
