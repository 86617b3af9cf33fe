"""The chunked policy: decode and prefill share a step; prefill chunks fill what decodes leave of the token budget."""

from octavo.scheduler.core.sequence import SequenceGroup
from octavo.scheduler.core.step import running
from octavo.scheduler.core.step.builder import StepBuilder

# How many requests behind the head are tried where that does not fit.
LOOKAHEAD = 8


def begin(builder: StepBuilder, head: SequenceGroup | None, now: float) -> bool:
    """Running sequences first: all decodes, then partial prefills, each in order of arrival; then those swapped out.

    Whether the builder stands (`octavo.scheduler.core.step.running.decode`).
    """
    found = running.runnable(builder.replica)
    if not running.decode(builder, found.decodes):
        return False
    running.continue_prefills(builder, found.prefilling)
    running.start_prefixes(builder)
    running.resume_swapped(builder)
    return True


def admits(builder: StepBuilder) -> bool:
    """Whether waiting groups may join the step."""
    return builder.budget > 0


def end(builder: StepBuilder) -> bool:
    """Nothing is left to be added once the waiting queue has been looked at."""
    return True
