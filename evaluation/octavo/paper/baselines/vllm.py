"""vLLM as it was published: the production scheduler's paged memory under its first policy, a step at a time."""

from octavo.scheduler.core.config import Policy, Preemption, SchedulerConfig
from octavo.scheduler.core.step.strategy import Strategy, configured
from octavo.simulator.device import ReplicaSpec

# Of its first release: tokens that a step computes at most, and sequences side by side.
MAX_NUM_BATCHED_TOKENS = 2560
MAX_NUM_SEQS = 256


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


def paged(spec: ReplicaSpec, preemption: Preemption) -> tuple[SchedulerConfig, Strategy]:
    """Blocks of `spec.block_size`; what is preempted is swapped or recomputed."""
    config = common_config(spec, preemption)
    return config, configured(config)
