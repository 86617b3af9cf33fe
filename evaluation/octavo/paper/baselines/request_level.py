"""Batches requests as in front of FasterTransformer: the earliest requests, as many as memory holds, are computed
together.

Nothing joins until all of them have ended. Their answers are handed out together, at that end. Sequences that have
ended cost their batch nothing more here, and prompts are not padded; both were otherwise in such servers, so this one
is a little faster than they.
"""

from collections.abc import Iterable

from octavo.scheduler.core.sequence import SequenceGroup
from octavo.scheduler.core.step import running
from octavo.scheduler.core.step.builder import StepBuilder
from octavo.scheduler.core.step.policies import StepPolicy
from octavo.workload.measures import Served


def begin(builder: StepBuilder, head: SequenceGroup | None, now: float) -> bool:
    """Goes on with the batch, if there is one."""
    replica = builder.replica
    builder.prefills = not replica.running
    if builder.prefills:
        return True
    found = running.runnable(replica)
    if not running.decode(builder, found.decodes):
        return False
    running.continue_prefills(builder, found.prefilling)
    return True


def admits(builder: StepBuilder) -> bool:
    """Returns whether this step begins a batch, which others may still join."""
    return builder.prefills and builder.budget > 0


def end(builder: StepBuilder) -> bool:
    """Returns True: nothing is left to be added once the waiting queue has been looked at."""
    return True


POLICY = StepPolicy(begin, admits, end, lookahead=1, whole_prompts=True)


def hand_out_by_batch(served: Iterable[Served]) -> None:
    """Moves the answers of one replica's requests to the end of their batch.

    All of a batch have their first tokens before its end, and those of the next after it. What has not ended has no
    batch that has.
    """
    batch: list[Served] = []
    batch_end = 0.0
    for each in sorted((each for each in served if each.first_token_s is not None), key=_first_token_s):
        if batch and _first_token_s(each) > batch_end:
            _hand_out(batch, batch_end)
            batch = []
        batch.append(each)
        batch_end = max(batch_end, float("inf") if each.finished_s is None else each.finished_s)
    _hand_out(batch, batch_end)


def _first_token_s(served: Served) -> float:
    assert served.first_token_s is not None
    return served.first_token_s


def _hand_out(batch: list[Served], end: float) -> None:
    for each in batch:
        each.first_token_s = each.finished_s = None if end == float("inf") else end
