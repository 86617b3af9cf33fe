"""The chunked policy: decode and prefill share a step; prefill chunks fill what decodes leave of the token budget."""

from octavo.scheduler.core.sequence import SequenceGroup
from octavo.scheduler.core.step import running
from octavo.scheduler.core.step.builder import Draft

# How many requests behind the head are tried where that does not fit.
LOOKAHEAD = 8


def begin(draft: Draft, head: SequenceGroup | None, now: float) -> bool:
    """Running sequences first: all decodes, then partial prefills, each in order of arrival; then those swapped out.

    Whether the draft stands (`octavo.scheduler.core.step.running.decode`).
    """
    found = running.survey(draft.replica)
    if not running.decode(draft, found.decodes):
        return False
    running.continue_prefills(draft, found.prefilling)
    running.start_prefixes(draft)
    running.resume_swapped(draft)
    return True


def admits(draft: Draft) -> bool:
    """Whether waiting groups may join the step."""
    return draft.budget > 0


def end(draft: Draft) -> bool:
    """Nothing is left to be added once the waiting queue has been looked at."""
    return True
