"""The paper's policy: a step is all prefill or all decode, and prompts go first (vLLM's first scheduler).

The waiting queue is looked at only while nothing is swapped out, but for what lost its blocks and came before that; and
once its head has waited for `delay_factor` times what the last prefill took, or nothing runs. It stops at the first
request that does not fit.
"""

import math

from octavo.scheduler.core.admission import Obstacle, ObstacleKind, returns_before
from octavo.scheduler.core.sequence import SequenceGroup
from octavo.scheduler.core.step import running
from octavo.scheduler.core.step.builder import Draft

LOOKAHEAD = 1


def begin(draft: Draft, head: SequenceGroup | None, now: float) -> bool:
    """Goes on with prompts that were too long for one step; if none is begun and none may be, decodes."""
    running.continue_prefills(draft, running.survey(draft.replica).prefilling)
    running.start_prefixes(draft)
    if draft.work:
        return True
    draft.prefills = _may_prefill(draft, head, now)
    return draft.prefills or _decode(draft)


def admits(draft: Draft) -> bool:
    """Whether waiting groups may join the step."""
    return draft.prefills and draft.budget > 0


def end(draft: Draft) -> bool:
    """A step that found no prompt to prefill decodes after all."""
    if draft.work or not draft.prefills:
        return True
    draft.prefills = False
    return _decode(draft)


def keeps_out(draft: Draft, head: SequenceGroup, now: float) -> Obstacle | None:
    """What keeps the step from looking at the waiting queue, of which `head` is the first, if no prompt is begun: what
    is swapped out comes first, and prompts gather for a while unless nothing runs (in milliseconds)."""
    replica, waited = draft.replica, now - head.arrival
    if replica.swapped and not returns_before(head, replica.swapped[0]):
        return Obstacle(ObstacleKind.SWAPPED, 0, len(replica.swapped))
    delay = replica.config.delay_factor * replica.prefill_latency
    if not replica.running or waited >= delay:
        return None
    return Obstacle(ObstacleKind.DELAY, math.ceil(delay * 1000), int(waited * 1000))


def _may_prefill(draft: Draft, head: SequenceGroup | None, now: float) -> bool:
    # While others are swapped out, only for what comes back before them.
    first = draft.returning if draft.replica.swapped else head
    return first is not None and keeps_out(draft, first, now) is None


def _decode(draft: Draft) -> bool:
    if not running.decode(draft, running.survey(draft.replica).decodes):
        return False
    running.resume_swapped(draft)
    return True
