"""Sound plans at random, made as a scheduler makes them: without the results that are not back."""

from array import array
from collections import Counter, deque
from collections.abc import Iterable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from random import Random

from octavo.testbed.tiny_model import END_TOKEN_ID, VOCAB_SIZE
from octavo.testing.oracles.worker_plans import beam_sampling, moves, plan, sampling, start, work
from octavo.wire.base import NULL_BLOCK
from octavo.wire.sampling import SamplingParams
from octavo.wire.steps import Remap, SequenceFork, SequenceStart, SequenceWork, StepOutcome, StepPlan, StepResult
from octavo.worker.fake.distribution import NoTokenLeftError
from octavo.worker.fake.runner import FakeVocabulary

BLOCK_SIZE, NUM_BLOCKS, NUM_CPU_BLOCKS = 4, 256, 32
WINDOWS = (0, 6)
MAX_SEQUENCES, MAX_TOKENS = 5, 24
_VOCABULARY = FakeVocabulary(VOCAB_SIZE, (END_TOKEN_ID,))
# The last one leaves no token as soon as it has to choose.
PARAMS = [
    sampling(),
    sampling(0.8, seed=3, logprobs=2),
    sampling(repetition_penalty=1.5),
    sampling(0.5, seed=4, frequency_penalty=0.7, prompt_logprobs=1),
    beam_sampling(),
    sampling(allowed_token_ids=[7], banned_token_ids=[7]),
]


@dataclass(eq=False)
class Known:
    """A sequence as its planner sees it: of `token_ids` those are None that a step under way samples, and `offered` is
    what a beam may go on with."""

    sequence_id: int
    params: SamplingParams
    token_ids: list[int | None]
    prompt_length: int
    num_computed: int = 0
    index: int = 0
    tables: list[list[int]] = field(default_factory=lambda: [[] for _ in WINDOWS])
    offered: list[int] = field(default_factory=list)
    dead: bool = False
    # Of what follows its tokens a step under way checks a guess.
    is_drafted: bool = False
    # Whether the worker has been told of its tables.
    is_told: bool = True

    @property
    def is_waiting(self) -> bool:
        """Tells whether a beam waits for its next token."""
        return self.num_computed == len(self.token_ids)


@dataclass
class Outstanding:
    """A plan that is not answered, what it names, and where what its choosers choose is put: into their forks too."""

    plan: StepPlan
    named: list[Known] = field(default_factory=list)
    places: dict[int, list[tuple[Known, int]]] = field(default_factory=dict)
    drafted: dict[int, Known] = field(default_factory=dict)


class Planner:
    """Plans for one incarnation of a worker of the byte model with the memory above, of sequences with any of `params`;
    now and then one that cannot be carried out."""

    def __init__(self, random: Random, params: list[SamplingParams] = PARAMS) -> None:
        self.random = random
        self.params = params
        self.outstanding: deque[Outstanding] = deque()
        self.known: dict[int, Known] = {}
        self.swapped: list[tuple[Known, list[list[int]]]] = []
        self.num_holders = Counter[int]()
        self.free_cpu = list(range(NUM_CPU_BLOCKS))

    def maybe(self, probability: float) -> bool:
        return self.random.random() < probability

    def next_plan(self, step_id: int, answered: int) -> StepPlan:
        # What this plan gives up, it may not write: its own work may still read it.
        self.free = [block for block in range(NUM_BLOCKS) if not self.num_holders[block]]
        self.step = Outstanding(plan(step_id))
        self.copies: list[tuple[int, int]] = []
        self.remaps: list[Remap] = []
        self.drafts: dict[int, list[int]] = {}
        swap_out, forget = self._forget()
        swap_in, starts = ([], []) if swap_out else self._swap_in()
        starts += [self._start() for _ in range(2) if len(self.known) < MAX_SEQUENCES and self.maybe(0.5)]
        forks = self._forks()
        self._remap_any()
        shares = self._work({fork.sequence_id: fork.parent_id for fork in forks})
        if self.maybe(0.03):
            shares.append(work(99, 1))
        self.step.plan = plan(
            step_id,
            forget=forget,
            moves=moves(swap_out=swap_out, swap_in=swap_in, copy=self.copies),
            starts=starts,
            forks=forks,
            remaps=self.remaps,
            work=shares,
            drafts=self.drafts,
            answered=answered,
        )
        self.outstanding.append(self.step)
        return self.step.plan

    def learn(self, result: StepResult) -> int:
        """Takes in the result of the oldest plan, and returns that plan's number."""
        step = self.outstanding.popleft()
        if result.outcome is StepOutcome.FAILED:
            # All that were made without knowing are as good as answered: they will be skipped.
            for each in (step, *self.outstanding):
                self._lose(each)
        if result.outcome is not StepOutcome.DONE:
            return result.step_id
        for token in result.sampled:
            for sequence, place in step.places[token.sequence_id]:
                sequence.token_ids[place] = token.token_id
        further = {each.sequence_id: each.token_ids for each in result.further}
        for sequence_id, sequence in step.drafted.items():
            self._confirm(sequence, further.get(sequence_id, []))
        for offer in result.candidates:
            for sequence, _ in step.places[offer.sequence_id]:
                sequence.offered = list(offer.token_ids)
        for failure in result.failed:
            for sequence in step.named:
                sequence.dead |= sequence.sequence_id == failure.sequence_id
        return result.step_id

    def _confirm(self, sequence: Known, further: list[int]) -> None:
        sequence.is_drafted = False
        sequence.token_ids += further
        if self.known.get(sequence.sequence_id) is not sequence:
            return
        self._pass(sequence, sequence.num_computed + len(further))
        width = -(-sequence.num_computed // BLOCK_SIZE)
        for table in sequence.tables:
            self._release(table[width:])
            del table[width:]

    def _lose(self, step: Outstanding) -> None:
        for sequence in step.named:
            if self.known.get(sequence.sequence_id) is sequence:
                self._drop(sequence)
        self.swapped = [(sequence, cpu) for sequence, cpu in self.swapped if sequence not in step.named]
        used = {block for _, tables in self.swapped for table in tables for block in table}
        self.free_cpu = [block for block in range(NUM_CPU_BLOCKS) if block not in used]

    def _drop(self, sequence: Known) -> None:
        del self.known[sequence.sequence_id]
        self._release(block for table in sequence.tables for block in table)

    def _release(self, blocks: Iterable[int]) -> None:
        self.num_holders.subtract(block for block in blocks if block != NULL_BLOCK)

    def _take(self) -> int:
        block = self.free.pop(self.random.randrange(len(self.free)))
        self.num_holders[block] += 1
        return block

    def _forget(self) -> tuple[list[tuple[int, int]], list[int]]:
        """Draws the blocks that move out, and the sequences that are forgotten for that or for good."""
        swap_out, forget = list[tuple[int, int]](), list[int]()
        for sequence in list(self.known.values()):
            old = sequence.dead or len(sequence.token_ids) > MAX_TOKENS
            if self.maybe(0.3 if old else 0.08):
                if self.maybe(0.7) and self._can_swap(sequence):
                    swap_out += self._swap_out(sequence)
                self._drop(sequence)
                forget.append(sequence.sequence_id)
        return swap_out, forget

    def _can_swap(self, sequence: Known) -> bool:
        busy = any(sequence in step.named for step in self.outstanding)
        held = sum(block != NULL_BLOCK for table in sequence.tables for block in table)
        return not (busy or sequence.dead or sequence.is_waiting) and 0 < held <= len(self.free_cpu)

    def _swap_out(self, sequence: Known) -> list[tuple[int, int]]:
        tables = [[b if b == NULL_BLOCK else self.free_cpu.pop() for b in table] for table in sequence.tables]
        copied = replace(sequence, is_told=False)
        self.swapped.append((copied, tables))
        self.step.named.append(copied)
        return [pair for pair in _pairs(sequence.tables, tables) if NULL_BLOCK not in pair]

    def _swap_in(self) -> tuple[list[tuple[int, int]], list[SequenceStart]]:
        if not self.swapped or self.swapped[0][0].sequence_id in self.known or self.maybe(0.5):
            return [], []
        sequence, cpu = self.swapped.pop(0)
        sequence.tables = [[b if b == NULL_BLOCK else self._take() for b in table] for table in cpu]
        back = [pair for pair in _pairs(cpu, sequence.tables) if NULL_BLOCK not in pair]
        self.free_cpu += [block for block, _ in back]
        return back, [self._add(sequence)]

    def _start(self) -> SequenceStart:
        unused = [i for i in range(1, 3 * MAX_SEQUENCES) if i not in self.known]
        token_ids: list[int | None] = [self.random.randrange(256) for _ in range(self.random.randint(1, 12))]
        params, length = self.random.choice(self.params), self.random.randint(1, len(token_ids))
        return self._add(Known(self.random.choice(unused), params, token_ids, length))

    def _add(self, sequence: Known) -> SequenceStart:
        self.known[sequence.sequence_id] = sequence
        self.step.named.append(sequence)
        token_ids = [token for token in sequence.token_ids if token is not None]
        assert len(token_ids) == len(sequence.token_ids)
        prompt, generated = token_ids[: sequence.prompt_length], token_ids[sequence.prompt_length :]
        return start(
            sequence.sequence_id,
            prompt,
            generated,
            index=sequence.index,
            num_computed=sequence.num_computed,
            params=sequence.params,
        )

    def _forks(self) -> list[SequenceFork]:
        able = (s for s in self.known.values() if s.is_told and not s.is_drafted)
        parents = [s for s in able if not (s.is_waiting and not s.offered)]
        if not parents or len(self.known) >= MAX_SEQUENCES or self.maybe(0.6):
            return []
        parent = self.random.choice(parents)
        child = deepcopy(parent)
        child.sequence_id = self.random.choice([i for i in range(1, 3 * MAX_SEQUENCES) if i not in self.known])
        child.index = 1
        self.known[child.sequence_id] = child
        self.num_holders.update(b for table in child.tables for b in table if b != NULL_BLOCK)
        self.step.named.append(child)
        for step in self.outstanding:
            step.places.get(parent.sequence_id, []).extend(
                (child, place) for each, place in step.places.get(parent.sequence_id, []) if each is parent
            )
        return [SequenceFork(parent.sequence_id, child.sequence_id, child.index)]

    def _remap_any(self) -> None:
        for sequence in self.known.values():
            able = sequence.is_told and not sequence.is_drafted
            if able and sequence not in self.step.named and self.maybe(0.1):
                group = self.random.randrange(len(WINDOWS))
                held = [i for i, block in enumerate(sequence.tables[group]) if block != NULL_BLOCK]
                if held:
                    self._copy(sequence, group, self.random.choice(held))

    def _copy(self, sequence: Known, group: int, index: int) -> None:
        """To a block of its own."""
        table, block = sequence.tables[group], self._take()
        self.copies.append((table[index], block))
        self.remaps.append(Remap(sequence.sequence_id, group, index, block))
        self._release([table[index]])
        table[index] = block
        self.step.named.append(sequence)

    def _work(self, parents: dict[int, int]) -> list[SequenceWork]:
        shares, done = list[SequenceWork](), set[int]()
        for sequence in list(self.known.values()):
            stuck = sequence.is_waiting and not sequence.offered
            if sequence.sequence_id in done or stuck or sequence.is_drafted or self.maybe(0.15):
                continue
            missing = len(sequence.token_ids) + sequence.is_waiting - sequence.num_computed
            num_tokens = self.random.choice([missing, missing, self.random.randint(1, missing)])
            children = [self.known[i] for i, parent in parents.items() if parent == sequence.sequence_id]
            followers = [
                each
                for each in children
                if num_tokens == missing and each.sequence_id not in done and each.tables == sequence.tables
            ]
            followers = followers if self.maybe(0.7) else []
            done.update(each.sequence_id for each in (sequence, *followers))
            shares.append(self._share(sequence, followers, num_tokens))
        return shares

    def _share(self, leader: Known, followers: list[Known], num_tokens: int) -> SequenceWork:
        members = [leader, *followers]
        self.step.named += members
        token = self.random.choice(leader.offered) if leader.is_waiting else None
        self._own_last_block(members)
        brought = [[] for _ in WINDOWS] if leader.is_told else leader.tables
        leader.is_told = True
        end = leader.num_computed + num_tokens
        draft = [] if followers or leader.params.beam or end < len(leader.token_ids) else self._draft(leader)
        width = -(-(end + len(draft)) // BLOCK_SIZE)
        grown = [[self._take() for _ in range(len(t), width)] for t in leader.tables]
        for member in members:
            if token is not None:
                member.token_ids.append(token)
                member.offered = []
            self.num_holders.update(b for new in grown for b in new if member is not leader)
            member.tables = [[*table, *new] for table, new in zip(member.tables, grown, strict=True)]
            self._advance(member, end)
        new_block_ids = [[*old, *new] for old, new in zip(brought, grown, strict=True)]
        ids = [member.sequence_id for member in followers]
        return work(leader.sequence_id, num_tokens, *new_block_ids, input_token_id=token, followers=ids)

    def _draft(self, sequence: Known) -> list[int]:
        """Guesses what follows a sequence whose tokens are all known."""
        if None in sequence.token_ids or self.maybe(0.5):
            return []
        draft = self._guess(sequence, self.random.choice([1, 2, 5, 9]))
        self.drafts[sequence.sequence_id] = draft
        sequence.is_drafted = True
        self.step.drafted[sequence.sequence_id] = sequence
        return draft

    def _guess(self, sequence: Known, length: int) -> list[int]:
        """Returns what the model chooses, up to a place at random, and then anything."""
        history = array("i", [token for token in sequence.token_ids if token is not None])
        num_right = self.random.randint(0, length)
        num_generated = len(history) - sequence.prompt_length
        for place in range(length):
            token = self.random.randrange(256)
            if place < num_right:
                with suppress(NoTokenLeftError):
                    count = num_generated + place
                    token = _VOCABULARY.choose(history.tobytes(), sequence.params, sequence.index, count)
            history.append(token)
        return history[-length:].tolist()

    def _own_last_block(self, members: list[Known]) -> None:
        """Copy-on-write, where others than `members` hold what these are about to write."""
        leader = members[0]
        if leader.num_computed % BLOCK_SIZE == 0:
            return
        for group, table in enumerate(leader.tables):
            index = leader.num_computed // BLOCK_SIZE
            if self.num_holders[table[index]] > len(members):
                self._copy(leader, group, index)
                for follower in members[1:]:
                    self.remaps.append(Remap(follower.sequence_id, group, index, table[index]))
                    self._release([follower.tables[group][index]])
                    follower.tables[group][index] = table[index]
                    self.num_holders[table[index]] += 1

    def _pass(self, sequence: Known, end: int) -> None:
        for window, table in zip(WINDOWS, sequence.tables, strict=True):
            passed = range(_first_seen(window, sequence.num_computed), _first_seen(window, end))
            self._release([table[index] for index in passed])
            for index in passed:
                table[index] = NULL_BLOCK
        sequence.num_computed = end

    def _advance(self, sequence: Known, end: int) -> None:
        self._pass(sequence, end)
        if end == len(sequence.token_ids):
            self.step.places[sequence.sequence_id] = [(sequence, end)]
            if sequence.params.beam is None:
                sequence.token_ids.append(None)


def _first_seen(window: int, position: int) -> int:
    return max(0, position - window + 1) // BLOCK_SIZE if window else 0


def _pairs(left: list[list[int]], right: list[list[int]]) -> list[tuple[int, int]]:
    return [pair for a, b in zip(left, right, strict=True) for pair in zip(a, b, strict=True)]
