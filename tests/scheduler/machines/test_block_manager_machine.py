"""The block manager beside a shadow of the memory it manages: whoever reads a block finds its own history there,
whatever was shared, copied, moved or given up; and what it counts beforehand is what it takes."""

import os
from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from octavo.scheduler.core.admission import start_obstacle
from octavo.scheduler.core.sequence import CacheUse, PrefixGroup, RequestGroup, Sequence, SequenceGroup, SequenceStatus
from octavo.scheduler.kv.manager import KVCacheManager
from octavo.scheduler.kv.memory import Growth
from octavo.scheduler.kv.prefix_cache import first_visible
from octavo.wire import history
from octavo.wire.base import NULL_BLOCK
from octavo.wire.requests import CacheKey
from octavo.wire.steps import BlockMoves
from octavo.worker.step.plan_checks import check_moves

from ..shadow_memory import Check, ShadowMemory, Share, Step
from ..views import group_of

_FEW_EXAMPLES = 40
_EXAMPLES = 125 * int(os.environ.get("OCTAVO_TEST_LONG", "1"))
_LONGEST = 14
# Drawing is what takes the time here: one draw stands for all actions of a step, for a prompt, for its continuations.
_ACTIONS = [
    ("decode",),
    ("decode", "chunk"),
    ("chunk", "chunk"),
    ("decode", "start", "chunk"),
    ("start", "decode"),
    ("start", "chunk", "start"),
    ("swap in", "chunk"),
    ("swap in", "decode"),
    ("decode", "swap in"),
    ("draft", "decode"),
    ("draft", "draft", "chunk"),
    ("start", "draft"),
]
_PROMPTS = [tuple(number >> bit & 1 for bit in range(length)) for length in range(1, 9) for number in (0, 0b10010110)]
_CONTINUATIONS = [((),), ((),), ((1,), (0,)), ((), (0,)), ((0, 1, 1), (0, 1, 0), (1,)), ((0, 0, 0, 0), (0, 0))]
_KEYS = [CacheKey(), CacheKey(), CacheKey(salt="salt"), CacheKey(salt="other", salted_from=3)]
# How many tokens are guessed, and how many of these rightly.
_GUESSES = [(1, 0), (1, 1), (2, 1), (3, 3), (5, 0), (5, 2), (5, 5)]
_WINDOWS = [(0,), (0,), (0, 4), (3, 5)]


class BlockManagerMachine(RuleBasedStateMachine):
    """Plays the scheduler's and the worker's part around one `KVCacheManager`, two plans deep."""

    kv: KVCacheManager

    @initialize(
        num_blocks=st.integers(6, 14),
        block_size=st.integers(1, 4),
        windows=st.sampled_from(_WINDOWS),
        caching=st.sampled_from([True, True, False]),
        watermark=st.sampled_from([0.0, 0.2]),
        num_cpu_blocks=st.integers(2, 10),
        cpu_tier=st.sampled_from([True, True, False]),
    )
    def begin(
        self,
        num_blocks: int,
        block_size: int,
        windows: tuple[int, ...],
        caching: bool,
        watermark: float,
        num_cpu_blocks: int,
        cpu_tier: bool,
    ) -> None:
        self.size, self.windows = block_size, windows
        self.kv = KVCacheManager(
            num_blocks * len(windows),
            block_size,
            watermark=watermark,
            prefix_caching=caching,
            windows=windows,
            num_cpu_blocks=num_cpu_blocks * len(windows),
            cpu_tier=cpu_tier,
        )
        self.memory = ShadowMemory(block_size, windows)
        self.running: list[SequenceGroup] = []
        self.swapped: list[SequenceGroup] = []
        # The last step that each group took part in.
        self.last_step_ids: dict[SequenceGroup, int] = {}
        self.outstanding: deque[Step] = deque()
        self.pinned: dict[str, tuple[Sequence, list[list[int]]]] = {}
        # Those that held blocks when what they have in common with others was forgotten.
        self.old: set[SequenceGroup] = set()
        self.num_steps = self.num_prefixes = self.num_sequences = self.num_prompts = 0

    # -- plans ------------------------------------------------------------------------------------------------------

    @rule(data=st.data(), count=st.integers(1, 6))
    def run(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            if len(self.outstanding) == 2 or (self.outstanding and data.draw(st.booleans())):
                self._answer(data)
            self._plan(data)

    @precondition(lambda self: len(self.outstanding) < 2)
    @rule(data=st.data())
    def plan(self, data: st.DataObject) -> None:
        self._plan(data)

    def _plan(self, data: st.DataObject) -> None:
        """One step: swaps out, or in, and any of the others in any order."""
        step = self._new_step()
        if not self.outstanding and data.draw(st.booleans()):
            self._swap_out(data, step)
        for action in data.draw(st.sampled_from(_ACTIONS)):
            match action:
                case "decode":
                    self._decode(data, step)
                case "draft":
                    self._draft(data, step)
                case "chunk":
                    self._chunk(data, step)
                case "start":
                    self._start(data, step)
                case "swap in" if not step.swap_out:
                    self._swap_in(data, step)
        self._send(step)

    def _new_step(self) -> Step:
        self.num_steps += 1
        return Step(self.num_steps)

    def _send(self, step: Step) -> None:
        stored, loaded = self.kv.tier_moves(step.step_id)
        step.swap_out += stored
        step.swap_in += loaded
        check_moves(
            BlockMoves(step.swap_out, step.swap_in, step.copies),
            num_blocks=self.kv.num_blocks,
            num_cpu_blocks=self.kv.num_cpu_blocks,
        )
        self.memory.execute(step)
        self.outstanding.append(step)

    def _decode(self, data: st.DataObject, step: Step) -> None:
        """One token of several sequences: what they take together is known beforehand."""
        able = [s for s in self._computable(step) if s.num_uncomputed == 1 and self._is_ready(self._group(s))]
        left_out = data.draw(st.integers(0, 2 * len(able)))
        chosen = able[:left_out] + able[left_out + 1 :]
        missing, free = self.kv.num_missing(chosen), self.kv.num_free
        if missing <= free:
            for sequence in chosen:
                self._compute(data, step, sequence, 1)
            assert free - self.kv.num_free == missing

    def _chunk(self, data: st.DataObject, step: Step) -> None:
        """Some tokens of one sequence, for which it has blocks already."""
        if able := self._computable(step):
            sequence = data.draw(st.sampled_from(able))
            if self.kv.num_missing([sequence]) <= self.kv.num_free:
                self._compute(data, step, sequence, data.draw(st.integers(1, sequence.num_uncomputed)))

    def _draft(self, data: st.DataObject, step: Step) -> None:
        """The last known token of a sequence with guesses of what follows: each has a slot, and those that are wrong
        give it back with the answer."""
        able = [
            sequence
            for sequence in self._computable(step)
            if sequence.num_uncomputed == 1 and not sequence.placement.num_in_flight
            if isinstance(self._group(sequence), RequestGroup) and self._is_ready(self._group(sequence))
        ]
        if not able:
            return
        self._check(data, step, data.draw(st.sampled_from(able)), *data.draw(st.sampled_from(_GUESSES)))

    def _check(self, data: st.DataObject, step: Step, sequence: Sequence, num_guesses: int, num_right: int) -> None:
        missing, free = self.kv.num_missing([sequence], 1 + num_guesses), self.kv.num_free
        if missing > free:
            return
        right = [(sequence.num_known + at + sequence.index) // 2 % 2 for at in range(num_guesses + 1)]
        guesses = right[:num_right] + [1 - token_id for token_id in right[num_right:num_guesses]]
        self.memory.tokens[sequence] += guesses
        sequence.placement.num_in_flight += 1
        self._compute(data, step, sequence, 1, num_guesses)
        assert free - self.kv.num_free == missing
        step.checks.append(Check(sequence, num_guesses, right[: num_right + 1]))

    @rule(data=st.data(), count=st.integers(1, 5))
    def repeat(self, data: st.DataObject, count: int) -> None:
        """One comes to say what another has said, and guesses it rightly: their blocks hold the same."""
        while self.outstanding:
            self._answer(data)
        others = [group.sequences[0] for group in self.running if isinstance(group, RequestGroup)]
        if not others:
            return
        other = data.draw(st.sampled_from(others))
        step = self._new_step()
        group = self._begin(step, other.prompt_token_ids, key=other.cache_key)
        ready = group is not None and group.sequences[0].placement.is_ready
        if group is not None and ready and self.kv.num_missing(group.sequences) <= self.kv.num_free:
            self._compute(data, step, group.sequences[0], group.sequences[0].num_uncomputed)
        self._send(step)
        while self.outstanding:
            self._answer(data)
        if group in self.running and group is not None and group.sequences[0].num_uncomputed == 1:
            step = self._new_step()
            self._check(data, step, group.sequences[0], count, count)
            self._send(step)

    def _computable(self, step: Step) -> list[Sequence]:
        # Of a prefix nothing is wanted but its prompt; with a draft it is open how much is computed.
        checked = [check.sequence for each in self.outstanding for check in each.checks]
        return [
            sequence
            for group in self.running
            for sequence in group.sequences
            if sequence.placement.is_ready and sequence.num_uncomputed and sequence not in step.sequences
            if sequence not in checked
            if not (isinstance(group, PrefixGroup) and sequence.placement.num_in_flight)
        ]

    def _compute(
        self, data: st.DataObject, step: Step, sequence: Sequence, num_tokens: int, num_guesses: int = 0
    ) -> None:
        before, growth = self._tables(sequence), self.kv.extend(sequence, 1 + num_guesses) or Growth()
        tables, start = self._tables(sequence), sequence.placement.num_computed
        assert _grown(before, growth) == tables
        step.copies += growth.copies
        sequence.placement.num_computed += num_tokens
        sequence.placement.last_step_id = step.step_id
        step.shares.append(Share(sequence, tables, start, sequence.placement.num_computed + num_guesses))
        self.last_step_ids[self._group(sequence)] = step.step_id
        if not (sequence.num_uncomputed or num_guesses):
            self._choose(data, step, sequence)
        self._index(sequence)
        self.kv.slide(sequence, step.step_id)

    def _index(self, sequence: Sequence) -> None:
        before, remaps = self._tables(sequence), self.kv.index(sequence, sequence.placement.last_step_id)
        assert _grown(before, Growth(remaps=remaps)) == self._tables(sequence)

    def _choose(self, data: st.DataObject, step: Step, sequence: Sequence) -> None:
        """The next token, and those of followers that are forked for theirs."""
        group = self._group(sequence)
        can_fork = isinstance(group, RequestGroup) and len(group.sequences) < 4 and not sequence.placement.num_in_flight
        for _ in range(data.draw(st.sampled_from([0, 0, 1, 2])) if can_fork else 0):
            follower = self._named(sequence.fork(len(group.sequences)))
            self.kv.fork(sequence, follower)
            group.sequences.append(follower)
            self.memory.tokens[follower] = list(self.memory.tokens[sequence])
            self._sample(step, follower)
        self._sample(step, sequence)

    def _sample(self, step: Step, sequence: Sequence) -> None:
        token_id = (sequence.num_tokens + sequence.index) // 2 % 2
        sequence.placement.num_in_flight += 1
        self.memory.tokens[sequence].append(token_id)
        step.sampled.append((sequence, token_id))

    def _start(self, data: st.DataObject, step: Step) -> None:
        """A new group: a prompt with some continuations, or a prefix."""
        prompt, known = list(data.draw(st.sampled_from(_PROMPTS))), data.draw(st.sampled_from(_CONTINUATIONS))
        is_prefix = known == ((),) and data.draw(st.booleans())
        key = CacheKey() if is_prefix else data.draw(st.sampled_from(_KEYS))
        self._begin(step, prompt, known, key, is_prefix=is_prefix)

    def _begin(
        self,
        step: Step,
        prompt: list[int],
        known: tuple[tuple[int, ...], ...] = ((),),
        key: CacheKey = _KEYS[0],
        *,
        is_prefix: bool = False,
    ) -> SequenceGroup | None:
        sequences = [
            self._named(
                Sequence(
                    index, prompt, list(tokens), history.EMPTY, key, CacheUse.PINNED if is_prefix else CacheUse.SHARED
                )
            )
            for index, tokens in enumerate(known)
        ]
        group = group_of(*sequences, prefix_name=f"prefix {self.num_prefixes + 1}" if is_prefix else None)
        if start_obstacle(self.kv, group) is not None:
            return None
        needed, free = self.kv.num_needed(group), self.kv.num_free
        step.copies += self.kv.allocate(group, step.step_id)
        assert free - self.kv.num_free == needed
        for sequence in sequences:
            sequence.status = SequenceStatus.RUNNING
            self.memory.tokens[sequence] = prompt + sequence.generated_token_ids
            assert sequence.placement.num_computed < sequence.num_known, "nothing is left to compute"
        self.num_prefixes += is_prefix
        self.running.append(group)
        self.last_step_ids[group] = step.step_id
        return group

    def _named(self, sequence: Sequence) -> Sequence:
        self.num_sequences += 1
        sequence.placement.sequence_id = self.num_sequences
        return sequence

    def _swap_out(self, data: st.DataObject, step: Step) -> None:
        able = [
            group
            for group in self.running
            if isinstance(group, RequestGroup)
            and self._is_ready(group)
            and all(sequence.placement.num_computed and sequence.num_uncomputed for sequence in group.sequences)
            and self.kv.can_swap_out(group)
        ]
        if not able:
            return
        group = data.draw(st.sampled_from(able))
        step.swap_out += self.kv.swap_out(group, step.step_id)
        self.last_step_ids[group] = step.step_id
        self.running.remove(group)
        self.swapped.append(group)

    def _swap_in(self, data: st.DataObject, step: Step) -> None:
        able = [g for g in self.swapped if self.kv.num_to_return(g) <= self.kv.num_free]
        if not able:
            return
        group = data.draw(st.sampled_from(able))
        needed, free = self.kv.num_to_return(group), self.kv.num_free
        step.swap_in += self.kv.swap_in(group)
        assert free - self.kv.num_free + self.kv.num_missing(group.sequences) == needed
        self.last_step_ids[group] = step.step_id
        self.swapped.remove(group)
        self.running.append(group)

    # -- answers ----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.outstanding)
    @rule(data=st.data(), fails=st.sampled_from([False, False, False, True]))
    def answer(self, data: st.DataObject, fails: bool) -> None:
        if fails:
            self._fail()
        else:
            self._answer(data)

    def _answer(self, data: st.DataObject) -> None:
        step = self.outstanding.popleft()
        self.kv.step_answered(step.step_id, valid=True)
        for check in step.checks:
            if self.kv.holds(check.sequence):
                self._confirm(check)
        for sequence, token_id in step.sampled:
            if not self.kv.holds(sequence):
                continue
            group = self._group(sequence)
            sequence.placement.num_in_flight -= 1
            if isinstance(group, PrefixGroup):
                self._pin(group)
            elif not self._is_outstanding(sequence) and len(group.sequences) < 4 and data.draw(st.booleans()):
                self._fork(group, sequence, token_id)
            else:
                self._append(sequence, token_id)
                self._end(sequence)

    def _confirm(self, check: Check) -> None:
        """What was right counts as computed, and its blocks as full; what was not gives back its own."""
        sequence, free = check.sequence, self.kv.num_free
        sequence.placement.num_in_flight -= 1
        for token_id in check.token_ids:
            sequence.append(token_id)
        self.memory.tokens[sequence] = sequence.known_tokens(0, sequence.num_known)
        sequence.placement.num_computed += len(check.token_ids) - 1
        before, remaps = self._tables(sequence), self.kv.confirm(sequence)
        num_used = -(-sequence.placement.num_computed // self.size)
        left = _grown([blocks[:num_used] for blocks in before], Growth(remaps=remaps))
        for window, blocks, now in zip(self.windows, left, self._tables(sequence), strict=True):
            # Windows pass blocks with the answer.
            first = first_visible(window, sequence.placement.num_computed, self.size)
            assert now == [NULL_BLOCK] * min(first, len(now)) + blocks[first:]
        assert self.kv.num_free >= free
        self._end(sequence)

    def _append(self, sequence: Sequence, token_id: int) -> None:
        sequence.append(token_id)
        if sequence.num_known % self.size == 0 and sequence.placement.num_computed == sequence.num_known:
            self._index(sequence)

    def _end(self, sequence: Sequence) -> None:
        if sequence.num_known >= _LONGEST:
            self._free(sequence)

    def _fork(self, group: SequenceGroup, sequence: Sequence, token_id: int) -> None:
        """As beams fork: both go on, each with a token of its own."""
        child = self._named(sequence.fork(len(group.sequences)))
        self.kv.fork(sequence, child)
        group.sequences.append(child)
        self.memory.tokens[child] = [*self.memory.tokens[sequence][:-1], 1 - token_id]
        for each, token in ((sequence, token_id), (child, 1 - token_id)):
            each.append(token)
            self._end(each)

    def _pin(self, group: PrefixGroup) -> None:
        (sequence,) = group.sequences
        tables = self._tables(sequence)
        self.kv.reserve(group.prefix_name, sequence.num_prompt)
        self.kv.pin(group.prefix_name, sequence)
        self.pinned[group.prefix_name] = (sequence, tables)
        self.running.remove(group)

    def _fail(self) -> None:
        """All that is outstanding fails or is skipped: what it wrote is worthless, and what took part starts anew."""
        steps = list(self.outstanding)
        self.outstanding.clear()
        for step in steps:
            self.kv.step_answered(step.step_id, valid=False)
            self.memory.spoil(step)
        first = steps[0].step_id
        for group in [group for group in self.swapped if self.last_step_ids[group] >= first]:
            self._drop_swapped(group)
        for group in [group for group in self.running if self.last_step_ids[group] >= first]:
            for sequence in list(group.sequences):
                self._free(sequence)

    @precondition(lambda self: len(self.outstanding) == 2)
    @rule(data=st.data())
    def fail_sequence(self, data: st.DataObject) -> None:
        """One that is in both steps that are under way."""
        first, second = self.outstanding
        if able := [s for s in first.sequences if self.kv.holds(s) and s in second.sequences]:
            self._fail_sequence(data, self._group(data.draw(st.sampled_from(able))))

    @rule(data=st.data(), first=st.integers(1, 4), second=st.integers(1, 5), longer=st.integers(1, 3))
    def fail_chunk(self, data: st.DataObject, first: int, second: int, longer: int) -> None:
        """A prompt fails between two of its chunks, with the second of which another has begun; and comes again."""
        while self.outstanding:
            self._answer(data)
        # It begins as no other does.
        self.num_prompts += 1
        prompt = [2 + self.num_prompts, *(index % 2 for index in range(first + second - 1))]
        steps = [self._new_step(), self._new_step()]
        group = self._begin(steps[0], prompt)
        if group is None:
            return
        (sequence,) = group.sequences
        if self.kv.num_missing([sequence]) > self.kv.num_free:
            self._send(steps[0])
            return
        self._compute(data, steps[0], sequence, first)
        self._send(steps[0])
        self._compute(data, steps[1], sequence, second)
        other = self._begin(steps[1], [*prompt, *(1 for _ in range(longer))])
        if other is not None and self.kv.num_missing(other.sequences) <= self.kv.num_free:
            self._compute(data, steps[1], other.sequences[0], other.sequences[0].num_uncomputed)
        self._send(steps[1])
        self._fail_sequence(data, group)
        step = self._new_step()
        again = self._begin(step, [*prompt, *(0 for _ in range(longer))])
        if again is not None and self.kv.num_missing(again.sequences) <= self.kv.num_free:
            self._compute(data, step, again.sequences[0], again.sequences[0].num_uncomputed)
        self._send(step)

    def _fail_sequence(self, data: st.DataObject, failing: SequenceGroup) -> None:
        """A sequence fails in a step, and what the next has of it is skipped: its group ends, and whoever has built on
        what was skipped starts anew, once all is answered."""
        first, second = self.outstanding
        groups = [failing]
        self.memory.skip(second, failing.sequences)
        names = {sequence.placement.sequence_id for sequence in failing.sequences}
        for group in self.running:
            # In their order: whoever builds on another started after it.
            if group is not failing and self._builds_on(group, names, first.step_id):
                groups.append(group)
                names |= {sequence.placement.sequence_id for sequence in group.sequences}
        self.kv.withdraw(names, first.step_id)
        gone = [sequence for group in groups for sequence in group.sequences]
        for step in (first, second):
            step.sampled = [each for each in step.sampled if each[0] not in gone]
            step.checks = [check for check in step.checks if check.sequence not in gone]
            self._answer(data)
        for sequence in gone:
            self._free(sequence)

    @staticmethod
    def _builds_on(group: SequenceGroup, names: set[int], answered_step_id: int) -> bool:
        builds_on = [each for sequence in group.sequences for each in sequence.placement.builds_on]
        return any(step_id > answered_step_id and name in names for step_id, name in builds_on)

    # -- ends -------------------------------------------------------------------------------------------------------

    @rule(data=st.data(), what=st.sampled_from(["group", "group", "sequence", "sequence", "pin", "swapped"]))
    def give_up(self, data: st.DataObject, what: str) -> None:
        match what:
            case "group" if self.running:
                for sequence in list(data.draw(st.sampled_from(self.running)).sequences):
                    self._free(sequence)
            case "sequence" if unawaited := self._unawaited():
                self._free(data.draw(st.sampled_from(unawaited)))
            case "swapped" if self.swapped:
                self._drop_swapped(data.draw(st.sampled_from(self.swapped)))
            case "pin" if self.pinned:
                name = data.draw(st.sampled_from(sorted(self.pinned)))
                self.kv.unpin(name)
                del self.pinned[name]

    @rule(salt=st.sampled_from([None, None, "salt", "other"]))
    def reset(self, salt: str | None) -> None:
        """What is cached is forgotten; pinned prefixes, in which no salt counts, go with all else."""
        held = {sequence: self._tables(sequence) for group in self.running for sequence in group.sequences}
        self.kv.forget_cached(salt)
        assert not self.kv.cached_behind(salt)
        assert not self.kv.cpu_cached_behind(salt)
        assert held == {sequence: self._tables(sequence) for sequence in held}
        groups = [*self.running, *self.swapped]
        self.old |= {group for group in groups if salt in (None, group.sequences[0].cache_key.salt)}
        if salt is None:
            for name in self.pinned:
                self.kv.unpin(name)
            self.pinned.clear()
            for group in [group for group in self.running if isinstance(group, PrefixGroup)]:
                for sequence in list(group.sequences):
                    self._free(sequence)

    def _unawaited(self) -> list[Sequence]:
        """Sequences that may end before others of their group."""
        sequences = [sequence for group in self.running for sequence in group.sequences]
        awaited = [s.placement.waits_for[0] for s in sequences if not s.placement.is_ready and s.placement.waits_for]
        return [sequence for sequence in sequences if sequence not in awaited]

    def _free(self, sequence: Sequence) -> None:
        self.kv.free(sequence, sequence.placement.last_step_id if self._is_outstanding(sequence) else None)
        sequence.leave(SequenceStatus.FINISHED)
        group = self._group(sequence)
        group.sequences.remove(sequence)
        if not group.sequences:
            self.running.remove(group)

    def _drop_swapped(self, group: SequenceGroup) -> None:
        self.swapped.remove(group)
        for sequence in group.sequences:
            self.kv.free(sequence)

    def _tables(self, sequence: Sequence) -> list[list[int]]:
        """A copy of them."""
        return [list(blocks) for blocks in self.kv.block_table(sequence)]

    def _group(self, sequence: Sequence) -> SequenceGroup:
        return next(group for group in self.running if sequence in group.sequences)

    def _is_ready(self, group: SequenceGroup) -> bool:
        return all(sequence.placement.is_ready for sequence in group.sequences)

    def _is_outstanding(self, sequence: Sequence) -> bool:
        return bool(self.outstanding) and sequence.placement.last_step_id >= self.outstanding[0].step_id

    # -- what must be true ------------------------------------------------------------------------------------------

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        self.kv.check()
        tables = [self.kv.block_table(sequence) for group in self.running for sequence in group.sequences]
        tables += [blocks for _, blocks in self.pinned.values()]
        held = {block_id for groups in tables for blocks in groups for block_id in blocks} - {NULL_BLOCK}
        assert len(held) + self.kv.num_parked + self.kv.num_free == self.kv.num_blocks

    @invariant()
    def what_is_outstanding_is_not_free(self) -> None:
        for step in self.outstanding:
            touched = [block_id for share in step.shares for blocks in share.tables for block_id in blocks]
            assert all(self.kv.ref_count(block_id) for block_id in touched if block_id != NULL_BLOCK)

    @invariant()
    def every_table_leads_to_its_own_history(self) -> None:
        for group in self.running:
            for sequence in group.sequences:
                if sequence.placement.is_ready:
                    tables = self.kv.block_table(sequence)
                    self.memory.assert_readable(
                        sequence, tables, sequence.placement.num_computed, sequence.placement.num_computed
                    )
        for sequence, tables in self.pinned.values():
            self.memory.assert_readable(sequence, tables, sequence.num_prompt, sequence.num_prompt)

    @invariant()
    def nobody_finds_what_is_older_than_a_reset(self) -> None:
        cached = set(self.kv.cached_behind(None))
        for group in self.old.intersection(self.running):
            for sequence in group.sequences:
                key = sequence.cache_key
                first = key.salted_from // self.size if key.salt else 0
                own = {block_id for blocks in self.kv.block_table(sequence) for block_id in blocks[first:]}
                assert cached.isdisjoint(own)

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        while self.outstanding:
            self.kv.step_answered(self.outstanding.popleft().step_id, valid=True)
        for sequence in [sequence for group in self.running for sequence in group.sequences]:
            self._free(sequence)
        for group in list(self.swapped):
            self._drop_swapped(group)
        for name in self.pinned:
            self.kv.unpin(name)
        assert self.kv.num_free == self.kv.num_usable == self.kv.num_blocks
        assert self.kv.num_cpu_free == self.kv.num_cpu_blocks


def _grown(tables: list[list[int]], growth: Growth) -> list[list[int]]:
    """What a worker makes of its tables when it is told of `growth`."""
    new_block_ids = growth.new_block_ids or [[] for _ in tables]
    grown = [blocks + new for blocks, new in zip(tables, new_block_ids, strict=True)]
    for remap in growth.remaps:
        grown[remap.kv_group][remap.logical_index] = remap.block_id
    return grown


TestBlockManagerMachine = BlockManagerMachine.TestCase
TestBlockManagerMachine.settings = settings(
    max_examples=_FEW_EXAMPLES, stateful_step_count=25, derandomize=True, deadline=None
)


@pytest.mark.deep
def test_many_more_histories() -> None:
    many = settings(max_examples=_EXAMPLES, stateful_step_count=25, derandomize=True, deadline=None)
    run_state_machine_as_test(BlockManagerMachine, settings=many)
