"""The step builder, which fills a plan: it has every way to add to a step, whatever the policy that chooses."""

from dataclasses import dataclass, field

import msgspec

from octavo.scheduler.core.admission import (
    Obstacle,
    ObstacleKind,
    capacity_obstacle,
    read_obstacle,
    returns_before,
    start_obstacle,
)
from octavo.scheduler.core.replica import Replica
from octavo.scheduler.core.sequence import Member, Placement, RequestGroup, Sequence, SequenceGroup
from octavo.scheduler.core.speculation.draft import Draft
from octavo.scheduler.core.speculation.speculation import Speculation
from octavo.scheduler.core.step import grammar_time
from octavo.scheduler.core.step.preemption import GrowthBefore, prefers_swapping
from octavo.scheduler.core.steps_in_flight import OutstandingStep
from octavo.scheduler.kv.memory import Growth
from octavo.wire.base import NULL_BLOCK
from octavo.wire.steps import (
    BlockMove,
    BlockMoves,
    Proposal,
    Remap,
    SequenceDraft,
    SequenceFork,
    SequenceStart,
    SequenceWork,
    StepPlan,
)

_UNCHANGED = Growth()
# One object of each for all work items: most have none.
_NO_BLOCKS: list[list[int]] = []
_NO_FOLLOWERS: list[Sequence] = []
_NO_FOLLOWER_IDS: list[int] = []


@dataclass(slots=True)
class StepBuilder:
    """A step of `replica` while it is filled: the work so far, `num_tokens` of the `limit` that it may compute."""

    replica: Replica
    limit: int
    # The first waiting group that has lost its blocks and may come here; looked for where others are swapped out.
    returning: RequestGroup | None = None
    # What gives decodes drafts; None: they get none.
    speculation: Speculation | None = None
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
    # Drafts that the step checks, in the order of the work.
    drafts: list[tuple[SequenceGroup, Sequence, Draft]] = field(default_factory=list)
    # How many guesses the draft model is to make after the step, by the ids of sequences, in the order of the work.
    proposals: dict[int, int] = field(default_factory=dict)
    # Free blocks of sequences that wait for an answer, to have drafts in the next step instead of a token in this one.
    num_kept: int = 0
    # The next plan has to wait for this step's answer.
    is_awaited: bool = False
    groups: list[SequenceGroup] = field(default_factory=list)
    # Sequences of groups that the step admits: what they begin with may be moved in it, whether they compute or not.
    admitted: list[Sequence] = field(default_factory=list)
    samplers: list[Member] = field(default_factory=list)
    beams: list[Member] = field(default_factory=list)
    # Sequences whose last token is computed, and that get the model's output then.
    pooled: list[Member] = field(default_factory=list)
    # Groups that lost their blocks to this step: kept in CPU memory, or to be recomputed.
    swapped_out: list[RequestGroup] = field(default_factory=list)
    evicted: list[SequenceGroup] = field(default_factory=list)
    growth_before: GrowthBefore = field(default_factory=list)
    # Groups that the step brings back from CPU memory.
    resumed: list[RequestGroup] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.step_id = self.replica.next_plan.step_id

    @property
    def budget(self) -> int:
        """Returns how many tokens the step may still compute."""
        return self.limit - self.num_tokens

    @property
    def has_preempted(self) -> bool:
        return bool(self.swapped_out or self.evicted)

    # -- what keeps a group out --------------------------------------------------------------------------------------

    def obstacle(self, group: SequenceGroup, *, whole_prompt: bool = False) -> Obstacle | None:
        """Returns what keeps `group` out of this step; None if nothing does. With `whole_prompt` its prefill must not
        be cut, unless nothing else is in the step; where the replica computes texts whole, it never is."""
        replica, slots = self.replica, self.replica.max_parallel - self.replica.num_running_seqs
        if replica.swapped and not returns_before(group, replica.swapped[0]):
            return Obstacle(ObstacleKind.SWAPPED, 0, len(replica.swapped))
        if self.has_preempted:
            # Admitting what was just preempted, or in its place, would thrash.
            return Obstacle(ObstacleKind.PREEMPTION, 0, len(self.swapped_out) + len(self.evicted))
        if group.parallel > slots:
            return Obstacle(ObstacleKind.SEQUENCE_SLOTS, group.parallel, slots)
        if self.budget < 1:
            return Obstacle(ObstacleKind.TOKEN_BUDGET, 1, self.budget)
        kv = replica.kv
        if (
            (whole_prompt or replica.computes_whole)
            and self.num_tokens
            and (uncomputed := kv.num_uncomputed(group)) > self.budget
        ):
            return Obstacle(ObstacleKind.TOKEN_BUDGET, uncomputed, self.budget)
        lacks = read_obstacle(group) if group.reads is not None else None
        return lacks or capacity_obstacle(group.request, replica) or start_obstacle(kv, group, self.num_kept)

    def return_obstacle(self, group: SequenceGroup) -> Obstacle | None:
        """Returns what keeps a swapped group, the first of all that have lost their blocks, from coming back in this
        step and staying; None if nothing does.

        Beside other groups it needs a spare block for each of its sequences, or it would be the next to be preempted.
        """
        replica, kv = self.replica, self.replica.kv
        if self.has_preempted:
            return Obstacle(ObstacleKind.PREEMPTION, 0, len(self.swapped_out) + len(self.evicted))
        slots = replica.max_parallel - replica.num_running_seqs
        if group.parallel > slots:
            return Obstacle(ObstacleKind.SEQUENCE_SLOTS, group.parallel, slots)
        # A group alone may be wider than a step computes: the rest of it is computed in the next.
        num_tokens = len(group.holders) if replica.running else 1
        if num_tokens > self.budget:
            return Obstacle(ObstacleKind.TOKEN_BUDGET, num_tokens, self.budget)
        spare = kv.watermark_blocks + group.parallel * kv.blocks_for(1) if replica.running else 0
        needed = kv.num_to_return(group) + spare
        return Obstacle(ObstacleKind.KV_BLOCKS, needed, kv.num_free) if needed > kv.num_free else None

    # -- compute ----------------------------------------------------------------------------------------------------

    def check(self, member: Member, draft: Draft, num_proposed: int = 0) -> None:
        """Adds the last known token of a sequence and guesses of those that follow it, as further rows; has so many
        guessed of what follows the tokens that come of it."""
        group, sequence = member
        num_guesses = len(draft.token_ids)
        self.compute(member, 1, 1 + num_guesses + num_proposed)
        self.num_tokens += num_guesses
        sequence.placement.draft = draft
        if num_guesses:
            self.drafts.append((group, sequence, draft))
        if num_proposed:
            self.proposals[sequence.placement.sequence_id] = num_proposed

    def compute(self, member: Member, num_tokens: int, room: int = 1) -> None:
        """Adds the next `num_tokens` tokens of a sequence; with its last known one, the next is chosen. New blocks give
        it room for the next `room` tokens, where it has none yet."""
        group, sequence = member
        kv, placement = self.replica.kv, sequence.placement
        growth = kv.extend(sequence, room)
        new_block_ids = _NO_BLOCKS
        if growth is not None or not placement.is_introduced:
            growth = growth or _UNCHANGED
            new_block_ids = self._plan_changes(group, sequence, growth)
        input_token_id = self._chosen_token(sequence) if group.search is not None else None
        num_computed = placement.num_computed = placement.num_computed + num_tokens
        placement.last_step_id = self.step_id
        self.num_tokens += num_tokens
        self.groups.append(group)
        followers = _NO_FOLLOWERS
        # The step chooses the next token.
        if num_computed == sequence.num_known + placement.num_in_flight:
            placement.num_in_flight += 1
            if group.search is not None:
                self.beams.append(member)
            elif group.request.pooling is not None:
                self.pooled.append(member)
            else:
                self.samplers.append(member)
                if len(group.sequences) > 1:
                    followers = self._fork_followers(group, sequence, growth)
        follower_ids = [follower.placement.sequence_id for follower in followers] if followers else _NO_FOLLOWER_IDS
        self.work.append(SequenceWork(placement.sequence_id, num_tokens, new_block_ids, input_token_id, follower_ids))
        # One token fills a block only where it is the block's last.
        if num_tokens > 1 or num_computed % kv.block_size == 0:
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
        placement = sequence.placement
        if placement.is_introduced:
            self.remaps += growth.remaps
            return growth.new_block_ids
        placement.is_introduced = True
        if placement.parent is None:
            self._start(group, sequence)
            return [list(blocks) for blocks in self.replica.kv.block_table(sequence)]
        self._fork(placement.parent, sequence, self.replica.next_plan.remaps_of(placement.parent) + growth.remaps)
        return growth.new_block_ids

    def _start(self, group: SequenceGroup, sequence: Sequence) -> None:
        sequence.placement.num_sent = sequence.num_known
        self.starts.append(
            SequenceStart(
                sequence.placement.sequence_id,
                sequence.index,
                sequence.prompt_token_ids,
                list(sequence.generated_token_ids),
                sequence.placement.num_computed,
                group.sampling,
                group.request.traceparent,
                group.request.pooling,
            )
        )

    def _fork(self, parent: Sequence, child: Sequence, remaps: list[Remap]) -> None:
        """Has the worker fork `child`, which begins with its parent's tables as the worker has them; `remaps` make them
        what they are here."""
        child.placement.parent, sequence_id = None, child.placement.sequence_id
        self.forks.append(SequenceFork(parent.placement.sequence_id, sequence_id, child.index))
        self.remaps += [msgspec.structs.replace(remap, sequence_id=sequence_id) for remap in remaps]

    def _chosen_token(self, beam: Sequence) -> int | None:
        """Returns the token that was chosen for a beam; None if the worker knows it already."""
        if beam.placement.num_sent == beam.num_known:
            return None
        beam.placement.num_sent = beam.num_known
        return beam.generated_token_ids[-1]

    def _fork_followers(self, group: SequenceGroup, leader: Sequence, growth: Growth | None) -> list[Sequence]:
        """Has the step choose a token for each follower of `leader` too; they are forked for it, and returned."""
        followers = group.followers(leader)
        for follower in followers:
            self._fork_follower(leader, follower, growth)
            self.samplers.append((group, follower))
        return followers

    def _fork_follower(self, leader: Sequence, follower: Sequence, growth: Growth | None) -> None:
        follower.placement = Placement(
            self.replica.next_plan.new_sequence_id(),
            leader.placement.num_computed,
            num_in_flight=1,
            last_step_id=self.step_id,
            is_introduced=True,
        )
        self.replica.kv.fork(leader, follower)
        started_here = any(start.sequence_id == leader.placement.sequence_id for start in self.starts)
        remaps = [] if started_here else self.replica.next_plan.remaps_of(leader) + (growth.remaps if growth else [])
        self._fork(leader, follower, remaps)

    # -- come and go ------------------------------------------------------------------------------------------------

    def admit(self, group: SequenceGroup) -> int:
        """Starts a waiting group with as much of its prefill as the budget allows; returns how many tokens all of the
        prefill takes.

        First admission, resumption after preemption and replay after a loss are this one function: the generated tokens
        of a sequence are computed again like a prompt (paper §4.5), but for those the prefix cache holds.
        """
        leaders = group.place()
        self.replica.add(group)
        self.copies += self.replica.kv.allocate(group, self.step_id)
        self.admitted += leaders
        for sequence in leaders:
            sequence.placement.sequence_id = self.replica.next_plan.new_sequence_id()
        if group.cached_prompt_tokens is None:
            group.cached_prompt_tokens = min(leaders[0].placement.num_computed, leaders[0].num_prompt)
        num_uncomputed = sum(sequence.num_uncomputed for sequence in leaders)
        self._compute_known(group, leaders)
        return num_uncomputed

    def prefill(self, group: SequenceGroup) -> None:
        """Computes known tokens of a running group, as many as the budget allows, but for those it decodes: unless
        another of its sequences waits for just that token, so that they would never decode together."""
        self._compute_known(group, [each for each in group.holders if not each.is_decoding or group.awaits(each)])

    def _compute_known(self, group: SequenceGroup, sequences: list[Sequence]) -> None:
        """Adds as many tokens of each sequence as the budget allows; where it is not its grammar's turn, all but the
        one after which a token is chosen. It is some other grammar's turn then, so the step has work."""
        for sequence in sequences:
            num_tokens = min(group.may_compute(sequence), self.budget) if sequence.placement.is_ready else 0
            if num_tokens and group.grammar is not None and not self._may_choose(group, sequence, num_tokens):
                num_tokens -= 1
            if num_tokens:
                self.prefills = self.prefills or not sequence.is_decoding
                self.compute((group, sequence), num_tokens)

    def _may_choose(self, group: SequenceGroup, sequence: Sequence, num_tokens: int) -> bool:
        """Tells whether the step has time for the group's grammar, if computing `num_tokens` tokens of the sequence
        brings its next; books that time."""
        if num_tokens < group.may_compute(sequence):
            return True
        assert group.grammar is not None
        us = group.grammar.us * (1 + len(group.followers(sequence)))
        if not grammar_time.may_start(us, self.grammar_us):
            return False
        self.grammar_us += us
        return True

    def preempt(self, group: SequenceGroup) -> None:
        """Takes all blocks of a running group, of which no step is outstanding (paper §4.5: all or nothing)."""
        if isinstance(group, RequestGroup) and self._swaps(group):
            self.swap_out += self.replica.swap_out(group)
            self.swapped_out.append(group)
        else:
            self.replica.evict(group)
            self.evicted.append(group)

    def _swaps(self, group: RequestGroup) -> bool:
        """Tells whether a preempted group is to be swapped out: never a suspect, which comes back alone or not at all,
        nor a group in which one sequence waits for another's prefill: that is quickly computed; nor where the worker
        gathers more of a text than its keys and values."""
        holders = group.holders
        return (
            group is not self.replica.suspect
            and not self.replica.hello.gathers
            and all(each.placement.is_ready and each.placement.num_computed and each.num_uncomputed for each in holders)
            and self.replica.kv.can_swap_out(group)
            and prefers_swapping(self.replica, group, self.growth_before)
        )

    def resume(self, group: RequestGroup) -> None:
        """Brings a swapped group back and computes on."""
        self.swap_in += self.replica.swap_in(group)
        self.resumed.append(group)
        self._compute_known(group, group.holders)

    # -- send -------------------------------------------------------------------------------------------------------

    def send(self, epoch: int, now: float) -> StepPlan | None:
        """Returns the plan and makes the step outstanding; None if there is nothing to do."""
        replica, told, disk = self.replica, self.replica.next_plan, self.replica.kv.disk
        disk_moves = disk.moves(self.step_id) if disk is not None else None
        if not self.work and not self.swap_out and disk_moves is None:
            return None
        stored, loaded = replica.kv.tier_moves(self.step_id)
        # What most steps lack costs them a look, and no walk over nothing.
        drafts = {sequence.placement.sequence_id: draft for _, sequence, draft in self.drafts} if self.drafts else {}
        remaps, changed = self.remaps, self.admitted
        if told.remaps:
            pending = [(owner, remap) for owner, remap in told.remaps if _is_current(replica, owner, remap)]
            remaps = [remap for _, remap in pending] + remaps
            changed = [owner for owner, _ in pending] + changed
        plan = StepPlan(
            epoch=epoch,
            incarnation=replica.replica_id,
            step_id=self.step_id,
            answered_step_id=told.answered_step_id,
            forget=told.forget,
            moves=BlockMoves(self.swap_out + stored, self.swap_in + loaded, self.copies),
            starts=self.starts,
            forks=self.forks,
            remaps=remaps,
            work=self.work,
            drafts=[SequenceDraft(each, draft.token_ids) for each, draft in drafts.items()] if drafts else [],
            proposals=[Proposal(*each) for each in self.proposals.items()] if self.proposals else [],
            disk=disk_moves,
        )
        step = OutstandingStep(
            self.step_id,
            self.groups,
            self.swapped_out,
            changed,
            self.samplers,
            self.beams,
            self.num_tokens,
            self.prefills,
            now,
            not replica.outstanding,
            drafts,
            self.proposals,
            self.pooled,
        )
        replica.sent(step, self.later_remaps, is_awaited=self.is_awaited)
        return plan


def _is_current(replica: Replica, owner: Sequence, remap: Remap) -> bool:
    """Tells whether the worker still knows `owner` by the id that `remap` names."""
    placement = owner.placement
    return placement.is_introduced and placement.sequence_id == remap.sequence_id and replica.kv.holds(owner)
