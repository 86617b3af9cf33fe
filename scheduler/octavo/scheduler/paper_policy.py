"""The paper's policy: a step is all prefill or all decode, and prompts go first (vLLM's first scheduler).

The waiting queue is looked at only while nothing is swapped out, and once its head has waited for `delay_factor` times
what the last prefill took, or nothing runs. It stops at the first request that does not fit.
"""

from octavo.scheduler import running
from octavo.scheduler.draft import Draft
from octavo.scheduler.sequence import SequenceGroup

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


def _may_prefill(draft: Draft, head: SequenceGroup | None, now: float) -> bool:
    replica = draft.replica
    if head is None or replica.swapped:
        return False
    delay = replica.config.delay_factor * replica.prefill_latency
    return now - head.arrival >= delay or not replica.running


def _decode(draft: Draft) -> bool:
    if not running.decode(draft, running.survey(draft.replica).decodes):
        return False
    running.resume_swapped(draft)
    return True
