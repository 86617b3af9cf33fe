"""What a worker skips of plans that were sent before it was known: all that they compute of a sequence that failed.

A later plan of the same replica may have built upon that already: a request that was admitted in it shares a block that
is now never filled, another shares what the first makes of it. None of them is to be relied on.
"""

from collections.abc import Iterable

from octavo.scheduler.core.replica import OutstandingStep, Replica
from octavo.scheduler.core.sequence import SequenceGroup


def withdraw(replica: Replica, step: OutstandingStep, failed: Iterable[int]) -> list[SequenceGroup]:
    """Takes out of the prefix cache what plans behind `step` were to compute of the sequences that `failed` in it (by
    id), of those in one group with them, and of all that build upon it; the groups of all of these.

    Those that have been aborted meanwhile count, for others may build upon them. To be called while `step` is the
    oldest that is outstanding."""
    later = [each for each in replica.outstanding if each.step_id > step.step_id]
    skipped = set(failed)
    groups: list[SequenceGroup] = []
    # Whoever builds on something is planned behind it.
    for group in dict.fromkeys(group for each in later for group in each.groups):
        if _builds_on(group, skipped, step.step_id):
            skipped |= _names(group)
            groups.append(group)
    replica.kv.withdraw(skipped, step.step_id)
    return groups


def _builds_on(group: SequenceGroup, skipped: set[int], answered_step_id: int) -> bool:
    return not skipped.isdisjoint(_names(group)) or any(
        step_id > answered_step_id and owner in skipped
        for sequence in group.sequences
        for step_id, owner in sequence.builds_on
    )


def _names(group: SequenceGroup) -> set[int]:
    """Its sequences by the ids that they have, or had, here."""
    return {each.sequence_id for each in group.sequences if each.is_introduced or not each.is_live}
