"""The block manager against a shadow of the memory it manages, in which every slot holds the history that its KV was
computed from: whoever reads a block finds its own history there, whatever was shared, copied, moved or given up."""

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.scheduler.kv_cache_manager import AllocStatus, KVCacheManager
from octavo.scheduler.sequence import Sequence, SequenceStatus
from octavo.wire import history
from octavo.wire.base import NULL_BLOCK
from octavo.wire.steps import BlockMove

_EXAMPLES = 250 * int(os.environ.get("OCTAVO_TEST_LONG", "1"))
_LONGEST = 14
continuations = st.lists(st.integers(0, 1), max_size=3)
_WINDOWS = [(0,), (0,), (0, 4), (3, 5)]

# What a slot's KV was computed from: the salt and all tokens up to its own.
History = tuple[bytes, tuple[int, ...]]
Slot = tuple[int, int]


@dataclass(eq=False)
class Group:
    """Sequences that start and are swapped together; with a name, a prefix that is to be pinned."""

    sequences: list[Sequence] = field(repr=False)
    prefix_name: str | None = None


@dataclass
class Read:
    """What a sequence looks at in a step: its tables as the worker has them, and from where to where."""

    sequence: Sequence
    tables: list[list[int]]
    start: int
    end: int


@dataclass
class Step:
    """One plan, as far as memory goes; a worker moves, then writes, then reads."""

    step_id: int
    swap_out: list[BlockMove] = field(default_factory=list)
    swap_in: list[BlockMove] = field(default_factory=list)
    copies: list[BlockMove] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    sampled: list[tuple[Sequence, int]] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)

    @property
    def sequences(self) -> list[Sequence]:
        """Those that have their share of it: computed, or forked for a token."""
        return [read.sequence for read in self.reads] + [sequence for sequence, _ in self.sampled]


class BlockManagerMachine(RuleBasedStateMachine):
    """Plays the scheduler's and the worker's part around one `KVCacheManager`, two plans deep."""

    kv: KVCacheManager

    @initialize(
        num_blocks=st.integers(6, 14),
        block_size=st.integers(1, 4),
        windows=st.sampled_from(_WINDOWS),
        caching=st.sampled_from([True, True, False]),
        watermark=st.sampled_from([0.0, 0.2]),
        num_cpu_blocks=st.integers(0, 8),
    )
    def begin(
        self,
        num_blocks: int,
        block_size: int,
        windows: tuple[int, ...],
        caching: bool,
        watermark: float,
        num_cpu_blocks: int,
    ) -> None:
        self.windows, self.size = windows, block_size
        self.kv = KVCacheManager(
            num_blocks * len(windows),
            block_size,
            watermark=watermark,
            prefix_caching=caching,
            windows=windows,
            num_cpu_blocks=num_cpu_blocks * len(windows),
        )
        self.device: dict[Slot, History] = {}
        self.cpu: dict[Slot, History] = {}
        self.tokens: dict[Sequence, list[int]] = {}
        self.running: list[Group] = []
        self.swapped: list[Group] = []
        self.outstanding: deque[Step] = deque()
        self.pinned: dict[str, tuple[Sequence, list[list[int]]]] = {}
        self.num_steps = self.num_prefixes = 0

    # -- plans ------------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.outstanding) < 2)
    @rule(data=st.data(), order=st.permutations(["decode", "chunk", "start", "swap in"]))
    def plan(self, data: st.DataObject, order: list[str]) -> None:
        """One step: swaps out, or any of the others in any order."""
        self.num_steps += 1
        step = Step(self.num_steps)
        if not self.outstanding and data.draw(st.sampled_from([False, False, True])):
            self._swap_out(data, step)
        for action in order[: data.draw(st.integers(1, 4))]:
            match action:
                case "decode":
                    self._decode(data, step)
                case "chunk":
                    self._chunk(data, step)
                case "start":
                    self._start(data, step)
                case "swap in" if not step.swap_out:
                    self._swap_in(data, step)
        self._execute(step)
        self.outstanding.append(step)

    def _decode(self, data: st.DataObject, step: Step) -> None:
        """One token of several sequences: what they take together is known beforehand."""
        able = [s for s in self._computable(step) if s.num_uncomputed == 1 and self._is_ready(self._group(s))]
        chosen = data.draw(st.lists(st.sampled_from(able), unique=True)) if able else []
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

    def _computable(self, step: Step) -> list[Sequence]:
        # Of a prefix nothing is wanted but its prompt.
        return [
            sequence
            for group in self.running
            for sequence in group.sequences
            if sequence.is_ready and sequence.num_uncomputed and sequence not in step.sequences
            if not (group.prefix_name and sequence.num_in_flight)
        ]

    def _compute(self, data: st.DataObject, step: Step, sequence: Sequence, num_tokens: int) -> None:
        growth = self.kv.extend(sequence)
        step.copies += growth.copies if growth else []
        start = sequence.num_computed
        sequence.num_computed += num_tokens
        sequence.last_step_id = step.step_id
        tables = [list(blocks) for blocks in self.kv.block_table(sequence)]
        step.reads.append(Read(sequence, tables, start, sequence.num_computed))
        step.groups.append(self._group(sequence))
        if not sequence.num_uncomputed:
            self._choose(data, step, sequence)
        self.kv.index(sequence, step.step_id)
        self.kv.slide(sequence, step.step_id)

    def _choose(self, data: st.DataObject, step: Step, sequence: Sequence) -> None:
        """The next token, and those of followers that are forked for theirs."""
        group = self._group(sequence)
        can_fork = group.prefix_name is None and len(group.sequences) < 4 and not sequence.num_in_flight
        for _ in range(data.draw(st.sampled_from([0, 0, 1, 2])) if can_fork else 0):
            follower = sequence.fork(len(group.sequences))
            self.kv.fork(sequence, follower)
            group.sequences.append(follower)
            self.tokens[follower] = list(self.tokens[sequence])
            self._sample(data, step, follower)
        self._sample(data, step, sequence)

    def _sample(self, data: st.DataObject, step: Step, sequence: Sequence) -> None:
        token_id = data.draw(st.integers(0, 1))
        sequence.num_in_flight += 1
        self.tokens[sequence].append(token_id)
        step.sampled.append((sequence, token_id))

    def _start(self, data: st.DataObject, step: Step) -> None:
        """A new group: a prompt with some continuations, or a prefix."""
        prompt = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=8))
        if is_prefix := data.draw(st.sampled_from([False, False, False, True])):
            known: list[list[int]] = [[]]
        else:
            known = data.draw(
                st.lists(st.lists(st.integers(0, 1), max_size=3), min_size=1, max_size=3, unique_by=tuple)
            )
        root_hash = b"" if is_prefix else data.draw(st.sampled_from([b"", b"", b"salt"]))
        sequences = [
            Sequence(index, prompt, list(tokens), history.EMPTY, root_hash, is_prefix=is_prefix)
            for index, tokens in enumerate(known)
        ]
        if self.kv.can_allocate(sequences, 0) is not AllocStatus.OK:
            return
        needed, free = self.kv.num_needed(sequences), self.kv.num_free
        step.copies += self.kv.allocate(sequences)
        assert free - self.kv.num_free == needed
        for sequence in sequences:
            sequence.status = SequenceStatus.RUNNING
            self.tokens[sequence] = prompt + sequence.generated_token_ids
            assert sequence.num_computed < sequence.num_known, "nothing is left to compute"
        self.num_prefixes += is_prefix
        group = Group(sequences, f"prefix {self.num_prefixes}" if is_prefix else None)
        self.running.append(group)
        step.groups.append(group)

    def _swap_out(self, data: st.DataObject, step: Step) -> None:
        able = [
            group
            for group in self.running
            if group.prefix_name is None
            and self._is_ready(group)
            and all(sequence.num_computed and sequence.num_uncomputed for sequence in group.sequences)
            and self.kv.can_swap_out(group.sequences)
        ]
        if not able:
            return
        group = data.draw(st.sampled_from(able))
        step.swap_out += self.kv.swap_out(group.sequences)
        step.groups.append(group)
        self.running.remove(group)
        self.swapped.append(group)

    def _swap_in(self, data: st.DataObject, step: Step) -> None:
        able = [g for g in self.swapped if self.kv.num_missing_swapped(g.sequences) <= self.kv.num_free]
        if not able:
            return
        group = data.draw(st.sampled_from(able))
        needed, free = self.kv.num_missing_swapped(group.sequences), self.kv.num_free
        step.swap_in += self.kv.swap_in(group.sequences)
        assert free - self.kv.num_free + self.kv.num_missing(group.sequences) == needed
        step.groups.append(group)
        self.swapped.remove(group)
        self.running.append(group)

    # -- the worker's part ------------------------------------------------------------------------------------------

    def _execute(self, step: Step) -> None:
        self._move(self.device, self.cpu, step.swap_out)
        self._move(self.cpu, self.device, step.swap_in)
        self._move(self.device, self.device, step.copies)
        for read in step.reads:
            for position in range(read.start, read.end):
                for slot in self._slots(read.tables, position):
                    self.device[slot] = self._history(read.sequence, position)
        for read in step.reads:
            self._assert_readable(read.sequence, read.tables, read.start, read.end)

    def _move(self, source: dict[Slot, History], target: dict[Slot, History], moves: list[BlockMove]) -> None:
        content = {
            (move.target, offset): source.get((move.source, offset)) for move in moves for offset in range(self.size)
        }
        for slot, held in content.items():
            target.pop(slot, None)
            if held is not None:
                target[slot] = held

    def _slots(self, tables: list[list[int]], position: int) -> Iterator[Slot]:
        index, offset = divmod(position, self.size)
        return ((blocks[index], offset) for blocks in tables)

    def _history(self, sequence: Sequence, position: int) -> History:
        return sequence.root_hash, tuple(self.tokens[sequence][: position + 1])

    def _assert_readable(self, sequence: Sequence, tables: list[list[int]], start: int, end: int) -> None:
        """Whoever computes from `start` on sees its own history, in every group as far as its window goes."""
        for window, blocks in zip(self.windows, tables, strict=True):
            for position in range(max(0, start - window + 1) if window else 0, end):
                (slot,) = self._slots([blocks], position)
                assert slot[0] != NULL_BLOCK, "a block that a window still sees was given up"
                assert self.device.get(slot) == self._history(sequence, position)

    # -- answers ----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.outstanding)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        step = self.outstanding.popleft()
        self.kv.step_answered(step.step_id, valid=True)
        for sequence, token_id in step.sampled:
            if not self.kv.holds(sequence):
                continue
            group = self._group(sequence)
            sequence.num_in_flight -= 1
            if group.prefix_name is not None:
                self._pin(group)
            elif not self._is_outstanding(sequence) and len(group.sequences) < 4 and data.draw(st.booleans()):
                self._fork(group, sequence, token_id)
            else:
                self._append(sequence, token_id)
                self._end(sequence)

    def _append(self, sequence: Sequence, token_id: int) -> None:
        sequence.append(token_id)
        if sequence.num_known % self.size == 0 and sequence.num_computed == sequence.num_known:
            self.kv.index(sequence, sequence.last_step_id)

    def _end(self, sequence: Sequence) -> None:
        if sequence.num_known >= _LONGEST:
            self._free(sequence)

    def _fork(self, group: Group, sequence: Sequence, token_id: int) -> None:
        """As beams fork: both go on, each with a token of its own."""
        child = sequence.fork(len(group.sequences))
        self.kv.fork(sequence, child)
        group.sequences.append(child)
        self.tokens[child] = [*self.tokens[sequence][:-1], 1 - token_id]
        for each, token in ((sequence, token_id), (child, 1 - token_id)):
            each.append(token)
            self._end(each)

    def _pin(self, group: Group) -> None:
        (sequence,) = group.sequences
        tables = [list(blocks) for blocks in self.kv.block_table(sequence)]
        assert group.prefix_name is not None
        self.kv.pin(group.prefix_name, sequence)
        self.pinned[group.prefix_name] = (sequence, tables)
        self.running.remove(group)

    @precondition(lambda self: self.outstanding)
    @rule()
    def fail(self) -> None:
        """All that is outstanding fails or is skipped: what it wrote is worthless, and what took part starts anew."""
        steps = list(self.outstanding)
        self.outstanding.clear()
        for step in steps:
            self.kv.step_answered(step.step_id, valid=False)
            self._spoil(step)
        failed = {group for step in steps for group in step.groups}
        self.swapped, dropped = _split(self.swapped, failed)
        for sequence in dropped:
            self.kv.drop_swapped(sequence)
        self.running, dropped = _split(self.running, failed)
        for sequence in dropped:
            self.kv.free(sequence)

    def _spoil(self, step: Step) -> None:
        targets = [move.target for move in (*step.swap_in, *step.copies)]
        written = [(block_id, offset) for block_id in targets for offset in range(self.size)]
        for read in step.reads:
            written += [slot for at in range(read.start, read.end) for slot in self._slots(read.tables, at)]
        for slot in written:
            self.device.pop(slot, None)
        for move in step.swap_out:
            for offset in range(self.size):
                self.cpu.pop((move.target, offset), None)

    # -- ends -------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.running)
    @rule(data=st.data(), whole=st.booleans())
    def free(self, data: st.DataObject, whole: bool) -> None:
        """A group ends, or one of its sequences for which no other waits."""
        group = data.draw(st.sampled_from(self.running))
        awaited = [s.waits_for[0] for s in group.sequences if not s.is_ready and s.waits_for]
        for sequence in list(group.sequences) if whole else [s for s in group.sequences if s not in awaited][:1]:
            self._free(sequence)

    def _free(self, sequence: Sequence) -> None:
        self.kv.free(sequence, sequence.last_step_id if self._is_outstanding(sequence) else None)
        sequence.leave(SequenceStatus.FINISHED)
        group = self._group(sequence)
        group.sequences.remove(sequence)
        if not group.sequences:
            self.running.remove(group)

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def drop_swapped(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.swapped))
        self.swapped.remove(group)
        for sequence in group.sequences:
            self.kv.drop_swapped(sequence)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.pinned)))
        self.kv.unpin(name)
        del self.pinned[name]

    def _group(self, sequence: Sequence) -> Group:
        return next(group for group in self.running if sequence in group.sequences)

    def _is_ready(self, group: Group) -> bool:
        return all(sequence.is_ready for sequence in group.sequences)

    def _is_outstanding(self, sequence: Sequence) -> bool:
        return bool(self.outstanding) and sequence.last_step_id >= self.outstanding[0].step_id

    # -- what must be true ------------------------------------------------------------------------------------------

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check()
        tables = [self.kv.block_table(sequence) for group in self.running for sequence in group.sequences]
        tables += [blocks for _, blocks in self.pinned.values()]
        held = {block_id for groups in tables for blocks in groups for block_id in blocks} - {NULL_BLOCK}
        assert len(held) + self.kv.num_parked + self.kv.num_free == self.kv.num_blocks

    @invariant()
    def every_table_leads_to_its_own_history(self) -> None:
        if not hasattr(self, "kv"):
            return
        for group in self.running:
            for sequence in group.sequences:
                if sequence.is_ready:
                    tables = self.kv.block_table(sequence)
                    self._assert_readable(sequence, tables, sequence.num_computed, sequence.num_computed)
        for sequence, tables in self.pinned.values():
            self._assert_readable(sequence, tables, sequence.num_prompt, sequence.num_prompt)

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        while self.outstanding:
            self.kv.step_answered(self.outstanding.popleft().step_id, valid=True)
        for sequence in [sequence for group in self.running for sequence in group.sequences]:
            self._free(sequence)
        for sequence in [sequence for group in self.swapped for sequence in group.sequences]:
            self.kv.drop_swapped(sequence)
        for name in self.pinned:
            self.kv.unpin(name)
        assert self.kv.num_free == self.kv.num_blocks
        assert self.kv.num_cpu_free == self.kv.num_cpu_blocks


def _split(groups: list[Group], failed: set[Group]) -> tuple[list[Group], list[Sequence]]:
    """Those that go on, and the sequences of those that do not."""
    return [g for g in groups if g not in failed], [s for g in groups if g in failed for s in g.sequences]


TestBlockManagerMachine = BlockManagerMachine.TestCase
TestBlockManagerMachine.settings = settings(
    max_examples=_EXAMPLES, stateful_step_count=40, derandomize=True, deadline=None
)
