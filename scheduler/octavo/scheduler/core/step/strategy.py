"""What decides over a replica's memory and over what its steps hold: as configured, or an experiment's own."""

from collections.abc import Callable
from dataclasses import dataclass

from octavo.scheduler.core.admission import Obstacle
from octavo.scheduler.core.config import Policy, SchedulerConfig
from octavo.scheduler.core.replica import paged_kv
from octavo.scheduler.core.sequence import SequenceGroup
from octavo.scheduler.core.step import chunked_policy, paper_policy
from octavo.scheduler.core.step.builder import StepBuilder
from octavo.scheduler.kv.manager import KVCacheManager
from octavo.wire.steps import WorkerHello


def _nothing(builder: StepBuilder, head: SequenceGroup, now: float) -> None:
    """Keeps nobody out."""


@dataclass(frozen=True)
class StepPolicy:
    """How one replica's step is filled: `begin` before the waiting queue is looked at (its head and the time are given)
    and `end` after it, each with the verdict whether the builder stands; `admits` while groups may join, of which
    `lookahead` are tried at a time, and with `whole_prompts` none whose prefill would have to be cut. `keeps_out` says,
    of a step that does not admit though tokens are left, why: given an empty builder, the queue's head and the time."""

    begin: Callable[[StepBuilder, SequenceGroup | None, float], bool]
    admits: Callable[[StepBuilder], bool]
    end: Callable[[StepBuilder], bool]
    lookahead: int
    whole_prompts: bool
    keeps_out: Callable[[StepBuilder, SequenceGroup, float], Obstacle | None] = _nothing


@dataclass(frozen=True)
class Strategy:
    """How steps are filled, and who manages the KV memory of a replica that joins."""

    policy: StepPolicy
    make_kv: Callable[[WorkerHello, SchedulerConfig], KVCacheManager] = paged_kv


_POLICIES = {
    Policy.CHUNKED: StepPolicy(
        chunked_policy.begin, chunked_policy.admits, chunked_policy.end, chunked_policy.LOOKAHEAD, whole_prompts=False
    ),
    Policy.PAPER: StepPolicy(
        paper_policy.begin,
        paper_policy.admits,
        paper_policy.end,
        paper_policy.LOOKAHEAD,
        whole_prompts=True,
        keeps_out=paper_policy.keeps_out,
    ),
}


def configured(config: SchedulerConfig) -> Strategy:
    """Paged memory, and the policy that the configuration names."""
    return Strategy(_POLICIES[config.policy])
