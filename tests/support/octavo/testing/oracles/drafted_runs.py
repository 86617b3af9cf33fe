"""Runs requests on a worker's table and runner with drafts of any quality: what comes must be what comes without."""

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from octavo.testing.oracles.worker_plans import moves, plan, start, work
from octavo.wire.base import NULL_BLOCK
from octavo.wire.sampling import Logprobs, SamplingParams
from octavo.wire.steps import (
    MAX_DRAFT_TOKENS,
    FailureReason,
    Remap,
    SequenceFork,
    SequenceStart,
    SequenceWork,
)
from octavo.worker.runner import Runner, StepOutput
from octavo.worker.sequence_table import SequenceTable
from octavo.worker.sequences import WorkerSequence


@dataclass(frozen=True)
class Asked:
    """A request for `num_sequences` continuations of `prompt`."""

    prompt: list[int]
    params: SamplingParams
    num_sequences: int = 1


@dataclass
class Answer:
    """What one sequence said, and why it could not go on."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    failure: FailureReason | None = None


# The place of a request and that of its sequence; and what continues a sequence with these generated tokens.
Place = tuple[int, int]
Drafter = Callable[[Place, list[int]], list[int]]


def no_draft(place: Place, generated: list[int]) -> list[int]:
    return []


def any_draft(answers: dict[Place, Answer], random: Random, vocab_size: int) -> Drafter:
    """Makes drafts that are right to any degree, of the `answers` without drafts, and go on beyond their ends."""

    def noise(length: int) -> list[int]:
        return random.choices(range(vocab_size), k=length)

    def draft(place: Place, generated: list[int]) -> list[int]:
        right, length = answers[place].token_ids[len(generated) :], random.choice([1, 2, 3, 8, MAX_DRAFT_TOKENS])
        guess = (right + noise(length))[:length]
        match random.randrange(6):
            case 0:
                return []
            case 1:
                return noise(length)
            case 2:
                return guess[: len(right)] + right[-1:] * (length - len(right))
            case 3:
                wrong = random.randrange(length)
                return [*guess[:wrong], (guess[wrong] + 1) % vocab_size, *guess[wrong + 1 :]]
        return guess

    return draft


class DraftedRun:
    """Answers requests step by step, in batches, chunks and blocks at random; now and then one is forgotten and
    computed anew. With `most_proposed` the runner's draft model is asked for up to so many guesses, and what it guesses
    is drafted. `num_drafted` and `num_accepted` count tokens of drafts."""

    def __init__(
        self,
        runner: Runner,
        asked: Sequence[Asked],
        random: Random,
        draft: Drafter = no_draft,
        most_proposed: int = 0,
    ) -> None:
        self._most_proposed = most_proposed
        # What the draft model guesses to come next.
        self._proposed: dict[Place, list[int]] = {}
        self._runner = runner
        self._asked = asked
        self._random = random
        self._draft = draft
        self._table = SequenceTable(
            vocab_size=runner.model.vocab_size,
            max_model_len=runner.model.max_model_len,
            num_blocks=runner.num_blocks,
            num_cpu_blocks=runner.num_cpu_blocks,
            block_size=runner.block_size,
            kv_groups=runner.kv_groups,
            on_forget=runner.forget,
        )
        self._next_id = 1
        self._places: dict[int, Place] = {}
        # Sequences whose blocks are still those of the one they were forked from.
        self._sharing: set[int] = set()
        self._forget: list[int] = []
        self.answers = {(i, j): Answer() for i, each in enumerate(asked) for j in range(each.num_sequences)}
        self.num_drafted = self.num_accepted = self.num_steps = 0
        # Drafts of sequences that go on in which another token than the next one was chosen.
        self.num_wrong = 0

    def run(self, most: int = 6) -> dict[Place, Answer]:
        """Runs all requests to their ends, about `most` sequences at a time, and returns the answers."""
        waiting = list(range(len(self._asked)))
        while waiting or self._live:
            starts: list[SequenceStart] = []
            while waiting and len(self._live) + len(starts) < most:
                starts.append(self._start((waiting.pop(0), 0), []))
            self._step(starts)
        self._table.clear()
        return self.answers

    @property
    def _live(self) -> dict[int, WorkerSequence]:
        return {each.sequence_id: each for each in self._table if each.sequence_id not in self._forget}

    def _name(self, place: Place) -> int:
        self._places[self._next_id] = place
        self._next_id += 1
        return self._next_id - 1

    def _start(self, place: Place, generated: list[int]) -> SequenceStart:
        asked = self._asked[place[0]]
        return start(self._name(place), asked.prompt, generated, index=place[1], params=asked.params)

    def _step(self, starts: list[SequenceStart]) -> None:
        self._free = list(
            set(range(self._runner.num_blocks))
            - {block for sequence in self._table for table in sequence.block_tables for block in table}
        )
        self._random.shuffle(self._free)
        forget, self._forget = self._forget, []
        for sequence in self._live.values():
            if sequence.sequence_id not in forget and self._random.random() < 0.03:
                self._restart(sequence, forget, starts)
        remaps, copies = self._part(forget)
        shares, forks, drafts = list[SequenceWork](), list[SequenceFork](), dict[int, list[int]]()
        proposals: dict[int, int] = {}
        for sequence in [*self._live.values(), *map(self._begun, starts)]:
            if sequence.sequence_id in forget or self._random.random() < 0.15:
                continue
            self._plan(sequence, shares, forks, drafts, proposals)
        step = plan(
            forget=forget,
            moves=moves(copy=copies),
            starts=starts,
            forks=forks,
            remaps=remaps,
            work=shares,
            drafts=drafts,
            proposals=proposals,
        )
        assert not self._table.must_know(step)
        items = self._table.apply(step)
        launched = self._runner.launch(step.moves, items)
        self._table.begin(items)
        output = launched.output()
        self._table.complete(items, output)
        self._check_tables(drafts.keys() | proposals.keys())
        self._learn(output)
        chosen = {sequence_id: sequence.token_ids for sequence_id, sequence in self._live.items()}
        num_chosen = {each.sequence_id: 1 + len(each.token_ids) for each in output.further}
        self.num_wrong += sum(
            chosen[each][-num_chosen.get(each, 1) :][: len(draft)] != draft[: num_chosen.get(each, 1)]
            for each, draft in drafts.items()
            if each in chosen
        )
        self.num_steps += 1
        self.num_drafted += sum(map(len, drafts.values()))
        self.num_accepted += sum(len(each.token_ids) for each in output.further)

    def _begun(self, begun: SequenceStart) -> WorkerSequence:
        """Returns the sequence as the table will have it."""
        prompt, generated = begun.prompt_token_ids, begun.generated_token_ids
        tables: list[list[int]] = [[] for _ in self._runner.kv_groups]
        return WorkerSequence(
            begun.sequence_id, begun.sequence_index, begun.sampling, len(prompt), prompt + generated, 0, tables
        )

    def _restart(self, sequence: WorkerSequence, forget: list[int], starts: list[SequenceStart]) -> None:
        place = self._places[sequence.sequence_id]
        asked = self._asked[place[0]]
        if asked.num_sequences > 1 or sequence.num_computed < sequence.prompt_length:
            return
        forget.append(sequence.sequence_id)
        starts.append(self._start(place, sequence.token_ids[sequence.prompt_length :]))

    def _part(self, forget: list[int]) -> tuple[list[Remap], list[tuple[int, int]]]:
        """Gives forked sequences blocks of their own."""
        remaps, copies = list[Remap](), list[tuple[int, int]]()
        for sequence_id in self._sharing - set(forget):
            for group, table in enumerate(self._live[sequence_id].block_tables):
                for index, block in enumerate(table):
                    if block != NULL_BLOCK:
                        copies.append((block, self._free.pop()))
                        remaps.append(Remap(sequence_id, group, index, copies[-1][1]))
        self._sharing.clear()
        return remaps, copies

    def _plan(
        self,
        sequence: WorkerSequence,
        shares: list[SequenceWork],
        forks: list[SequenceFork],
        drafts: dict[int, list[int]],
        proposals: dict[int, int],
    ) -> None:
        place, followers = self._places[sequence.sequence_id], list[int]()
        asked, known = self._asked[place[0]], len(sequence.token_ids)
        missing = known - sequence.num_computed
        num_tokens = self._random.choice([missing, missing, self._random.randint(1, missing)])
        draft, num_proposed = list[int](), 0
        if num_tokens == missing and known == len(asked.prompt) and asked.num_sequences > 1:
            followers = [self._name((place[0], index)) for index in range(1, asked.num_sequences)]
            forks += [SequenceFork(sequence.sequence_id, each, self._places[each][1]) for each in followers]
            self._sharing.update(followers)
        elif num_tokens == missing:
            room = self._runner.model.max_model_len - known
            draft = self._draft(place, sequence.token_ids[sequence.prompt_length :])[:room]
            draft = draft or self._proposed.pop(place, [])[:room]
            num_proposed = min(self._random.randint(0, self._most_proposed), room - len(draft))
        if draft:
            drafts[sequence.sequence_id] = draft
        if num_proposed > 0:
            proposals[sequence.sequence_id] = num_proposed
        width = -(-(sequence.num_computed + num_tokens + len(draft) + num_proposed) // self._runner.block_size)
        grown = [[self._free.pop() for _ in range(width - len(table))] for table in sequence.block_tables]
        shares.append(work(sequence.sequence_id, num_tokens, *grown, followers=followers))

    def _check_tables(self, drafted: Container[int]) -> None:
        for sequence in self._table:
            if sequence.sequence_id in drafted:
                width = -(-sequence.num_computed // self._runner.block_size)
                assert [len(table) for table in sequence.block_tables] == [width] * len(self._runner.kv_groups)
                assert sequence.num_computed == len(sequence.token_ids) - 1

    def _learn(self, output: StepOutput) -> None:
        for part in output.prompt_logprobs:
            answer = self.answers[self._places[part.sequence_id]]
            # A sequence that was begun anew says it once more.
            del answer.prompt_logprobs[part.start - 1 :]
            answer.prompt_logprobs += part.logprobs
        for failure in output.failed:
            self.answers[self._places[failure.sequence_id]].failure = failure.reason
            self._forget.append(failure.sequence_id)
        for each in output.proposed:
            self._proposed[self._places[each.sequence_id]] = list(each.token_ids)
        further = {each.sequence_id: each for each in output.further}
        assert list(further) == [t.sequence_id for t in output.sampled if t.sequence_id in further]
        for token in output.sampled:
            chosen = [(token.token_id, token.logprobs)]
            if more := further.get(token.sequence_id):
                logprobs: list[Logprobs | None] = [*more.logprobs] or [None] * len(more.token_ids)
                chosen += zip(more.token_ids, logprobs, strict=True)
            self._append(token.sequence_id, chosen)

    def _append(self, sequence_id: int, chosen: list[tuple[int, Logprobs | None]]) -> None:
        place = self._places[sequence_id]
        params, answer = self._asked[place[0]].params, self.answers[place]
        longest = min(params.max_tokens, self._runner.model.max_model_len - len(self._asked[place[0]].prompt))
        for token_id, logprobs in chosen:
            answer.token_ids.append(token_id)
            assert (logprobs is None) == (params.logprobs is None)
            if logprobs:
                answer.logprobs.append(logprobs)
            if token_id in params.stop_token_ids or len(answer.token_ids) == longest:
                self._forget.append(sequence_id)
                return


def random_requests(
    random: Random, count: int, vocab_size: int, *, longest_prompt: int, most_tokens: int, grammars: Sequence[str] = ()
) -> list[Asked]:
    """Draws requests with any of the sampler's features, alone and together."""
    tokens = range(vocab_size)

    def some(least: int, most: int) -> list[int]:
        return random.sample(tokens, min(vocab_size - 1, random.randint(least, most)))

    def features() -> Iterator[tuple[str, Any]]:
        if random.random() < 0.75:
            yield "temperature", random.choice([0.3, 0.8, 1.0, 1.5])
        for name, value in (
            ("top_k", random.randint(1, 40)),
            ("top_p", random.choice([0.5, 0.9, 0.99])),
            ("min_p", random.choice([0.01, 0.2])),
            ("repetition_penalty", random.choice([0.8, 1.3])),
            ("presence_penalty", random.choice([-0.5, 0.7])),
            ("frequency_penalty", random.choice([-0.5, 0.7])),
            ("logit_bias", [(token, random.uniform(-8, 8)) for token in some(1, 5)]),
            ("allowed_token_ids", some(2, 30)),
            ("banned_token_ids", some(1, 30)),
            ("stop_token_ids", some(1, 1 + vocab_size // 20)),
            ("min_tokens", random.randint(1, most_tokens)),
            ("logprobs", random.choice([0, 3])),
            ("prompt_logprobs", random.choice([0, 2])),
        ):
            if random.random() < 0.2:
                yield name, value
        if grammars and random.random() < 0.3:
            yield "grammar", random.choice(grammars)

    def request() -> Asked:
        params = SamplingParams(
            max_tokens=random.randint(1, most_tokens), seed=random.randrange(2**63), **dict(features())
        )
        return Asked(random.choices(tokens, k=random.randint(1, longest_prompt)), params, random.choice([1, 1, 1, 3]))

    return [request() for _ in range(count)]


def compare(runner: Runner, asked: Sequence[Asked], seed: int) -> DraftedRun:
    """Checks that drafts change no token and no logprob of any answer; returns the run with drafts."""
    plain = DraftedRun(runner, asked, Random(seed)).run()
    random = Random(seed + 1)
    drafted = DraftedRun(runner, asked, random, any_draft(plain, random, runner.model.vocab_size))
    for place, answer in drafted.run().items():
        assert answer == plain[place], f"{place} of {asked[place[0]]}"
    return drafted


def compare_proposed(runner: Runner, asked: Sequence[Asked], seed: int, most: int = 6) -> DraftedRun:
    """Checks that what the runner's draft model guesses changes no token and no logprob of any answer; returns the run
    in which it does."""
    plain = DraftedRun(runner, asked, Random(seed)).run()
    drafted = DraftedRun(runner, asked, Random(seed + 1), most_proposed=most)
    for place, answer in drafted.run().items():
        assert answer == plain[place], f"{place} of {asked[place[0]]}"
    return drafted
