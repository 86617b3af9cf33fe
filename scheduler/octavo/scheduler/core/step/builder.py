"""The step builder, which fills a plan: it has every way to add to a step, whatever the policy that chooses."""

from dataclasses import dataclass, field

import msgspec

from octavo.scheduler.core.replica import OutstandingStep, Replica
from octavo.scheduler.core.sequence import Sequence, SequenceGroup, SequenceStatus
from octavo.scheduler.core.step import grammar_time
from octavo.scheduler.core.step.preemption import GrowthBefore, prefers_swapping
from octavo.scheduler.kv.memory import Growth
from octavo.wire.base import NULL_BLOCK
from octavo.wire.steps import BlockMove, BlockMoves, Remap, SequenceFork, SequenceStart, SequenceWork, StepPlan

_UNCHANGED = Growth()
# One object of each for all work items: most have none.
_NO_BLOCKS: list[list[int]] = []
_NO_FOLLOWERS: list[Sequence] = []
_NO_FOLLOWER_IDS: list[int] = []


@dataclass(slots=True)
class StepBuilder:
    """A step of `replica` while it is filled: the work so far, and the `budget` of tokens it may still compute."""

    replica: Replica
    budget: int
    # The first waiting group that has lost its blocks and may come here; looked for where others are swapped out.
    returning: SequenceGroup | None = None
    step_id: int = field(init=False)
    num_tokens: int = 0
    # Microseconds of grammars of groups whose first token the step chooses.
    grammar_us: int = 0
    prefills: bool = False
    swap_out: list[BlockMove] = field(default_factory=list)
    swap_in: list[BlockMove] = field(default_factory=list)
    copies: list[BlockMove] = field(default_factory=list)
    starts: list[SequenceStart] = field(default_factory=list)
    forks: list[SequenceFork] = field(default_factory=list)
    remaps: list[Remap] = field(default_factory=list)
    # Table entries that change once this step is planned: the next plan reports them.
    later_remaps: list[tuple[Sequence, Remap]] = field(default_factory=list)
    work: list[SequenceWork] = field(default_factory=list)
    groups: list[SequenceGroup] = field(default_factory=list)
    samplers: list[tuple[SequenceGroup, Sequence]] = field(default_factory=list)
    beams: list[tuple[SequenceGroup, Sequence]] = field(default_factory=list)
    # Groups that lost their blocks to this step: kept in CPU memory, or to be recomputed.
    swapped_out: list[SequenceGroup] = field(default_factory=list)
    evicted: list[SequenceGroup] = field(default_factory=list)
    growth_before: GrowthBefore = field(default_factory=list)
    # Groups that the step brings back from CPU memory.
    resumed: list[SequenceGroup] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.step_id = self.replica.next_step_id

    @property
    def has_preempted(self) -> bool:
        return bool(self.swapped_out or self.evicted)

    # -- compute ----------------------------------------------------------------------------------------------------

    def compute(self, group: SequenceGroup, sequence: Sequence, num_tokens: int) -> None:
        """Adds the next `num_tokens` tokens of a sequence; with its last known one, the next is chosen."""
        kv = self.replica.kv
        growth = kv.extend(sequence)
        new_block_ids = _NO_BLOCKS
        if growth is not None or not sequence.is_introduced:
            growth = growth or _UNCHANGED
            new_block_ids = self._plan_changes(group, sequence, growth)
        input_token_id = self._chosen_token(sequence) if group.search is not None else None
        sequence.num_computed += num_tokens
        sequence.last_step_id = self.step_id
        self.budget -= num_tokens
        self.num_tokens += num_tokens
        self.groups.append(group)
        followers = _NO_FOLLOWERS
        if sequence.num_computed == sequence.num_known + sequence.num_in_flight:
            followers = self._choose(group, sequence, growth)
        follower_ids = [follower.sequence_id for follower in followers] if followers else _NO_FOLLOWER_IDS
        self.work.append(SequenceWork(sequence.sequence_id, num_tokens, new_block_ids, input_token_id, follower_ids))
        # One token fills a block only where it is the block's last.
        if num_tokens > 1 or sequence.num_computed % kv.block_size == 0:
            self.later_remaps += [(sequence, remap) for remap in kv.index(sequence, self.step_id)]
        if kv.slides:
            self._slide((sequence, *followers))

    def _slide(self, sequences: tuple[Sequence, ...]) -> None:
        """Drops the blocks that the sequences' windows have passed; the worker drops them by itself."""
        kv = self.replica.kv
        for sequence in sequences:
            kv.slide(sequence, self.step_id)
        self.later_remaps = [
            (owner, remap)
            for owner, remap in self.later_remaps
            if kv.block_table(owner)[remap.kv_group][remap.logical_index] != NULL_BLOCK
        ]

    def _plan_changes(self, group: SequenceGroup, sequence: Sequence, growth: Growth) -> list[list[int]]:
        """Adds to the plan what the worker must learn: a new sequence, or changes in the table of a known one. Returns
        the blocks that its work brings, one list per KV group."""
        self.copies += growth.copies
        if sequence.is_introduced:
            self.remaps += growth.remaps
            return growth.new_block_ids
        sequence.is_introduced = True
        if sequence.parent is None:
            self._start(group, sequence)
            return [list(blocks) for blocks in self.replica.kv.block_table(sequence)]
        self._fork(sequence.parent, sequence, self._pending_remaps(sequence.parent) + growth.remaps)
        return growth.new_block_ids

    def _start(self, group: SequenceGroup, sequence: Sequence) -> None:
        sequence.num_sent = sequence.num_known
        self.starts.append(
            SequenceStart(
                sequence.sequence_id,
                sequence.index,
                sequence.prompt_token_ids,
                list(sequence.generated_token_ids),
                sequence.num_computed,
                group.sampling,
                group.request.traceparent,
            )
        )

    def _fork(self, parent: Sequence, child: Sequence, remaps: list[Remap]) -> None:
        """Has the worker fork `child`, which begins with its parent's tables as the worker has them; `remaps` make them
        what they are here."""
        child.parent = None
        self.forks.append(SequenceFork(parent.sequence_id, child.sequence_id, child.index))
        self.remaps += [msgspec.structs.replace(remap, sequence_id=child.sequence_id) for remap in remaps]

    def _pending_remaps(self, sequence: Sequence) -> list[Remap]:
        return [remap for owner, remap in self.replica.remaps if owner is sequence]

    def _chosen_token(self, beam: Sequence) -> int | None:
        """Returns the token that was chosen for a beam; None if the worker knows it already."""
        if beam.num_sent == beam.num_known:
            return None
        beam.num_sent = beam.num_known
        return beam.generated_token_ids[-1]

    def _choose(self, group: SequenceGroup, sequence: Sequence, growth: Growth | None) -> list[Sequence]:
        """Has the step choose the next token for the sequence and for its followers, which are forked for it and
        returned."""
        sequence.num_in_flight += 1
        if group.search is not None:
            self.beams.append((group, sequence))
            return _NO_FOLLOWERS
        self.samplers.append((group, sequence))
        if len(group.sequences) == 1:
            return _NO_FOLLOWERS
        followers = group.followers(sequence)
        for follower in followers:
            self._fork_follower(sequence, follower, growth)
            self.samplers.append((group, follower))
        return followers

    def _fork_follower(self, leader: Sequence, follower: Sequence, growth: Growth | None) -> None:
        self.replica.kv.fork(leader, follower)
        follower.sequence_id = self.replica.new_sequence_id()
        follower.leader = None
        follower.is_introduced = True
        follower.num_computed, follower.num_in_flight = leader.num_computed, 1
        follower.last_step_id = self.step_id
        started_here = any(start.sequence_id == leader.sequence_id for start in self.starts)
        remaps = [] if started_here else self._pending_remaps(leader) + (growth.remaps if growth else [])
        self._fork(leader, follower, remaps)

    # -- come and go ------------------------------------------------------------------------------------------------

    def admit(self, group: SequenceGroup) -> int:
        """Starts a waiting group with as much of its prefill as the budget allows; returns how many tokens all of the
        prefill takes.

        First admission, resumption after preemption and replay after a loss are this one function: the generated tokens
        of a sequence are computed again like a prompt (paper §4.5), but for those the prefix cache holds.
        """
        leaders = group.leaders()
        self.replica.add(group)
        self.copies += self.replica.kv.allocate(group)
        for sequence in group.live:
            sequence.status = SequenceStatus.RUNNING
        for sequence in leaders:
            sequence.sequence_id = self.replica.new_sequence_id()
        if group.cached_prompt_tokens is None:
            group.cached_prompt_tokens = min(leaders[0].num_computed, leaders[0].num_prompt)
        num_uncomputed = sum(sequence.num_uncomputed for sequence in leaders)
        self._compute_known(group, leaders)
        return num_uncomputed

    def prefill(self, group: SequenceGroup) -> None:
        """Computes known tokens of a running group, as many as the budget allows, but for those it decodes."""
        self._compute_known(group, [each for each in group.holders if not each.is_decoding])

    def _compute_known(self, group: SequenceGroup, sequences: list[Sequence]) -> None:
        """Adds as many tokens of each sequence as the budget allows; where it is not its grammar's turn, all but the
        one after which a token is chosen. It is some other grammar's turn then, so the step has work."""
        for sequence in sequences:
            num_tokens = min(group.may_compute(sequence), self.budget) if sequence.is_ready else 0
            if num_tokens and group.has_grammar and not self._may_choose(group, sequence, num_tokens):
                num_tokens -= 1
            if num_tokens:
                self.prefills = self.prefills or not sequence.is_decoding
                self.compute(group, sequence, num_tokens)

    def _may_choose(self, group: SequenceGroup, sequence: Sequence, num_tokens: int) -> bool:
        """Tells whether the step has time for the group's grammar, if computing `num_tokens` tokens of the sequence
        brings its next; books that time."""
        if num_tokens < group.may_compute(sequence):
            return True
        num_choosers = 1 + len(group.followers(sequence))
        if not grammar_time.may_start(group, num_choosers, self.grammar_us):
            return False
        self.grammar_us += group.grammar_us * num_choosers
        return True

    def preempt(self, group: SequenceGroup) -> None:
        """Takes all blocks of a running group, of which no step is outstanding (paper §4.5: all or nothing)."""
        group.preemptions += 1
        if self._can_swap(group) and prefers_swapping(self.replica, group, self.growth_before):
            group.swaps += 1
            self.swap_out += self.replica.swap_out(group)
            self.swapped_out.append(group)
        else:
            self.replica.evict(group)
            self.evicted.append(group)

    def _can_swap(self, group: SequenceGroup) -> bool:
        """Tells whether a group may be swapped out: never a prefix, nor a suspect, which comes back alone or not at
        all, nor a group in which one sequence waits for another's prefill: that is quickly computed."""
        return (
            group.prefix_name is None
            and group is not self.replica.suspect
            and all(each.is_ready and each.num_computed and each.num_uncomputed for each in group.holders)
            and self.replica.kv.can_swap_out(group)
        )

    def resume(self, group: SequenceGroup) -> None:
        """Brings a swapped group back and computes on."""
        self.swap_in += self.replica.swap_in(group)
        self.resumed.append(group)
        self._compute_known(group, group.holders)

    # -- send -------------------------------------------------------------------------------------------------------

    def send(self, epoch: int, now: float) -> StepPlan | None:
        """Returns the plan and makes the step outstanding; None if there is nothing to do."""
        if not self.work and not self.swap_out:
            return None
        replica = self.replica
        pending = [(owner, remap) for owner, remap in replica.remaps if _is_current(replica, owner, remap)]
        plan = StepPlan(
            epoch=epoch,
            incarnation=replica.replica_id,
            step_id=self.step_id,
            answered_step_id=replica.answered_step_id,
            forget=replica.forget,
            moves=BlockMoves(self.swap_out, self.swap_in, self.copies),
            starts=self.starts,
            forks=self.forks,
            remaps=[remap for _, remap in pending] + self.remaps,
            work=self.work,
        )
        replica.forget, replica.remaps = [], self.later_remaps
        replica.next_step_id += 1
        replica.outstanding.append(
            OutstandingStep(
                self.step_id,
                self.groups,
                self.swapped_out,
                [owner for owner, _ in pending],
                self.samplers,
                self.beams,
                self.num_tokens,
                self.prefills,
                now,
            )
        )
        return plan


def _is_current(replica: Replica, owner: Sequence, remap: Remap) -> bool:
    """Tells whether the worker still knows `owner` by the id that `remap` names."""
    return owner.is_introduced and owner.sequence_id == remap.sequence_id and replica.kv.holds(owner)
