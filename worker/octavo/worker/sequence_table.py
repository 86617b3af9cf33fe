"""The table of a worker's sequences, and the changes that a plan makes to it.

The table checks a plan before any of it reaches the device: an id that is out of range there would write into a
neighbour's memory instead of raising.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

import msgspec

from octavo.runtime.telemetry.tracing import NOTHING, Span, start_span
from octavo.wire.base import MAX_TOKENS, NULL_BLOCK
from octavo.wire.pooling import PooledOutput
from octavo.wire.steps import (
    Candidates,
    KVGroup,
    Remap,
    SampledToken,
    SequenceFailure,
    SequenceFork,
    SequenceStart,
    SequenceWork,
    StepPlan,
)
from octavo.worker.runner import StepOutput
from octavo.worker.sequences import PENDING_TOKEN, WorkerSequence, WorkItem
from octavo.worker.step.plan_checks import PlanError, check_block_ids, check_disk, check_distinct, check_moves


class SequenceTable:
    """Holds the sequences of one incarnation by id, and the failures of failed sequences until they are forgotten.

    `on_forget` is called with the id of every sequence that the table drops.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        max_model_len: int,
        num_blocks: int,
        num_cpu_blocks: int,
        block_size: int,
        kv_groups: list[KVGroup],
        on_forget: Callable[[Iterable[int]], None],
    ) -> None:
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._num_blocks = num_blocks
        self._num_cpu_blocks = num_cpu_blocks
        self._block_size = block_size
        self._kv_groups = kv_groups
        self._windows = [(index, group.window) for index, group in enumerate(kv_groups) if group.window]
        self._on_forget = on_forget
        self._sequences: dict[int, WorkerSequence] = {}
        self._failed: dict[int, SequenceFailure] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[WorkerSequence]:
        return iter(self._sequences.values())

    def apply(self, plan: StepPlan) -> list[WorkItem]:
        """Forgets, starts, forks, remaps and grows sequences as `plan` says, and returns its work items in the plan's
        order.

        Sequences that have failed get no work item. The plan's block moves are checked, not made. Forgetting an unknown
        sequence is no error: after a failure the scheduler cannot tell which starts were seen.

        Raises `PlanError` on any other contradiction; the caller then discards the plan.
        """
        check_moves(plan.moves, num_blocks=self._num_blocks, num_cpu_blocks=self._num_cpu_blocks)
        if plan.disk is not None:
            check_disk(
                plan.disk,
                plan.moves,
                num_blocks=self._num_blocks,
                num_cpu_blocks=self._num_cpu_blocks,
                num_groups=len(self._kv_groups),
            )
        self._forget(plan.forget)
        for start in plan.starts:
            self._start(start)
        for fork in plan.forks:
            self._fork(fork)
        self._remap(plan.remaps)
        drafts, proposals = _drafts(plan), _proposals(plan)
        items = [
            self._share(work, drafts.get(work.sequence_id, []), proposals.get(work.sequence_id, 0))
            for work in plan.work
            if work.sequence_id not in self._failed
        ]
        sequence_ids = [sequence.sequence_id for item in items for sequence in item.members]
        if len(set(sequence_ids)) != len(sequence_ids):
            raise PlanError("a sequence has two shares of one step")
        return items

    def must_know(self, plan: StepPlan) -> bool:
        """Tells whether `plan` can be taken only once pending tokens are known: it copies or compares them, guesses
        what follows them, has that guessed, or goes on where a draft that is being checked ends."""
        copied = (fork.parent_id for fork in plan.forks)
        compared = (each for work in plan.work if work.follower_ids for each in (work.sequence_id, *work.follower_ids))
        drafted = (draft.sequence_id for draft in plan.drafts)
        proposed = (proposal.sequence_id for proposal in plan.proposals)
        open_ended = (each for each in members_of(plan) if each in self._sequences and self._sequences[each].is_drafted)
        return any(self._is_pending(each) for each in chain(copied, compared, drafted, proposed, open_ended))

    def _is_pending(self, sequence_id: int) -> bool:
        sequence = self._sequences.get(sequence_id)
        return sequence is not None and sequence.has_pending_token

    def begin(self, items: list[WorkItem]) -> None:
        """Records that `items` are being computed: the tokens that their choosers sample are pending.

        Beams get no pending token, for they wait for the scheduler's choice. Of a draft nothing counts as computed yet.
        """
        for item in items:
            for sequence in item.members:
                self._advance(sequence, sequence.num_computed + item.num_known)
            for sequence in item.choosers:
                if sequence.samples:
                    sequence.token_ids.append(PENDING_TOKEN)
                    sequence.is_drafted = item.looks_ahead

    def complete(self, items: list[WorkItem], output: StepOutput) -> None:
        """Replaces the pending tokens of `items` by the sampled ones, and drops the sequences that have failed.

        Sequences with drafts get their further tokens, and those with drafts or proposals give back the blocks that
        their tokens do not reach. A further step of all other sequences may have begun meanwhile. Raises `ValueError`
        if the output is not that of the choosers in their order without the failed ones, if a token is not in the
        vocabulary, does not follow from a draft or was not to be proposed, or if a sequence failed that is not in
        `items`; each of these is the runner's fault and not the plan's.
        """
        dead = _by_id(output.failed, items)
        choosers = [(each, item.known_end) for item in items for each in item.choosers if each.sequence_id not in dead]
        sampling = [(sequence, end) for sequence, end in choosers if sequence.samples]
        beams = [sequence for sequence, _ in choosers if sequence.sampling.beam is not None]
        pooled = [sequence for sequence, _ in choosers if sequence.pooling is not None]
        _check_answered("tokens", [sequence for sequence, _ in sampling], output.sampled)
        _check_answered("candidates", beams, output.candidates)
        _check_answered("outputs", pooled, output.pooled)
        chosen = [token.token_id for token in output.sampled]
        further = _further(items, output)
        offered = [token_id for beam in output.candidates for token_id in beam.token_ids]
        guessed = _guessed(items, output)
        self._check_vocabulary([*chosen, *offered, *chain(*further.values(), *guessed)])
        for (sequence, end), token_id in zip(sampling, chosen, strict=True):
            sequence.token_ids[end] = token_id
            if end == sequence.prompt_length:
                sequence.span.event("first_token")
        for item in items:
            if item.looks_ahead and item.sequence.sequence_id not in dead:
                self._confirm(item.sequence, further.get(item.sequence.sequence_id, []))
        members = (sequence for item in items for sequence in item.members) if dead else ()
        for sequence in members:
            if failure := dead.get(sequence.sequence_id):
                self._fail(sequence, failure)

    def _confirm(self, sequence: WorkerSequence, further: list[int]) -> None:
        """Appends the tokens that a draft has brought, if any. Those before the last are computed; blocks behind go."""
        sequence.is_drafted = False
        sequence.token_ids += further
        self._advance(sequence, sequence.num_computed + len(further))
        width = -(-sequence.num_computed // self._block_size)
        for group, table in enumerate(sequence.block_tables):
            if len(table) > width:
                del table[width:]
                sequence.mark_unsent(group, width)

    def _fail(self, sequence: WorkerSequence, failure: SequenceFailure) -> None:
        """Marks `sequence` as failed. It may have been forgotten by now, and its id given to another sequence."""
        sequence.failure = failure
        if self._sequences.get(sequence.sequence_id) is sequence:
            self._failed[sequence.sequence_id] = failure
            self._drop(sequence.sequence_id)

    def failures(self, plan: StepPlan) -> dict[int, SequenceFailure]:
        """Returns, by id, the failures of sequences that `plan` has work for and that failed before it."""
        if not self._failed:
            return {}
        return {each: self._failed[each] for each in members_of(plan) if each in self._failed}

    def discard(self, plan: StepPlan) -> None:
        """Forgets every sequence that a failed or skipped `plan` would have changed: the scheduler starts each of them
        anew."""
        self._forget(plan.forget)
        self._forget(start.sequence_id for start in plan.starts)
        self._forget(fork.sequence_id for fork in plan.forks)
        self._forget(remap.sequence_id for remap in plan.remaps)
        for work in plan.work:
            self._forget((work.sequence_id, *work.follower_ids))

    def clear(self) -> None:
        """Forgets every sequence, as a new incarnation must."""
        self._forget(list(self._sequences))
        self._failed.clear()

    def _forget(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            self._failed.pop(sequence_id, None)
            self._drop(sequence_id)

    def _drop(self, sequence_id: int) -> None:
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is not None:
            self._on_forget((sequence_id,))
            sequence.span.end(sequence.failure.reason if sequence.failure else "")

    def _known(self, sequence_id: int) -> WorkerSequence:
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            raise PlanError(f"sequence {sequence_id:#x} is unknown")
        return sequence

    def _add(self, sequence: WorkerSequence) -> None:
        if sequence.sequence_id in self._sequences or sequence.sequence_id in self._failed:
            raise PlanError(f"{sequence} is started twice")
        self._sequences[sequence.sequence_id] = sequence

    def _start(self, start: SequenceStart) -> None:
        sequence = WorkerSequence(
            start.sequence_id,
            start.sequence_index,
            start.sampling,
            len(start.prompt_token_ids),
            start.prompt_token_ids + start.generated_token_ids,
            start.num_computed,
            [[] for _ in self._kv_groups],
            span=_span(start),
            pooling=start.pooling,
        )
        if not sequence.prompt_length:
            raise PlanError(f"{sequence} starts without a prompt")
        if sequence.num_computed >= len(sequence.token_ids):
            raise PlanError(
                f"{sequence} starts with {sequence.num_computed} of {len(sequence.token_ids)} tokens computed:"
                " none is left"
            )
        if not self._in_vocabulary(sequence.token_ids):
            raise PlanError(f"{sequence} has a token id outside the vocabulary of {self._vocab_size}")
        self._add(sequence)

    def _fork(self, fork: SequenceFork) -> None:
        if failure := self._failed.get(fork.parent_id):
            self._failed[fork.sequence_id] = msgspec.structs.replace(failure, sequence_id=fork.sequence_id)
        else:
            self._add(self._known(fork.parent_id).fork(fork.sequence_id, fork.sequence_index))

    def _remap(self, remaps: list[Remap]) -> None:
        """Carries out `remaps`, then checks the tables: between two entries, a table may name a block twice."""
        alive = (remap for remap in remaps if remap.sequence_id not in self._failed)
        changed = {remap.sequence_id: self._remap_entry(remap) for remap in alive}
        for sequence in changed.values():
            check_distinct(sequence.block_tables, str(sequence))

    def _remap_entry(self, remap: Remap) -> WorkerSequence:
        sequence = self._known(remap.sequence_id)
        if not 0 <= remap.kv_group < len(self._kv_groups):
            raise PlanError(f"{sequence} has no KV group {remap.kv_group}; there are {len(self._kv_groups)}")
        table = sequence.block_tables[remap.kv_group]
        if not 0 <= remap.logical_index < len(table):
            raise PlanError(f"{sequence} has no block {remap.logical_index} to remap; its table has {len(table)}")
        window = self._kv_groups[remap.kv_group].window
        check_block_ids([remap.block_id], self._num_blocks, window, str(sequence))
        # The scheduler may tell of a block after a window has left it.
        if table[remap.logical_index] != NULL_BLOCK:
            table[remap.logical_index] = remap.block_id
            sequence.mark_unsent(remap.kv_group, remap.logical_index)
        return sequence

    def _share(self, work: SequenceWork, draft: list[int], num_proposed: int) -> WorkItem:
        leader = self._known(work.sequence_id)
        members = (leader, *[self._follower(sequence_id, leader) for sequence_id in work.follower_ids])
        for sequence in members:
            self._grow(sequence, work)
        start = leader.num_computed
        end = start + work.num_tokens
        written_end = end + len(draft) + num_proposed
        self._check_end(leader, end, written_end)
        self._check_visible(leader, start, written_end)
        chooses = end == len(leader.token_ids)
        if work.follower_ids and not chooses:
            raise PlanError(f"{leader} has followers, but does not reach its last token in this step")
        if draft or num_proposed:
            self._check_draft(leader, draft, chooses=chooses, alone=not work.follower_ids)
        return WorkItem(leader, start, work.num_tokens + len(draft), members if chooses else (), draft, num_proposed)

    def _check_draft(self, sequence: WorkerSequence, draft: list[int], *, chooses: bool, alone: bool) -> None:
        what = "draft" if draft else "proposal"
        if not chooses:
            raise PlanError(f"{sequence} has a {what}, but does not reach its last token in this step")
        if not alone or not sequence.samples:
            kind = "is a beam" if sequence.sampling.beam is not None else "samples no token"
            raise PlanError(f"{sequence} has a {what}, but {kind if alone else 'has followers'}")
        if not self._in_vocabulary(draft):
            raise PlanError(f"{sequence} has a draft with a token id outside the vocabulary of {self._vocab_size}")

    def _follower(self, sequence_id: int, leader: WorkerSequence) -> WorkerSequence:
        follower = self._known(sequence_id)
        if (
            follower.num_computed != leader.num_computed
            or follower.token_ids != leader.token_ids
            or follower.block_tables != leader.block_tables
        ):
            raise PlanError(f"{follower} cannot follow {leader}: its tokens, blocks or progress are others")
        return follower

    def _grow(self, sequence: WorkerSequence, work: SequenceWork) -> None:
        if work.input_token_id is not None:
            self._append(sequence, work.input_token_id)
        if work.new_block_ids:
            self._extend(sequence, work.new_block_ids)

    def _append(self, sequence: WorkerSequence, token_id: int) -> None:
        if sequence.num_computed != len(sequence.token_ids):
            raise PlanError(f"{sequence} is given token {token_id}, but is not waiting for one")
        if not self._in_vocabulary([token_id]):
            raise PlanError(f"{sequence} is given token {token_id} outside the vocabulary of {self._vocab_size}")
        sequence.token_ids.append(token_id)

    def _extend(self, sequence: WorkerSequence, new_block_ids: list[list[int]]) -> None:
        if len(new_block_ids) != len(self._kv_groups):
            raise PlanError(
                f"{sequence} is given blocks for {len(new_block_ids)} KV groups; there are {len(self._kv_groups)}"
            )
        for group, table, block_ids in zip(self._kv_groups, sequence.block_tables, new_block_ids, strict=True):
            check_block_ids(block_ids, self._num_blocks, group.window, str(sequence))
            table.extend(block_ids)
        check_distinct(sequence.block_tables, str(sequence))

    def _check_end(self, sequence: WorkerSequence, end: int, written_end: int) -> None:
        for reached, limit, what in (
            (end, len(sequence.token_ids), "known tokens"),
            (
                written_end,
                min(map(len, sequence.block_tables), default=MAX_TOKENS) * self._block_size,
                "slots in its blocks",
            ),
            (written_end, self._max_model_len, "positions in the model"),
        ):
            if reached > limit:
                raise PlanError(f"{sequence} is to reach {reached} tokens; it has {limit} {what}")

    def _advance(self, sequence: WorkerSequence, num_computed: int) -> None:
        """Sets `num_computed` and drops the blocks that windows leave behind, which may be given to any sequence from
        now on."""
        for group, window in self._windows:
            first, end = (self._first_visible(window, start) for start in (sequence.num_computed, num_computed))
            sequence.block_tables[group][first:end] = [NULL_BLOCK] * (end - first)
        sequence.num_computed = num_computed

    def _first_visible(self, window: int, position: int) -> int:
        """Returns the index of the first logical block that the token at `position` can see through `window`."""
        return max(0, position - window + 1) // self._block_size

    def _check_visible(self, sequence: WorkerSequence, start: int, end: int) -> None:
        """Checks that no block between the start of a window at `start` and position `end` has been given back.

        Raises `PlanError` if one has: the window still reads blocks before `start`, and the step writes those up to
        `end`.
        """
        for group, window in self._windows:
            first = self._first_visible(window, start)
            if NULL_BLOCK in sequence.block_tables[group][first : -(-end // self._block_size)]:
                raise PlanError(f"{sequence} has given back a block that its window of {window} tokens still sees")

    def _in_vocabulary(self, token_ids: list[int]) -> bool:
        return not token_ids or (min(token_ids) >= 0 and max(token_ids) < self._vocab_size)

    def _check_vocabulary(self, token_ids: list[int]) -> None:
        if not self._in_vocabulary(token_ids):
            raise ValueError(f"the runner returned a token outside the vocabulary of {self._vocab_size}")


def _span(start: SequenceStart) -> Span:
    if not start.traceparent:
        return NOTHING
    return start_span(
        "sequence",
        start.traceparent,
        index=start.sequence_index,
        prompt_tokens=len(start.prompt_token_ids),
        computed_tokens=start.num_computed,
    )


def members_of(plan: StepPlan) -> Iterator[int]:
    """Yields the ids of all sequences that `plan` has work for, in the plan's order."""
    return (sequence_id for work in plan.work for sequence_id in (work.sequence_id, *work.follower_ids))


def _drafts(plan: StepPlan) -> dict[int, list[int]]:
    """Returns the drafts of `plan` by sequence. Raises `PlanError` if a sequence has two, or no work."""
    drafts = {draft.sequence_id: draft.token_ids for draft in plan.drafts}
    if len(drafts) != len(plan.drafts) or not drafts.keys() <= {work.sequence_id for work in plan.work}:
        raise PlanError("a sequence has two drafts, or a draft and no work")
    return drafts


def _proposals(plan: StepPlan) -> dict[int, int]:
    """Returns how many tokens are to be proposed, by sequence. Raises `PlanError` if a sequence is named twice, or has
    no work."""
    proposals = {each.sequence_id: each.num_tokens for each in plan.proposals}
    if len(proposals) != len(plan.proposals) or not proposals.keys() <= {work.sequence_id for work in plan.work}:
        raise PlanError("a sequence has two proposals, or a proposal and no work")
    return proposals


def _guessed(items: list[WorkItem], output: StepOutput) -> list[list[int]]:
    """Returns what `output` proposes, sequence by sequence. Raises `ValueError` if more is proposed than was to be, or
    in another order."""
    if not output.proposed:
        return []
    asked = {item.sequence.sequence_id: item.num_proposed for item in items if item.num_proposed}
    proposed = {each.sequence_id: each.token_ids for each in output.proposed}
    in_order = [sequence_id for sequence_id in asked if sequence_id in proposed]
    if [each.sequence_id for each in output.proposed] != in_order or any(
        len(proposed[each]) > asked[each] for each in in_order
    ):
        raise ValueError("the runner returned proposals that are not those of the sequences they were to be made for")
    return list(proposed.values())


def _further(items: list[WorkItem], output: StepOutput) -> dict[int, list[int]]:
    """Returns the further tokens of `output` by sequence. Raises `ValueError` if they do not follow from its drafts."""
    if not output.further:
        return {}
    drafts = {item.sequence.sequence_id: item.draft for item in items if item.draft}
    sampled = {token.sequence_id: token.token_id for token in output.sampled}
    for found in output.further:
        first, draft = sampled.get(found.sequence_id), drafts.get(found.sequence_id, [])
        if [first, *found.token_ids[:-1]] != draft[: len(found.token_ids)]:
            raise ValueError("the runner returned further tokens of a sequence that do not follow from its draft")
    return {found.sequence_id: found.token_ids for found in output.further}


def _by_id(failed: list[SequenceFailure], items: list[WorkItem]) -> dict[int, SequenceFailure]:
    by_id = {failure.sequence_id: failure for failure in failed}
    if by_id and not by_id.keys() <= {sequence.sequence_id for item in items for sequence in item.members}:
        raise ValueError("the runner returned the failure of a sequence that is not in the step")
    return by_id


def _check_answered(
    what: str, expected: list[WorkerSequence], answers: list[SampledToken] | list[Candidates] | list[PooledOutput]
) -> None:
    if [sequence.sequence_id for sequence in expected] != [answer.sequence_id for answer in answers]:
        raise ValueError(
            f"the runner returned {what} of {len(answers)} sequences, which are not the {len(expected)} that choose"
            " them, in their order"
        )
