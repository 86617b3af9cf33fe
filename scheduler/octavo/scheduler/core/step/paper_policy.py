"""The paper's policy: a step is all prefill or all decode, and prompts go first (vLLM's first scheduler).

The waiting queue is looked at only while nothing is swapped out, but for what lost its blocks and came before that; and
once its head has waited for `delay_factor` times what the last prefill took, or nothing runs. It stops at the first
request that does not fit.
"""

import math

from octavo.scheduler.core.admission import Obstacle, ObstacleKind, returns_before
from octavo.scheduler.core.sequence import SequenceGroup
from octavo.scheduler.core.step import running
from octavo.scheduler.core.step.builder import StepBuilder

LOOKAHEAD = 1


def begin(builder: StepBuilder, head: SequenceGroup | None, now: float) -> bool:
    """Goes on with prompts that were too long for one step; if none is begun and none may be, decodes."""
    running.continue_prefills(builder, running.runnable(builder.replica).prefilling)
    running.start_prefixes(builder)
    if builder.work:
        return True
    builder.prefills = _may_prefill(builder, head, now)
    return builder.prefills or _decode(builder)


def admits(builder: StepBuilder) -> bool:
    """Whether waiting groups may join the step."""
    return builder.prefills and builder.budget > 0


def end(builder: StepBuilder) -> bool:
    """A step that found no prompt to prefill decodes after all."""
    if builder.work or not builder.prefills:
        return True
    builder.prefills = False
    return _decode(builder)


def keeps_out(builder: StepBuilder, head: SequenceGroup, now: float) -> Obstacle | None:
    """What keeps the step from looking at the waiting queue, of which `head` is the first, if no prompt is begun: what
    is swapped out comes first, and prompts gather for a while unless nothing runs (in milliseconds)."""
    replica, waited = builder.replica, now - head.arrival
    if replica.swapped and not returns_before(head, replica.swapped[0]):
        return Obstacle(ObstacleKind.SWAPPED, 0, len(replica.swapped))
    delay = replica.config.delay_factor * replica.prefill_latency
    if not replica.running or waited >= delay:
        return None
    return Obstacle(ObstacleKind.DELAY, math.ceil(delay * 1000), int(waited * 1000))


def _may_prefill(builder: StepBuilder, head: SequenceGroup | None, now: float) -> bool:
    # While others are swapped out, only for what comes back before them.
    first = builder.returning if builder.replica.swapped else head
    return first is not None and keeps_out(builder, first, now) is None


def _decode(builder: StepBuilder) -> bool:
    if not running.decode(builder, running.runnable(builder.replica).decodes):
        return False
    running.resume_swapped(builder)
    return True
