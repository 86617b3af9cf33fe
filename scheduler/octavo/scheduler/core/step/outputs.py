"""A step's outputs: tokens appended, beams chosen, sequences ended, failures sorted, and the deltas that frontends
get."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec import structs

from octavo.scheduler.core.replica import Replica
from octavo.scheduler.core.sequence import (
    DraftCounts,
    Member,
    PrefixGroup,
    RequestGroup,
    Sequence,
    SequenceGroup,
    SequenceStatus,
)
from octavo.scheduler.core.speculation.draft import Draft
from octavo.scheduler.core.step.beam_search import BeamSearchState, Continuation
from octavo.scheduler.core.steps_in_flight import OutstandingStep
from octavo.wire import history
from octavo.wire.pooling import PooledOutput
from octavo.wire.requests import Delta, FinishReason
from octavo.wire.sampling import Logprobs
from octavo.wire.steps import (
    Candidates,
    FailureReason,
    FurtherTokens,
    GrammarTime,
    PromptLogprobs,
    SampledToken,
    SequenceFailure,
    StepOutcome,
    StepResult,
)


def _withdraw_skipped(replica: Replica, step: OutstandingStep, failed: Iterable[int]) -> list[SequenceGroup]:
    """Takes out of the prefix cache what the worker skips: all that plans behind `step` were to compute of the
    sequences that `failed` in it (by id), of those in one group with them, and of all that build upon it. Returns the
    groups of all of these.

    A later plan of the same replica may have built upon that already: a request that was admitted in it shares a block
    that is now never filled, another shares what the first makes of it. None of them can be relied on. Groups that have
    been aborted meanwhile count, for others may build upon them. To be called while `step` is the oldest that is
    outstanding.
    """
    later = [each for each in replica.outstanding if each.step_id > step.step_id]
    skipped = set(failed)
    groups: list[SequenceGroup] = []
    # A sequence is planned behind those it builds on; nothing builds on those that run without work in any plan.
    for group in dict.fromkeys((*(group for each in later for group in each.groups), *replica.running)):
        if _builds_on(group, skipped, step.step_id):
            skipped |= _ids_here(group)
            groups.append(group)
    replica.kv.withdraw(skipped, step.step_id)
    return groups


def _builds_on(group: SequenceGroup, skipped: set[int], answered_step_id: int) -> bool:
    return not skipped.isdisjoint(_ids_here(group)) or any(
        step_id > answered_step_id and owner in skipped
        for sequence in group.sequences
        for step_id, owner in sequence.placement.builds_on
    )


def _ids_here(group: SequenceGroup) -> set[int]:
    """Returns the ids that the group's sequences have, or had, on this replica."""
    return {each.placement.sequence_id for each in group.sequences if each.placement.is_introduced or not each.is_live}


# One object for all deltas: most have none.
_NO_LOGPROBS: list[Logprobs] = []


@dataclass(slots=True)
class Outcome:
    """A step's results: deltas by frontend, groups that have ended, why sequences have, prefixes whose KV is computed,
    drafts that were checked, with the numbers of guesses that became tokens, and what draft models guess next."""

    deltas: defaultdict[int, list[Delta]] = field(default_factory=lambda: defaultdict(list))
    finished: list[RequestGroup] = field(default_factory=list)
    reasons: list[FinishReason] = field(default_factory=list)
    prefixes: list[PrefixGroup] = field(default_factory=list)
    drafts: list[tuple[Draft, int]] = field(default_factory=list)
    proposed: list[tuple[Sequence, list[int]]] = field(default_factory=list)


def answers(step: OutstandingStep, result: StepResult) -> bool:
    """Tells whether a result says exactly what the step asked for: of every sequence that chooses, its token, its
    output, or that it failed; of those with a draft further tokens, as far as the draft was right; of those that it was
    to propose for at most as many guesses; of others at most that they failed."""
    if result.outcome is not StepOutcome.DONE:
        return True
    samplers = _unfailed(step.samplers, result) if result.failed else step.samplers
    asked = [sequence.placement.sequence_id for _, sequence in samplers]
    return (
        [sampled.sequence_id for sampled in result.sampled] == asked
        and (not (step.beams or result.candidates) or _are_of_beams(step, result))
        and (not (step.pooled or result.pooled) or _are_of_pooled(step, result))
        and (not result.failed or _are_members(step, result.failed))
        and (not result.further or _continue_drafts(step, result))
        and (not result.proposed or _are_asked(step, result))
    )


def _are_of_beams(step: OutstandingStep, result: StepResult) -> bool:
    wanted = [sequence.placement.sequence_id for _, sequence in _unfailed(step.beams, result)]
    return [candidates.sequence_id for candidates in result.candidates] == wanted


def _are_of_pooled(step: OutstandingStep, result: StepResult) -> bool:
    awaited = [sequence.placement.sequence_id for _, sequence in _unfailed(step.pooled, result)]
    return [pooled.sequence_id for pooled in result.pooled] == awaited


def _continue_drafts(step: OutstandingStep, result: StepResult) -> bool:
    """Tells whether further tokens come of sequences with a draft, in the order of those that sampled, each after a
    guess that was right, and with logprobs if the sequence's first token has them."""
    firsts = {sampled.sequence_id: sampled for sampled in result.sampled if sampled.sequence_id in step.drafts}
    named = [further.sequence_id for further in result.further]
    return named == [sequence_id for sequence_id in firsts if sequence_id in set(named)] and all(
        _continues(firsts[further.sequence_id], further, step.drafts[further.sequence_id]) for further in result.further
    )


def _are_asked(step: OutstandingStep, result: StepResult) -> bool:
    """Tells whether guesses come of sequences that got tokens and have a proposal, in their order, and not too many."""
    sampled = {each.sequence_id for each in result.sampled}
    proposed = {each.sequence_id: len(each.token_ids) for each in result.proposed}
    named = [sequence_id for sequence_id in step.proposals if sequence_id in proposed]
    return (
        [each.sequence_id for each in result.proposed] == named
        and sampled.issuperset(named)
        and all(proposed[each] <= step.proposals[each] for each in named)
    )


def _continues(first: SampledToken, further: FurtherTokens, draft: Draft) -> bool:
    guessed = [first.token_id, *further.token_ids[:-1]]
    num_logprobs = 0 if first.logprobs is None else len(further.token_ids)
    return guessed == draft.token_ids[: len(guessed)] and len(further.logprobs) == num_logprobs


def _unfailed(members: list[Member], result: StepResult) -> list[Member]:
    if not result.failed:
        return members
    failed = {failure.sequence_id for failure in result.failed}
    return [member for member in members if member[1].placement.sequence_id not in failed]


def _are_members(step: OutstandingStep, failed: list[SequenceFailure]) -> bool:
    """Tells whether `failed` names sequences that the step computes, each at most once."""
    named = [failure.sequence_id for failure in failed]
    members = {sequence.placement.sequence_id for group in step.groups for sequence in group.sequences}
    members.update(sequence.placement.sequence_id for _, sequence in step.choosers)
    return len(set(named)) == len(named) and members.issuperset(named)


@dataclass(frozen=True, slots=True)
class Failures:
    """Holds the failed groups of a step. `ended`: groups whose sequences failed of themselves, with the first failure;
    `victims`: groups that failed only with what they shared with those; `stranded`: groups that build upon what is now
    skipped, by plans that were sent before."""

    ended: dict[SequenceGroup, SequenceFailure]
    victims: dict[SequenceGroup, SequenceFailure]
    stranded: list[SequenceGroup]


def separate(replica: Replica, step: OutstandingStep, failed: list[SequenceFailure]) -> Failures:
    """Sorts the failures of a step, in the order of the work, in which sequences come after those they build on; and
    withdraws from the prefix cache what was computed of non-finite sequences and what will not be computed.

    To be called before the step is booked as answered.
    """
    ended: dict[SequenceGroup, SequenceFailure] = {}
    victims: dict[SequenceGroup, SequenceFailure] = {}
    members = _live_members(step)
    for failure in failed:
        group, sequence = members.get(failure.sequence_id, (None, None))
        is_victim = False
        if failure.reason is FailureReason.NOT_FINITE:
            is_victim = sequence is not None and _is_victim(replica, group, sequence)
            replica.kv.distrust(failure.sequence_id, sequence)
            _distrust_by_name(replica, failure.sequence_id)
        # A sequence that has been aborted, or failed in the step before, is no longer a member.
        if group is not None:
            (victims if is_victim else ended).setdefault(group, failure)
    skipped = _withdraw_skipped(replica, step, (failure.sequence_id for failure in failed))
    return Failures(
        ended,
        {group: failure for group, failure in victims.items() if group not in ended},
        [group for group in skipped if not (group.is_finished or group in ended or group in victims)],
    )


def _is_victim(replica: Replica, group: SequenceGroup | None, sequence: Sequence) -> bool:
    shares = group is not None and any(each.placement.shares_distrusted for each in group.sequences)
    return shares or replica.kv.holds_distrusted(sequence)


def _distrust_by_name(replica: Replica, sequence_id: int) -> None:
    """Distrusts sequences that have built upon what the sequence was to fill: a window may have dropped those
    blocks."""
    for group in dict.fromkeys(group for step in replica.outstanding for group in step.groups):
        for sequence in group.sequences:
            if any(owner == sequence_id for _, owner in sequence.placement.builds_on):
                sequence.placement.shares_distrusted = True


def is_non_finite(replica: Replica, step: OutstandingStep, failures: Failures) -> bool:
    """Tells whether none of several groups that chose got anything finite: the replica is at fault then rather than the
    groups.

    Groups that start over anyway, and those that another replica gave no better, do not count.
    """
    if not failures.ended:
        return False
    failed = {**failures.ended, **failures.victims}
    choosers = {group for group, _ in step.choosers if _is_witness(replica, group)}
    return len(choosers) > 1 and all(
        group in failed and failed[group].reason is FailureReason.NOT_FINITE for group in choosers
    )


def _is_witness(replica: Replica, group: SequenceGroup) -> bool:
    is_fresh = group.faults.non_finite_on in (None, replica.replica_id)
    return is_fresh and not group.is_finished and group not in replica.restarts


def _live_members(step: OutstandingStep) -> dict[int, Member]:
    # Other sequences have no id here; the id they had on another replica may be another's here.
    return {
        s.placement.sequence_id: (group, s) for group in step.groups for s in group.live if s.placement.is_introduced
    }


def accept(replica: Replica, step: OutstandingStep, result: StepResult) -> Outcome:
    """Books the result of a step that is done, and returns what follows from it."""
    outcome = Outcome()
    if result.times.grammars:
        _note_grammar_times(step, result.times.grammars)
    if result.prompt_logprobs:
        _keep_prompt_logprobs(step, result.prompt_logprobs)
    # Sequences are skipped that have been aborted or have finished since the plan was made, or are to start over: their
    # tokens may come of what was never computed.
    restarts = replica.restarts
    running = SequenceStatus.RUNNING
    further = {each.sequence_id: each for each in result.further} if result.further else {}
    samplers = _unfailed(step.samplers, result) if result.failed else step.samplers
    for (group, sequence), sampled in zip(samplers, result.sampled, strict=True):
        if sequence.status is running and group not in restarts:
            _append_sampled(replica, group, sequence, sampled, further, outcome)
    if result.proposed:
        proposed = {each.sequence_id: each.token_ids for each in result.proposed}
        outcome.proposed = [
            (sequence, proposed[sequence.placement.sequence_id])
            for group, sequence in step.samplers
            if sequence.status is running and group not in restarts and sequence.placement.sequence_id in proposed
        ]
    if step.beams:
        for (group, beam), candidates in zip(_unfailed(step.beams, result), result.candidates, strict=True):
            if beam.status is running and group not in restarts:
                _take_candidates(replica, group, beam, candidates, outcome)
    if step.pooled:
        for (group, sequence), pooled in zip(_unfailed(step.pooled, result), result.pooled, strict=True):
            if sequence.status is running and group not in restarts:
                _take_output(replica, group, sequence, pooled, outcome)
    return outcome


def _note_grammar_times(step: OutstandingStep, times: list[GrammarTime]) -> None:
    groups = {sequence.placement.sequence_id: group for group, sequence in (*step.samplers, *step.beams)}
    taken: defaultdict[SequenceGroup, list[int]] = defaultdict(list)
    for each in times:
        if (found := groups.get(each.sequence_id)) is not None:
            taken[found].append(each.microseconds)
    for group, microseconds in taken.items():
        if group.grammar is not None:
            group.grammar.took(sum(microseconds) // len(microseconds))


# -- pooling --------------------------------------------------------------------------------------------------------


def _take_output(
    replica: Replica, group: SequenceGroup, sequence: Sequence, pooled: PooledOutput, outcome: Outcome
) -> None:
    """Sends the frontend the output, which is the end of the request. A prefix's is thrown away: its KV is wanted."""
    if not isinstance(group, RequestGroup):
        outcome.prefixes.append(group)
        return
    delta = Delta(
        request_id=group.request_id,
        attempt=group.request.attempt,
        sequence_index=sequence.index,
        start_index=0,
        previous_hash=history.EMPTY,
        token_ids=[],
        finish_reason=FinishReason.STOP,
        preemptions=group.preemptions,
        swaps=group.swaps,
        cached_prompt_tokens=group.cached_prompt_tokens or 0,
        pooled=pooled.values,
    )
    outcome.deltas[group.frontend_id].append(delta)
    outcome.reasons.append(FinishReason.STOP)
    _finish(replica, group, sequence, outcome)


# -- sampling -------------------------------------------------------------------------------------------------------


def _append_sampled(
    replica: Replica,
    group: SequenceGroup,
    sequence: Sequence,
    sampled: SampledToken,
    further: dict[int, FurtherTokens],
    outcome: Outcome,
) -> None:
    # Python tells faster what a group is than what it is not, and nearly all are requests.
    if not isinstance(group, RequestGroup):
        outcome.prefixes.append(group)
        return
    if sequence.is_unwanted:
        _finish(replica, group, sequence, outcome)
        return
    request, token_ids = group.request, [sampled.token_id]
    logprobs = _NO_LOGPROBS if sampled.logprobs is None else [sampled.logprobs]
    start_index, previous_hash = sequence.num_known - sequence.num_prompt, sequence.history_hash
    sequence.append(sampled.token_id)
    placement = sequence.placement
    placement.num_in_flight -= 1
    # The token was computed before it was known: the outstanding step filled a block with it.
    if sequence.num_known % replica.kv.block_size == 0 and placement.num_computed == sequence.num_known:
        replica.index(sequence)
    finish_reason = group.finish_reason(sequence)
    if placement.draft is not None:
        answer = further.get(placement.sequence_id)
        if answer is not None and finish_reason is None:
            finish_reason = _append_further(group, sequence, answer, token_ids, logprobs)
        _settle_draft(replica, sequence, 0 if answer is None else len(answer.token_ids), len(token_ids), outcome)
    delta = Delta(
        request.request_id,
        request.attempt,
        sequence.index,
        start_index,
        previous_hash,
        token_ids,
        finish_reason,
        group.preemptions,
        group.swaps,
        group.cached_prompt_tokens or 0,
        logprobs,
        _take_prompt_logprobs(group) if group.prompt_logprobs and sequence.index == 0 else _NO_LOGPROBS,
    )
    if sequence.draft_counts is not None:
        delta = _with_counts(delta, sequence.draft_counts)
    outcome.deltas[group.frontend_id].append(delta)
    if finish_reason is not None:
        outcome.reasons.append(finish_reason)
        _finish(replica, group, sequence, outcome)


def _append_further(
    group: RequestGroup, sequence: Sequence, answer: FurtherTokens, token_ids: list[int], logprobs: list[Logprobs]
) -> FinishReason | None:
    """Appends tokens after the first of an answer until one ends the sequence, which makes the others void; adds them
    to `token_ids` and `logprobs`, and returns the reason of the end."""
    for place, token_id in enumerate(answer.token_ids):
        sequence.append(token_id)
        token_ids.append(token_id)
        if answer.logprobs:
            logprobs.append(answer.logprobs[place])
        if (finish_reason := group.finish_reason(sequence)) is not None:
            return finish_reason
    return None


def _settle_draft(replica: Replica, sequence: Sequence, num_right: int, num_tokens: int, outcome: Outcome) -> None:
    """Books the answer to a draft, of which so many guesses were right, and which brought so many tokens; also where
    there were no guesses, but room for those that were to be made."""
    placement = sequence.placement
    draft, placement.draft = placement.draft, None
    assert draft is not None
    # All but the last of the tokens were guesses, and so are computed.
    placement.num_computed += num_tokens - 1
    replica.confirm(sequence)
    if not draft.token_ids:
        return
    num_accepted = min(num_right, num_tokens)
    if sequence.draft_counts is None:
        sequence.draft_counts = DraftCounts()
    sequence.draft_counts.checked(draft, num_accepted)
    replica.stats.checked(len(draft.token_ids), num_right)
    outcome.drafts.append((draft, num_accepted))


def _with_counts(delta: Delta, counts: DraftCounts) -> Delta:
    return structs.replace(
        delta,
        drafted=counts.drafted,
        accepted=counts.accepted,
        accepted_predictions=counts.accepted_predictions,
        rejected_predictions=counts.rejected_predictions,
    )


def _finish(replica: Replica, group: RequestGroup, sequence: Sequence, outcome: Outcome) -> None:
    replica.finish(group, sequence)
    if group.is_finished:
        outcome.finished.append(group)


def _keep_prompt_logprobs(step: OutstandingStep, parts: list[PromptLogprobs]) -> None:
    members = _live_members(step)
    for part in parts:
        group, _ = members.get(part.sequence_id, (None, None))
        if group is not None and group.sampling.prompt_logprobs is not None:
            group.prompt_logprobs.update(enumerate(part.logprobs, part.start))


def _take_prompt_logprobs(group: SequenceGroup) -> list[Logprobs]:
    logprobs = [entry for _, entry in sorted(group.prompt_logprobs.items())]
    group.prompt_logprobs_delivered()
    return logprobs


# -- beam search ----------------------------------------------------------------------------------------------------


def _take_candidates(
    replica: Replica, group: SequenceGroup, beam: Sequence, candidates: Candidates, outcome: Outcome
) -> None:
    """Keeps a beam's candidates, and advances the search once all beams have theirs: after a preemption they may come
    back in different steps."""
    search, beams = group.search, group.live
    assert search is not None
    search.candidates[beam.index] = candidates
    beam.placement.num_in_flight -= 1
    if any(each.index not in search.candidates for each in beams):
        return
    if chosen := search.advance([search.beam(each.index, each.generated_token_ids) for each in beams]):
        _go_on(replica, group, search, beams, chosen)
    else:
        _end_search(replica, group, outcome)


def _go_on(
    replica: Replica, group: SequenceGroup, search: BeamSearchState, beams: list[Sequence], chosen: list[Continuation]
) -> None:
    """Forks and frees (paper Fig. 9): a beam goes on as its own first continuation, forks for the others, or ends."""
    next_beams: list[Sequence] = []
    for continuation in chosen:
        beam = beams[continuation.beam]
        next_beams.append(replica.fork(group, beam) if beam in next_beams else beam)
    for beam in beams:
        if beam not in next_beams:
            replica.release(beam)
            beam.leave(SequenceStatus.FINISHED)
    # Tokens are appended only now: a fork is a copy of what its parent was before.
    for beam, continuation in zip(next_beams, chosen, strict=True):
        beam.append(continuation.token_id)
    search.go_on({beam.index: each.cumulative_logprob for beam, each in zip(next_beams, chosen, strict=True)})
    group.sequences = next_beams


def _end_search(replica: Replica, group: SequenceGroup, outcome: Outcome) -> None:
    assert isinstance(group, RequestGroup)
    assert group.search is not None
    for beam in group.live:
        replica.release(beam)
        beam.leave(SequenceStatus.FINISHED)
    best = group.search.hypotheses[: group.sampling.num_sequences]
    outcome.deltas[group.frontend_id] += [
        Delta(
            request_id=group.request_id,
            attempt=group.request.attempt,
            sequence_index=index,
            start_index=0,
            previous_hash=history.EMPTY,
            token_ids=hypothesis.token_ids,
            finish_reason=hypothesis.finish_reason,
            preemptions=group.preemptions,
            swaps=group.swaps,
            cached_prompt_tokens=group.cached_prompt_tokens or 0,
            prompt_logprobs=_take_prompt_logprobs(group) if group.prompt_logprobs and index == 0 else [],
            cumulative_logprob=hypothesis.cumulative_logprob,
        )
        for index, hypothesis in enumerate(best)
    ]
    outcome.reasons += [hypothesis.finish_reason for hypothesis in best]
    outcome.finished.append(group)
