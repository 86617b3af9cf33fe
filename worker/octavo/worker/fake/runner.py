"""A model without arithmetic, for tests of everything around it: the next token is a hash of the whole history.

It keeps a real paged cache, though: tokens are written through the slot mapping and read back through the block table,
so a lost, repeated or misplaced token or a block given to two sequences changes every token that follows.
"""

import hashlib
import struct
import time
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from octavo.runtime.models.directory import fingerprint, model_name
from octavo.runtime.models.grammar import GrammarError
from octavo.wire.costs import PrefillCosts, StepCosts, SwapCosts
from octavo.wire.pooling import PooledOutput, PoolingModel, PoolingTask
from octavo.wire.sampling import Logprobs, SamplingParams
from octavo.wire.steps import (
    BlockMoves,
    Candidates,
    FurtherTokens,
    GrammarTime,
    KVGroup,
    ModelInfo,
    PromptLogprobs,
    SampledToken,
    SequenceDraft,
    SequenceFailure,
    StepTimes,
)
from octavo.worker.fake.cache import FakeCache, FakeCacheError
from octavo.worker.fake.config import read_eos_token_ids, read_positive
from octavo.worker.fake.distribution import FakeDistribution, NoTokenLeftError, settings_digest
from octavo.worker.fake.draft_model import FakeDraftModel
from octavo.worker.fake.encoder import FAKE_OUTPUTS, expected_output
from octavo.worker.fake.faults import FakeFault, FakeFaults
from octavo.worker.kv_store.identity import StoreIdentity
from octavo.worker.kv_store.loan import Parts, Payload
from octavo.worker.runner import BlockContents, DoneStep, Settle, StepOutput, nothing_pending
from octavo.worker.sampling.grammars import Grammars
from octavo.worker.sequences import Chooser, WorkerSequence, WorkItem
from octavo.worker.step.failures import bad_grammar, no_token_left, not_finite

# The costs that a fake device reports: moving a block costs as much as computing four of its tokens, so that now one is
# better and now the other.
FAKE_COSTS = StepCosts(PrefillCosts(0.0, 1e-6, 0.0), SwapCosts(0.0, 2e-6, 2e-6))
_GREEDY = b"greedy"
# What is given by the words of `--pooling`.
_POOLINGS = {
    "last": PoolingModel(PoolingTask.EMBED, FAKE_OUTPUTS),
    **dict.fromkeys(("mean", "cls"), PoolingModel(PoolingTask.EMBED, FAKE_OUTPUTS, gathers=True)),
}


@dataclass(frozen=True)
class FakeVocabulary:
    """The tokens a fake model may choose: all ids below `size`, of which the `eos_token_ids` (in rising order) are
    apart.

    The first of these is chosen with `eos_probability`.
    """

    size: int
    eos_token_ids: tuple[int, ...] = ()
    eos_probability: float = 0.0

    def __post_init__(self) -> None:
        if len(self.eos_token_ids) >= self.size:
            raise ValueError(f"a vocabulary of {self.size} tokens holds nothing but EOS tokens")
        if self.eos_probability and not self.eos_token_ids:
            raise ValueError("the model has no EOS token to be chosen with a probability")

    @classmethod
    def read(cls, directory: Path, eos_probability: float = 0.0) -> Self:
        """Reads the vocabulary of a model directory. Raises `ModelDirectoryError` if its files do not state it."""
        size = read_positive(directory, "vocab_size")
        eos = (token for token in read_eos_token_ids(directory) if token < size)
        return cls(size, tuple(sorted(eos)), eos_probability)

    def choose(
        self,
        history: bytes,
        sampling: SamplingParams,
        sequence_index: int,
        num_generated: int,
        mask: bytes | None = None,
    ) -> int:
        """Returns the token after `history` (int32 ids): the most likely that neither the parameters nor a grammar's
        `mask` exclude.

        As in a real model, a greedy choice knows no seed and no index. Raises `NoTokenLeftError`.
        """
        drawn = sampling.temperature > 0
        key = struct.pack("<QQ", sampling.seed, sequence_index) if drawn else _GREEDY
        distribution = self._distribution(history, key + settings_digest(sampling, drawn=drawn))
        return distribution.permitted(sampling, num_generated, 1, mask)[0]

    def candidates(
        self, history: bytes, sampling: SamplingParams, num_generated: int, mask: bytes | None = None
    ) -> list[tuple[int, float]]:
        """Returns the tokens a beam may go on with after `history` and their logprobs, the most likely first.

        There are as many as a search can want of one beam, if possible. Raises `NoTokenLeftError`.
        """
        assert sampling.beam is not None, "only beams have candidates"
        count = max(2, 1 + len(sampling.stop_token_ids)) * sampling.beam.width
        distribution = self._distribution(history, _GREEDY + settings_digest(sampling, drawn=False))
        token_ids = distribution.permitted(sampling, num_generated, count, mask)
        return [(token_id, distribution.logprob(token_id)) for token_id in token_ids]

    def logprobs(self, history: bytes, token_id: int, top: int) -> Logprobs:
        """Returns the report on `token_id` after `history`, by the model's own distribution, however the token was
        chosen."""
        return self._distribution(history, _GREEDY).logprobs(token_id, top)

    def _distribution(self, history: bytes, key: bytes) -> FakeDistribution:
        digest = hashlib.blake2b(history, digest_size=16, key=key).digest()
        return FakeDistribution.of(digest, self.size, self.eos_token_ids, self.eos_probability)


def expected_tokens(
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    sequence_index: int,
    count: int,
    vocabulary: FakeVocabulary,
    window: int = 0,
) -> list[int]:
    """Returns the first `count` tokens that any correct system generates from `prompt_ids` with the fake model.

    `window` is that of its widest KV group, 0 if one sees all tokens.
    """
    history = array("i", prompt_ids)
    for num_generated in range(count):
        visible = _visible(history, window, len(history) - 1)
        history.append(vocabulary.choose(visible, sampling, sequence_index, num_generated))
    return history[len(prompt_ids) :].tolist()


def expected_candidates(
    prompt_ids: Sequence[int],
    generated_ids: Sequence[int],
    sampling: SamplingParams,
    vocabulary: FakeVocabulary,
    window: int = 0,
) -> list[tuple[int, float]]:
    """Returns the tokens and logprobs that the fake model offers a beam with `generated_ids`, the most likely first."""
    history = array("i", [*prompt_ids, *generated_ids])
    return vocabulary.candidates(_visible(history, window, len(history) - 1), sampling, len(generated_ids))


def expected_logprobs(
    token_ids: Sequence[int], top: int, vocabulary: FakeVocabulary, window: int = 0
) -> list[Logprobs]:
    """Returns the fake model's report on each of `token_ids` but the first, given those before it.

    For a prompt, these are its prompt logprobs; for later tokens, the logprobs of generated tokens.
    """
    history = array("i", token_ids)
    return [
        vocabulary.logprobs(_visible(history, window, position), following, top)
        for position, following in enumerate(token_ids[1:])
    ]


def _visible(history: "array[int]", window: int, position: int) -> bytes:
    return history[_first_visible(window, position) : position + 1].tobytes()


def _first_visible(window: int, position: int) -> int:
    """Returns the first position that a query at `position` sees."""
    return max(0, position - window + 1) if window else 0


@dataclass
class FakeChoices:
    """Collects what a step's sequences choose (`octavo.worker.runner.StepOutput`)."""

    sampled: list[SampledToken] = field(default_factory=list)
    further: list[FurtherTokens] = field(default_factory=list)
    candidates: list[Candidates] = field(default_factory=list)
    failed: list[SequenceFailure] = field(default_factory=list)
    grammars: list[GrammarTime] = field(default_factory=list)
    proposed: list[SequenceDraft] = field(default_factory=list)
    pooled: list[PooledOutput] = field(default_factory=list)

    def output(self, prompt_logprobs: list[PromptLogprobs], times: StepTimes) -> StepOutput:
        return StepOutput(
            self.sampled,
            self.candidates,
            prompt_logprobs,
            self.failed,
            times,
            self.further,
            self.proposed,
            self.pooled,
        )

    def tokens(self) -> dict[int, list[int]]:
        """Returns all tokens that sequences got."""
        further = {each.sequence_id: each.token_ids for each in self.further}
        return {each.sequence_id: [each.token_id, *further.get(each.sequence_id, [])] for each in self.sampled}


def _failure(sequence: WorkerSequence, error: NoTokenLeftError | GrammarError) -> SequenceFailure:
    if isinstance(error, GrammarError):
        return bad_grammar(sequence.sequence_id, str(error))
    return no_token_left(sequence.sequence_id, constrained=bool(sequence.sampling.grammar))


class FakeRunner:
    """The `Runner` of the fake model, with a cache of one int32 per slot. Every step takes `step_ms` longer than it
    must.

    `windows` has one entry per KV group, 0 for one that sees all tokens. The history that is hashed is the one that the
    widest group sees; the other groups must hold the same as far as they see. `num_cpu_blocks` None: a quarter of
    `num_blocks`. A `draft_model` is right with the probability `draft_hit_rate`. With a `pooling` it gives outputs of
    texts, hashes of the last token's history, or of all tokens that this runner has computed. Raises `ValueError` on
    more CPU blocks than device blocks.
    """

    world_size = 1

    def __init__(
        self,
        directory: Path,
        *,
        block_size: int,
        num_blocks: int,
        num_cpu_blocks: int | None = None,
        windows: tuple[int, ...] = (0,),
        max_model_len: int | None = None,
        step_ms: float = 0.0,
        eos_probability: float = 0.0,
        load_format: str = "auto",
        faults: tuple[FakeFault, ...] = (),
        draft_model: str | None = None,
        draft_hit_rate: float = 0.0,
        pooling: str = "auto",
    ) -> None:
        num_cpu_blocks = num_blocks // 4 if num_cpu_blocks is None else num_cpu_blocks
        self._vocabulary = FakeVocabulary.read(directory, eos_probability)
        self.grammars = Grammars(directory)
        self._step_s = step_ms / 1000
        self._faults = FakeFaults(faults)
        self._cache = FakeCache(num_blocks=num_blocks, num_cpu_blocks=num_cpu_blocks, block_size=block_size)
        self._window = 0 if 0 in windows else max(windows)
        longest = read_positive(directory, "max_position_embeddings")
        self.model = ModelInfo(
            name=model_name(directory),
            fingerprint=fingerprint(directory, load_format),
            dtype="fake",
            vocab_size=self._vocabulary.size,
            max_model_len=min(longest, max_model_len or longest),
            pooling=_POOLINGS.get(pooling),
        )
        # By sequence, what was computed here of texts whose output is made of all tokens.
        self._gathered: dict[int, array[int]] = {}
        self.device = self.kernels = "fake"
        self.num_blocks = num_blocks
        self.num_cpu_blocks = num_cpu_blocks
        self.block_size = block_size
        self.kv_bytes_per_token = self._cache.slot_bytes * len(windows)
        self.kv_cache_dtype = "int32"
        self.kv_groups = [KVGroup(window) for window in windows]
        self.draft_model = draft_model
        self._draft: FakeDraftModel | None = None
        self._draft_caches: list[FakeCache] = []
        if draft_model is not None:
            cache = FakeCache(num_blocks=num_blocks, num_cpu_blocks=num_cpu_blocks, block_size=block_size)
            self._draft = FakeDraftModel(draft_model, draft_hit_rate, self._vocabulary.size, cache, self.kv_groups)
            self._draft_caches.append(cache)
            self.kv_bytes_per_token *= 2

    def launch(self, moves: BlockMoves, items: list[WorkItem], settle: Settle = nothing_pending) -> DoneStep:
        return DoneStep(self.execute(moves, items))

    def forget(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            self._gathered.pop(sequence_id, None)

    @property
    def _caches(self) -> list[FakeCache]:
        return [self._cache, *self._draft_caches]

    @property
    def kv_identity(self) -> StoreIdentity:
        num_bytes = sum(cache.block_bytes for cache in self._caches)
        what = f"{self.model.fingerprint} {self.draft_model or ''}".strip()
        return StoreIdentity(what, self.kv_cache_dtype, "tokens", "fake", self.block_size, num_bytes)

    def read_blocks(self, block_ids: Sequence[int]) -> BlockContents:
        blocks = [[part for cache in self._caches for part in cache.block(each)] for each in block_ids]
        return BlockContents(True, lambda: blocks, self._is_sound)

    def _is_sound(self, _: Parts) -> bool:
        return True

    def fill_cpu_block(self, block_id: int, payload: Payload) -> None:
        rest = bytes(payload)
        for cache in self._caches:
            cache.fill_cpu(block_id, rest[: cache.block_bytes])
            rest = rest[cache.block_bytes :]

    def peek_blocks(self, block_ids: Sequence[int], *, in_cpu: bool) -> list[Payload] | None:
        if max(block_ids) >= (self.num_cpu_blocks if in_cpu else self.num_blocks):
            return None
        return [
            b"".join(part for cache in self._caches for part in cache.block(each, in_cpu=in_cpu)) for each in block_ids
        ]

    def execute(self, moves: BlockMoves, items: list[WorkItem]) -> StepOutput:
        began = time.monotonic_ns()
        spoiled = [not_finite(each.sequence_id) for each in self._faults.strike(items)]
        self._cache.move(moves)
        for item in items:
            self._write(item)
        written = time.monotonic_ns()
        if self._step_s:
            time.sleep(self._step_s)
        slept = time.monotonic_ns()
        chosen = self._choose(items)
        prompt_logprobs = [part for item in items for part in self._prompt_logprobs(item)]
        ended = time.monotonic_ns()
        if self._draft is not None:
            self._follow(self._draft, moves, items, chosen)
        proposed = time.monotonic_ns()
        times = StepTimes(
            (written - began) // 1000,
            (slept - written) // 1000,
            (ended - slept) // 1000,
            chosen.grammars,
            (proposed - ended) // 1000,
        )
        return chosen.output(prompt_logprobs, times).without(spoiled)

    def _write(self, item: WorkItem) -> None:
        for table in item.sequence.block_tables:
            self._cache.write(table, item.start, item.token_ids)

    def _choose(self, items: list[WorkItem]) -> FakeChoices:
        chosen = FakeChoices()
        for item in items:
            self._gather(item)
            for sequence in item.choosers:
                if sequence.pooling is not None:
                    chosen.pooled.append(self._pooled(item))
                    continue
                began, num_rows = time.perf_counter_ns(), 1
                try:
                    if sequence.sampling.beam is None:
                        num_rows = self._sample(item, sequence, chosen)
                    else:
                        chosen.candidates.append(self._offer(item, sequence))
                except (NoTokenLeftError, GrammarError) as error:
                    chosen.failed.append(_failure(sequence, error))
                if sequence.sampling.grammar:
                    # A grammar takes nearly all the time of a choice here.
                    taken = (time.perf_counter_ns() - began) // (1000 * num_rows)
                    chosen.grammars.append(GrammarTime(sequence.sequence_id, taken))
        return chosen

    def _gather(self, item: WorkItem) -> None:
        """Keeps the tokens that the item computes, as they are in the cache, of a text whose output takes all."""
        pooling = self.model.pooling
        if pooling is not None and pooling.gathers and item.sequence.pooling is not None:
            seen = array("i", self._read(item, item.start, item.end))
            self._gathered.setdefault(item.sequence.sequence_id, array("i")).extend(seen[-item.num_tokens :])

    def _pooled(self, item: WorkItem) -> PooledOutput:
        sequence = item.sequence
        assert sequence.pooling is not None
        assert self.model.pooling is not None
        seen = self._gathered.get(sequence.sequence_id) or array("i", self._read(item, item.end - 1, item.end))
        values = expected_output(seen, sequence.pooling.pair_start, self.model.pooling.num_outputs)
        return PooledOutput(sequence.sequence_id, values)

    def _sample(self, item: WorkItem, sequence: WorkerSequence, chosen: FakeChoices) -> int:
        """Samples a token, and the further ones that the item's draft brings; returns how many.

        Raises `NoTokenLeftError` or `GrammarError` if there is not even one.
        """
        first = self._sampled(item, Chooser(sequence))
        chosen.sampled.append(first)
        tokens = [first]
        try:
            for num_drafted, guess in enumerate(item.draft, 1):
                if tokens[-1].token_id != guess:
                    break
                tokens.append(self._sampled(item, Chooser(sequence, item.draft, num_drafted)))
        except (NoTokenLeftError, GrammarError):
            # Without a draft it would be the next step's failure.
            pass
        if further := tokens[1:]:
            token_ids, logprobs = (
                [each.token_id for each in further],
                [each.logprobs for each in further if each.logprobs],
            )
            chosen.further.append(FurtherTokens(sequence.sequence_id, token_ids, logprobs))
        return len(tokens)

    def _follow(self, draft: FakeDraftModel, moves: BlockMoves, items: list[WorkItem], chosen: FakeChoices) -> None:
        """Has the draft model compute what the model has, and adds what it guesses to follow what was chosen."""
        draft.move(moves)
        for item in items:
            draft.compute(item)
        tokens = chosen.tokens()
        for item in items:
            if not item.num_proposed or item.sequence.sequence_id not in tokens:
                continue
            try:
                guesses = draft.propose(item, tokens[item.sequence.sequence_id], self._expected)
            except (NoTokenLeftError, GrammarError):
                # Nothing can follow.
                continue
            chosen.proposed.append(SequenceDraft(item.sequence.sequence_id, guesses))

    def _expected(self, item: WorkItem, further: list[int]) -> int:
        """Returns what the fake model chooses after the known tokens of an item's sequence and `further` ones."""
        chooser = Chooser(item.sequence, further, len(further))
        history = array("i", [*item.sequence.token_ids[: item.known_end], *further])
        visible = _visible(history, self._window, len(history) - 1)
        sampling, index = chooser.sampling, chooser.sequence.sequence_index
        return self._vocabulary.choose(visible, sampling, index, chooser.num_generated, self._mask(chooser))

    def _sampled(self, item: WorkItem, chooser: Chooser) -> SampledToken:
        sampling, index = chooser.sampling, chooser.sequence.sequence_index
        history = self._history_of(item, chooser)
        token_id = self._vocabulary.choose(history, sampling, index, chooser.num_generated, self._mask(chooser))
        wanted = sampling.logprobs
        logprobs = None if wanted is None else self._vocabulary.logprobs(history, token_id, wanted)
        return SampledToken(chooser.sequence_id, token_id, logprobs)

    def _offer(self, item: WorkItem, sequence: WorkerSequence) -> Candidates:
        chooser = Chooser(sequence)
        history, mask = self._history_of(item, chooser), self._mask(chooser)
        offered = self._vocabulary.candidates(history, sequence.sampling, sequence.num_generated, mask)
        return Candidates(sequence.sequence_id, [token for token, _ in offered], [logprob for _, logprob in offered])

    def _history_of(self, item: WorkItem, chooser: Chooser) -> bytes:
        end = item.known_end + chooser.num_drafted
        return self._read(item, end - 1, end)

    def _mask(self, chooser: Chooser) -> bytes | None:
        """Returns the tokens that the chooser's grammar allows, or None without a grammar. Raises `GrammarError`."""
        if not chooser.sampling.grammar:
            return None
        if chooser.num_drafted:
            return self.grammars.allowed_after(chooser.sequence, chooser.drafted)
        return self.grammars.allowed(chooser.sequence)

    def _prompt_logprobs(self, item: WorkItem) -> list[PromptLogprobs]:
        """Returns the logprobs of the prompt tokens after the item's own positions, if they are wanted and there are
        any."""
        sequence, start = item.sequence, item.start
        top = sequence.sampling.prompt_logprobs
        end = min(item.known_end, sequence.prompt_length - 1)
        if top is None or start >= end:
            return []
        history = array("i", self._read(item, start, end))
        skipped = _first_visible(self._window, start)
        reports = [
            self._vocabulary.logprobs(
                history[_first_visible(self._window, position) - skipped : position + 1 - skipped].tobytes(),
                sequence.token_ids[position + 1],
                top,
            )
            for position in range(start, end)
        ]
        return [PromptLogprobs(sequence.sequence_id, start + 1, reports)]

    def _read(self, item: WorkItem, start: int, end: int) -> bytes:
        """Returns the tokens that queries at the positions `start` to `end - 1` of `item` see in the widest group.

        Raises `FakeCacheError` if the other groups do not agree.
        """
        reads = [
            self._cache.read(table, _first_visible(group.window, start), end)
            for group, table in zip(self.kv_groups, item.sequence.block_tables, strict=True)
        ]
        history = max(reads, key=len)
        if not all(history.endswith(read) for read in reads):
            raise FakeCacheError(f"{item.sequence} has other tokens in one KV group than in another")
        return history
