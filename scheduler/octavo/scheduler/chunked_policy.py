"""The chunked policy: decode and prefill share a step; prefill chunks fill what decodes leave of the token budget."""

from dataclasses import dataclass, field

from octavo.scheduler.kv_cache_manager import AllocStatus
from octavo.scheduler.replica import Replica
from octavo.scheduler.sequence import Sequence, SequenceGroup, SequenceStatus
from octavo.wire.steps import SequenceStart, SequenceWork

# A sequence that computes its last token, and the blocks it lacks for that.
Decode = tuple[SequenceGroup, Sequence, int]


@dataclass(slots=True)
class Draft:
    """A step being filled: what it starts and computes so far, and the token budget left."""

    replica: Replica
    budget: int
    starts: list[SequenceStart] = field(default_factory=list)
    work: list[SequenceWork] = field(default_factory=list)
    scheduled: list[tuple[SequenceGroup, Sequence]] = field(default_factory=list)
    sampling: list[tuple[SequenceGroup, Sequence]] = field(default_factory=list)
    preempted: list[SequenceGroup] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.work)

    def compute(self, group: SequenceGroup, sequence: Sequence, num_tokens: int, new_block_ids: list[int]) -> None:
        """Adds the next `num_tokens` tokens of a sequence; if they are its last, it samples one more."""
        self.work.append(SequenceWork(sequence.sequence_id, num_tokens, new_block_ids))
        self.scheduled.append((group, sequence))
        self.budget -= num_tokens
        sequence.num_computed += num_tokens
        # One token fills a block only where it is the block's last.
        if num_tokens > 1 or sequence.num_computed % self.replica.kv.block_size == 0:
            self.replica.kv.index(sequence)
        if sequence.num_uncomputed == 0:
            sequence.num_in_flight += 1
            self.sampling.append((group, sequence))


def fill_with_running(draft: Draft) -> bool:
    """Running sequences first: all decodes, then partial prefills, each in order of arrival.

    Returns whether the draft stands. It does not if decodes lack blocks while a step is outstanding: preemption waits
    for its answer, so that what is preempted is exactly known. Nothing has been booked then.
    """
    decodes = _decodes(draft.replica)
    if _missing_blocks(decodes) > draft.replica.kv.num_free:
        if draft.replica.outstanding:
            return False
        decodes = _preempt_for(draft, decodes)
    for group, sequence, missing in decodes:
        draft.compute(group, sequence, 1, draft.replica.kv.append(sequence, missing) if missing else [])
    for group in draft.replica.running:
        for sequence in group.live:
            if draft.budget and not sequence.is_decoding and (num_tokens := group.may_compute(sequence)):
                draft.compute(group, sequence, min(num_tokens, draft.budget), [])
    return True


def has_room(draft: Draft, group: SequenceGroup) -> bool:
    """Whether `group` may be admitted in this step. Never in one that preempted: it would thrash."""
    replica = draft.replica
    return (
        draft.budget > 0
        and not draft.preempted
        and replica.num_running_seqs + len(group.sequences) <= replica.config.max_num_seqs
        and replica.kv.can_allocate(group) is AllocStatus.OK
    )


def admit(draft: Draft, group: SequenceGroup, first_sequence_id: int) -> None:
    """Starts a waiting group on the draft's replica with as much of its prefill as the budget allows.

    First admission, resumption after preemption and replay after a loss are this one function: what a sequence has
    generated is computed again like a prompt (paper §4.5), but for what the prefix cache holds of it.
    """
    draft.replica.add(group)
    for sequence_id, sequence in enumerate(group.live, first_sequence_id):
        sequence.sequence_id = sequence_id
        sequence.status = SequenceStatus.RUNNING
        block_ids, sequence.num_computed = draft.replica.kv.allocate(sequence)
        draft.starts.append(
            SequenceStart(
                sequence_id,
                sequence.index,
                group.request.prompt_token_ids,
                list(sequence.generated_token_ids),
                sequence.num_computed,
                group.request.sampling,
            )
        )
        if group.cached_prompt_tokens is None:
            group.cached_prompt_tokens = min(sequence.num_computed, sequence.num_prompt)
        draft.compute(group, sequence, min(sequence.num_uncomputed, draft.budget), block_ids)


def _decodes(replica: Replica) -> list[Decode]:
    # Never more than the budget: each of them was within it in the step that finished its prefill, beside all others.
    return [
        (group, sequence, replica.kv.num_missing(sequence))
        for group in replica.running
        for sequence in group.live
        if sequence.is_decoding and group.may_compute(sequence)
    ]


def _missing_blocks(decodes: list[Decode]) -> int:
    return sum(missing for _, _, missing in decodes)


def _preempt_for(draft: Draft, decodes: list[Decode]) -> list[Decode]:
    # The latest arrival goes first, whole (paper §4.5); the earliest always fits alone, or it had been refused.
    while _missing_blocks(decodes) > draft.replica.kv.num_free:
        victim = draft.replica.running[-1]
        draft.replica.evict(victim)
        draft.preempted.append(victim)
        decodes = [decode for decode in decodes if decode[0] is not victim]
    return decodes
