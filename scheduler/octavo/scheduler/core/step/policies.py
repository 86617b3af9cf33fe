"""Policies for filling a replica's steps: the chunked one, and the paper's.

Chunked: decode and prefill share a step; prefill chunks fill what decodes leave of the token budget.

Paper: a step is all prefill or all decode, and prompts go first (as in vLLM's first scheduler). The waiting queue is
looked at only while no group is swapped out, except for a group that has lost its blocks and arrived before the swapped
ones; and only once its head has waited for `delay_factor` times what the last prefill took, or nothing runs. It stops
at the first request that does not fit.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from octavo.scheduler.core.admission import Obstacle, ObstacleKind, returns_before
from octavo.scheduler.core.config import Policy
from octavo.scheduler.core.replica import Replica
from octavo.scheduler.core.sequence import SequenceGroup
from octavo.scheduler.core.state import SchedulerState
from octavo.scheduler.core.step import running
from octavo.scheduler.core.step.builder import StepBuilder


def _nothing(builder: StepBuilder, head: SequenceGroup, now: float) -> None:
    """Keeps no group out."""


@dataclass(frozen=True)
class StepPolicy:
    """The rules by which one replica's step is filled.

    `begin(builder, head, now)` runs before the waiting queue is looked at, whose first group is `head`; `end(builder)`
    runs after it. Both return whether the builder stands: if not, no plan is sent. While `admits(builder)` holds,
    waiting groups may join; `lookahead` of them are tried at a time, and with `whole_prompts` none whose prefill would
    have to be cut. `keeps_out(builder, head, now)` takes an empty builder and names what keeps the step from admitting
    though it has tokens left, if anything does.
    """

    begin: Callable[[StepBuilder, SequenceGroup | None, float], bool]
    admits: Callable[[StepBuilder], bool]
    end: Callable[[StepBuilder], bool]
    lookahead: int
    whole_prompts: bool
    keeps_out: Callable[[StepBuilder, SequenceGroup, float], Obstacle | None] = _nothing


def empty_step(state: SchedulerState, replica: Replica) -> StepBuilder:
    """Returns an empty step of `replica`, which gives no drafts."""
    returning = next(state.replica_table.returning(replica), None) if replica.swapped else None
    return StepBuilder(replica, replica.token_budget, returning)


# -- chunked --------------------------------------------------------------------------------------------------------


def _begin_chunked(builder: StepBuilder, head: SequenceGroup | None, now: float) -> bool:
    """Adds running sequences: all decodes, then partial prefills, each in order of arrival; then brings swapped groups
    back.

    Returns whether the builder stands (`octavo.scheduler.core.step.running.decode`).
    """
    found = running.runnable(builder.replica)
    if not running.decode(builder, found, head):
        return False
    if found.prefilling:
        running.continue_prefills(builder, found.prefilling)
    if builder.replica.prefixes.to_compute:
        running.start_prefixes(builder)
    if builder.replica.swapped:
        running.resume_swapped(builder)
    return True


def _admits_chunked(builder: StepBuilder) -> bool:
    return builder.budget > 0


def _end_chunked(builder: StepBuilder) -> bool:
    """Adds nothing: the step is full once the waiting queue has been looked at."""
    return True


CHUNKED = StepPolicy(_begin_chunked, _admits_chunked, _end_chunked, lookahead=8, whole_prompts=False)


# -- paper ----------------------------------------------------------------------------------------------------------


def _begin_paper(builder: StepBuilder, head: SequenceGroup | None, now: float) -> bool:
    """Goes on with prompts that were too long for one step; if none is begun and none may be, decodes."""
    running.continue_prefills(builder, running.runnable(builder.replica).prefilling)
    running.start_prefixes(builder)
    if builder.work:
        return True
    builder.prefills = _may_prefill(builder, head, now)
    return builder.prefills or _decode(builder)


def _admits_paper(builder: StepBuilder) -> bool:
    return builder.prefills and builder.budget > 0


def _end_paper(builder: StepBuilder) -> bool:
    """Decodes after all where the step found no prompt to prefill."""
    if builder.work or not builder.prefills:
        return True
    builder.prefills = False
    return _decode(builder)


def _keeps_out(builder: StepBuilder, head: SequenceGroup, now: float) -> Obstacle | None:
    """Returns what keeps the step from looking at the waiting queue, which `head` leads, if no prompt is begun.

    Swapped groups come back first; and prompts gather for a while unless nothing runs (an obstacle in milliseconds).
    """
    replica, waited = builder.replica, now - head.arrival
    if replica.swapped and not returns_before(head, replica.swapped[0]):
        return Obstacle(ObstacleKind.SWAPPED, 0, len(replica.swapped))
    delay = replica.config.delay_factor * replica.steps.prefill_latency
    if not replica.running or waited >= delay:
        return None
    return Obstacle(ObstacleKind.DELAY, math.ceil(delay * 1000), int(waited * 1000))


def _may_prefill(builder: StepBuilder, head: SequenceGroup | None, now: float) -> bool:
    # While groups are swapped out, only a group that comes back before them may prefill.
    first = builder.returning if builder.replica.swapped else head
    return first is not None and _keeps_out(builder, first, now) is None


def _decode(builder: StepBuilder) -> bool:
    if not running.decode(builder, running.runnable(builder.replica)):
        return False
    running.resume_swapped(builder)
    return True


PAPER = StepPolicy(_begin_paper, _admits_paper, _end_paper, lookahead=1, whole_prompts=True, keeps_out=_keeps_out)


POLICIES = {Policy.CHUNKED: CHUNKED, Policy.PAPER: PAPER}
