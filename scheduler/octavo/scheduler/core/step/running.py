"""Running groups: going on with decodes, partial prefills and swapped groups; and preemption where blocks run out."""

from dataclasses import dataclass, field

from octavo.scheduler.core.admission import Obstacle, ObstacleKind, returns_before, start_obstacle
from octavo.scheduler.core.replica import Replica
from octavo.scheduler.core.sequence import Member, Sequence, SequenceGroup, SequenceStatus
from octavo.scheduler.core.speculation.draft import NO_GUESSES
from octavo.scheduler.core.speculation.speculation import Room, Speculation
from octavo.scheduler.core.step import grammar_time
from octavo.scheduler.core.step.builder import StepBuilder


@dataclass(slots=True)
class Runnable:
    """Work of a replica's running groups that a step may compute: next tokens of sequences past their prompts, but for
    those whose grammars must wait for their turn; and groups with some of their known tokens still to go."""

    decodes: list[Member] = field(default_factory=list)
    prefilling: list[SequenceGroup] = field(default_factory=list)


def runnable(replica: Replica) -> Runnable:
    """Finds the work of all groups that may step, in one walk in order of arrival. A group's sequences decode together
    or not at all."""
    found = Runnable()
    decodes, prefilling = found.decodes, found.prefilling
    any_grammar = False
    for group in replica.stepping:
        # Checked in this walk, which visits all groups anyway: few steps have a grammar.
        if group.grammar is not None:
            any_grammar = True
        if len(group.sequences) == 1:
            sequence = group.sequences[0]
            placement = sequence.placement
            num_computed, in_flight = placement.num_computed, placement.num_in_flight
            if num_computed + 1 != sequence.num_known + in_flight or num_computed < sequence.num_prompt:
                prefilling.append(group)
            # As `may_compute` has it, which a call for each of thousands would take long to say.
            elif not in_flight or (
                placement.draft is None and group.search is None and num_computed + 1 < group.longest
            ):
                decodes.append((group, sequence))
            continue
        sequences = _unanswered(group)
        ready = [(group, sequence) for sequence in sequences if sequence.is_decoding]
        if len(ready) < len(sequences):
            prefilling.append(group)
        else:
            decodes += [each for each in ready if not each[1].placement.num_in_flight or group.may_compute(each[1])]
    if any_grammar:
        found.decodes = grammar_time.in_turn(replica, decodes, prefills=bool(prefilling))
    return found


def _unanswered(group: SequenceGroup) -> list[Sequence]:
    """Returns the group's sequences with blocks, but for beams that have their candidates and wait for other beams."""
    holders = group.holders
    if group.search is None or not group.search.candidates:
        return holders
    return [beam for beam in holders if beam.index not in group.search.candidates]


def decode(builder: StepBuilder, found: Runnable, head: SequenceGroup | None = None) -> bool:
    """Adds the next token of every sequence that is past its prompt, with drafts of what follows where these pay;
    `head` is the first group that waits to come here.

    Returns whether the builder stands. It does not if blocks are lacking while a step is outstanding: preemption waits
    for its answer, so that what is preempted is exactly known; nor if that answer is needed for drafts. Nothing has
    been booked then.
    """
    replica, decodes = builder.replica, found.decodes
    if _lacks_blocks(replica, decodes):
        if replica.outstanding:
            return False
        decodes = _preempt(builder, decodes)
    elif builder.speculation is not None and decodes:
        return _decode_with_drafts(builder, builder.speculation, found, head)
    _compute(builder, decodes)
    return True


def _compute(builder: StepBuilder, decodes: list[Member]) -> None:
    # Decodes never exceed the budget: each has a sequence slot, and there are no more slots than tokens in a step.
    for member in decodes:
        builder.compute(member, 1)


def _decode_with_drafts(
    builder: StepBuilder, speculation: Speculation, found: Runnable, head: SequenceGroup | None
) -> bool:
    """Decodes as `decode` does where no block is lacking, with drafts of what that leaves: nothing is preempted for
    them, and they keep no group out."""
    replica = builder.replica
    prompts = sum(sequence.num_uncomputed for group in found.prefilling for sequence in group.holders)
    room = _room(builder, len(found.decodes) + prompts, head)
    spending = speculation.spend(replica, found.decodes, min(prompts, builder.budget - len(found.decodes)), room)
    if not spending.stands:
        return False
    # What waits has its place in the step all the same: who would come instead would be the next to be preempted.
    builder.limit -= len(spending.waiting)
    builder.num_kept = replica.kv.num_missing(spending.waiting)
    if not (spending.drafts or spending.proposals):
        _compute(builder, spending.decodes)
        return True
    for member in spending.decodes:
        draft, num_proposed = spending.drafts.get(member[1]), spending.proposals.get(member[1], 0)
        if draft is None and not num_proposed:
            builder.compute(member, 1)
        else:
            builder.check(member, draft or NO_GUESSES, num_proposed)
    builder.is_awaited = spending.is_awaited
    return True


def _room(builder: StepBuilder, num_rows: int, head: SequenceGroup | None) -> Room:
    """Returns what is left of a step that computes `num_rows` otherwise, and of blocks: if a group waits, what it needs
    is kept for it."""
    kv, rows = builder.replica.kv, max(0, builder.budget - num_rows)
    if head is None:
        return Room(rows, kv.num_free)
    return Room(rows // 2, kv.num_free - kv.num_needed(head) - kv.watermark_blocks)


def continue_prefills(builder: StepBuilder, groups: list[SequenceGroup]) -> None:
    """Computes on groups that are partly computed, unless this step has preempted them."""
    for group in groups:
        if group.status is SequenceStatus.RUNNING:
            builder.prefill(group)


def start_prefixes(builder: StepBuilder) -> None:
    """Begins to compute prefixes that are to be pinned."""
    replica = builder.replica
    if replica.isolates:
        return
    for group in list(replica.prefixes.to_compute):
        fits = start_obstacle(replica.kv, group) is None
        if builder.budget and fits and replica.num_running_seqs < replica.max_parallel:
            builder.admit(group)


def resume_swapped(builder: StepBuilder) -> None:
    """Brings swapped groups back, in order, while blocks last and no waiting group comes before them; never in a step
    that preempted."""
    replica = builder.replica
    if replica.isolates:
        return
    while replica.swapped and not returns_before(builder.returning, first := replica.swapped[0]):
        if first in replica.moving or builder.return_obstacle(first) is not None:
            return
        builder.resume(first)


def shortage(replica: Replica) -> Obstacle:
    """Returns the obstacle of a step that must preempt: the blocks that its decodes take, and those that are free."""
    decodes = runnable(replica).decodes
    needed = replica.kv.num_missing(sequence for _, sequence in decodes)
    return Obstacle(ObstacleKind.PREEMPTION, needed, replica.kv.num_free)


def _lacks_blocks(replica: Replica, decodes: list[Member]) -> bool:
    # Counting exactly is worth it only where not all decodes could have a new block.
    kv = replica.kv
    if len(decodes) * kv.blocks_for(1) <= kv.num_free:
        return False
    return kv.num_missing(sequence for _, sequence in decodes) > kv.num_free


def _preempt(builder: StepBuilder, decodes: list[Member]) -> list[Member]:
    """Preempts groups, the last in order first, until the blocks suffice; returns the decodes that are left.

    Of groups that came at about the same time the lowest priority goes first, then the latest arrival (paper §4.5);
    prefixes stay longest. A group that is older than its priority's ageing goes behind no new one, so it ends at last;
    and the first in order always fits alone, or it would have been refused.
    """
    kv = builder.replica.kv
    # Groups write to no block of each other's, so each takes as many blocks as it would alone. A walk for each victim
    # would cost seconds where thousands run.
    missing = kv.num_missing(sequence for _, sequence in decodes)
    while missing > kv.num_free:
        victim = builder.replica.running[-1]
        missing -= kv.num_missing(_pop_last(decodes, victim))
        builder.preempt(victim)
    return decodes


def _pop_last(decodes: list[Member], group: SequenceGroup) -> list[Sequence]:
    """Removes the decodes of `group`, if it is the last in order to decode, and returns their sequences."""
    sequences = []
    while decodes and decodes[-1][0] is group:
        sequences.append(decodes.pop()[1])
    return sequences
