"""Results of steps and what becomes of groups: they get their tokens, end, or start over where the step failed."""

from octavo.scheduler.core import workers
from octavo.scheduler.core.events import LossCause, PrefixGivenUp
from octavo.scheduler.core.replica import Replica
from octavo.scheduler.core.sequence import PrefixGroup, RequestGroup, SequenceGroup
from octavo.scheduler.core.state import SchedulerState
from octavo.scheduler.core.step import outputs as results
from octavo.scheduler.core.steps_in_flight import (
    MAX_NON_FINITE,
    NON_FINITE_WINDOW_S,
    OutstandingStep,
    num_sampled,
)
from octavo.wire.requests import Deltas, RejectReason
from octavo.wire.steps import FailureReason, StepOutcome, StepResult


def take(state: SchedulerState, replica: Replica, result: StepResult, now: float) -> None:
    """Books the result of a step; a replica that answers a step it was not asked for is lost."""
    outstanding = replica.outstanding
    step = outstanding[0] if outstanding else None
    if step is None or step.step_id != result.step_id or not results.answers(step, result):
        reason = f"answered step {result.step_id}, which it was not asked"
        workers.lose(state, replica.replica_id, LossCause.CONFUSED, reason, now)
        return
    done = result.outcome is StepOutcome.DONE
    failures = results.separate(replica, step, result.failed) if result.failed else None
    seconds = replica.answered(step, result, now)
    if done:
        state.requests.suspects.computed(step)
        state.observer.step(step.num_tokens, num_sampled(result), len(step.groups), seconds)
        is_non_finite = False
        if failures is not None:
            is_non_finite = results.is_non_finite(replica, step, failures)
            _end_failed(state, replica, failures, is_non_finite=is_non_finite)
        _book(state, replica, results.accept(replica, step, result))
        if is_non_finite and replica.steps.was_non_finite(now):
            reason = f"gave nothing finite to any request of {MAX_NON_FINITE} steps within {NON_FINITE_WINDOW_S:g} s"
            workers.expel(state, replica, reason, now)
            return
    else:
        _fail_step(replica, step, result)
    if replica.restarts and not outstanding:
        _restart(state, replica)


def _book(state: SchedulerState, replica: Replica, outcome: results.Outcome) -> None:
    for frontend_id, deltas in outcome.deltas.items():
        state.outbox.to_frontend(frontend_id, Deltas(state.epoch, deltas))
    for reason in outcome.reasons:
        state.observer.finished(reason)
    for draft, num_accepted in outcome.drafts:
        state.observer.drafted(draft.source.value, len(draft.token_ids), num_accepted)
    for sequence, guesses in outcome.proposed:
        state.speculation.take(replica, sequence, guesses)
    for group in outcome.finished:
        replica.remove(group)
        state.requests.finish(group)
    for prefix in outcome.prefixes:
        replica.pin(prefix)


def _end_failed(state: SchedulerState, replica: Replica, failures: results.Failures, *, is_non_finite: bool) -> None:
    """Ends the groups whose sequences failed of themselves, unless the replica may be at fault: in a non-finite
    step, or if another replica can be tried. Their victims start over, without what they shared, and so do stranded
    groups."""
    for group, failure in failures.ended.items():
        if group in replica.restarts:
            # The group's next step was outstanding when the first failure became known.
            continue
        if failure.reason is FailureReason.NOT_FINITE and _may_try_again(
            state, replica, group, is_non_finite=is_non_finite
        ):
            group.faults.non_finite_on = replica.replica_id
            replica.restart_later(group, RejectReason(failure.reason), failure.detail)
        else:
            _give_up(state, replica, group, RejectReason(failure.reason), failure.detail)
    for group, failure in failures.victims.items():
        if is_non_finite and group.faults.non_finite_on is None:
            group.faults.non_finite_on = replica.replica_id
        group.faults.failed_steps += not is_non_finite and group not in replica.restarts
        replica.restart_later(group, RejectReason(failure.reason), failure.detail)
    for group in failures.stranded:
        replica.restart_later(group, RejectReason.STEP_FAILED, "what it shared was skipped")


def _may_try_again(state: SchedulerState, replica: Replica, group: SequenceGroup, *, is_non_finite: bool) -> bool:
    """Tells whether a group that got nothing finite here is computed again; not if another replica gave it no
    better."""
    if isinstance(group, PrefixGroup):
        return False
    if is_non_finite:
        return group.faults.non_finite_on in (None, replica.replica_id)
    return group.faults.non_finite_on is None and state.replica_table.has_ready_home(group, besides=replica)


def _restart(state: SchedulerState, replica: Replica) -> None:
    """Starts groups over from their known tokens, unless their steps have failed too often."""
    for group, (reason, detail) in replica.take_restarts().items():
        if group.is_finished:
            # The group has finished since then, or was aborted.
            continue
        if not _is_hopeless(state, group):
            replica.evict(group)
            state.requests.come_back(replica, group)
        else:
            _give_up(state, replica, group, reason, detail)


def _is_hopeless(state: SchedulerState, group: SequenceGroup) -> bool:
    return (
        group.faults.failed_steps >= state.config.max_failed_steps
        or group.faults.memory_failures >= state.config.max_memory_failures
    )


def _give_up(state: SchedulerState, replica: Replica, group: SequenceGroup, reason: RejectReason, detail: str) -> None:
    if isinstance(group, RequestGroup):
        state.requests.reject(group, reason, detail)
    else:
        state.prefixes.give_up(group.prefix_name, replica)
        state.outbox.add(PrefixGivenUp(replica.replica_id, group.prefix_name, detail))
        state.send_status()


def _fail_step(replica: Replica, step: OutstandingStep, result: StepResult) -> None:
    """Marks every group in a failed or skipped step to start over. A group that was skipped is not blamed, nor one that
    ran out of memory beside others, or in a step that can be smaller."""
    changed = set(step.changed)
    reason = RejectReason.STEP_FAILED
    blamed = set(step.groups) if result.outcome is StepOutcome.FAILED else set()
    if result.outcome is StepOutcome.OUT_OF_MEMORY:
        reason = RejectReason.OUT_OF_MEMORY
        _run_out_of_memory(replica, step)
    groups = [*step.groups, *step.swapped_out]
    groups += [group for group in replica.running if not changed.isdisjoint(group.sequences)]
    for group in dict.fromkeys(groups):
        group.faults.failed_steps += group in blamed
        replica.restart_later(group, reason, result.detail)


def _run_out_of_memory(replica: Replica, step: OutstandingStep) -> None:
    """Makes the replica's next steps smaller; counts a memory failure of the group if this step could not be."""
    num_seqs = max(len(step.groups), len(step.choosers))
    groups = set(step.groups)
    if len(groups) == 1 and step.num_tokens <= max(replica.size.min_tokens, num_seqs):
        groups.pop().faults.memory_failures += 1
    replica.size.ran_out(step.num_tokens, num_seqs)
