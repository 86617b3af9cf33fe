"""The fake model gives the tokens of its reference exactly as long as the cache is managed rightly."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.runtime.models.directory import ModelDirectoryError
from octavo.testbed.tiny_model import END_TOKEN_ID, VOCAB_SIZE, write_byte_model
from octavo.testing.oracles.worker_plans import beam_sampling, moves, sampling
from octavo.wire.base import NULL_BLOCK
from octavo.wire.sampling import Logprobs, SamplingParams
from octavo.wire.steps import BlockMoves, KVGroup
from octavo.worker.fake.cache import FakeCacheError
from octavo.worker.fake.runner import (
    FakeRunner,
    FakeVocabulary,
    expected_candidates,
    expected_logprobs,
    expected_tokens,
)
from octavo.worker.runner import StepOutput
from octavo.worker.sequences import WorkerSequence, WorkItem

VOCABULARY = FakeVocabulary(VOCAB_SIZE, (END_TOKEN_ID,))
SAMPLED = sampling(temperature=1.0, seed=3)
PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_byte_model(directory, max_model_len=512)
    return directory


def make_sequence(
    prompt: list[int], *tables: list[int], params: SamplingParams = SAMPLED, index: int = 0
) -> WorkerSequence:
    return WorkerSequence(index, index, params, len(prompt), list(prompt), 0, list(tables))


def item(sequence: WorkerSequence, num_tokens: int, *followers: WorkerSequence) -> WorkItem:
    chooses = sequence.num_computed + num_tokens == len(sequence.token_ids)
    return WorkItem(sequence, sequence.num_computed, num_tokens, (sequence, *followers) if chooses else ())


def advance(runner: FakeRunner, items: list[WorkItem], block_moves: BlockMoves | None = None) -> StepOutput:
    """One step: computes the items and appends what they sample, as the worker's table does."""
    output = runner.execute(block_moves or BlockMoves(), items)
    for done in items:
        for sequence in done.members:
            sequence.num_computed += done.num_tokens
    sampling_sequences = [s for done in items for s in done.choosers if s.sampling.beam is None]
    for sequence, token in zip(sampling_sequences, output.sampled, strict=True):
        assert token.sequence_id == sequence.sequence_id
        sequence.token_ids.append(token.token_id)
    return output


def decode(runner: FakeRunner, sequence: WorkerSequence, count: int) -> list[int]:
    for _ in range(count):
        advance(runner, [item(sequence, len(sequence.token_ids) - sequence.num_computed)])
    return sequence.token_ids[sequence.prompt_length :]


class Paging:
    """A careless scheduler's memory: any free block for any table, blocks behind a window given back, sequences swapped
    out and in at random."""

    def __init__(self, runner: FakeRunner, chance: random.Random) -> None:
        self.runner = runner
        self.chance = chance
        self.free = list(range(runner.num_blocks))
        self.cpu_free = list(range(runner.num_cpu_blocks))
        self.swapped: list[WorkerSequence] = []
        chance.shuffle(self.free)

    def grow(self, share: WorkItem) -> None:
        size, tables = self.runner.block_size, share.sequence.block_tables
        for table in tables:
            while len(table) * size < share.start + share.num_tokens:
                table.append(self.free.pop())
        for group, table in zip(self.runner.kv_groups, tables, strict=True):
            passed = max(0, share.start - group.window + 1) // size if group.window else 0
            self.free += [block for block in table[:passed] if block != NULL_BLOCK]
            table[:passed] = [NULL_BLOCK] * passed

    def swap(self, live: list[WorkerSequence]) -> BlockMoves:
        """Moves one sequence between the memories; `swapped` may not be computed until it is back."""
        sequence = self.chance.choice(live)
        if sequence in self.swapped:
            self.swapped.remove(sequence)
            return moves(swap_in=self._exchange(sequence, left=self.cpu_free, taken=self.free))
        self.swapped.append(sequence)
        return moves(swap_out=self._exchange(sequence, left=self.free, taken=self.cpu_free))

    def _exchange(self, sequence: WorkerSequence, left: list[int], taken: list[int]) -> list[tuple[int, int]]:
        pairs = []
        for table in sequence.block_tables:
            for index, block in enumerate(table):
                if block != NULL_BLOCK:
                    table[index] = taken.pop()
                    pairs.append((block, table[index]))
        left += [source for source, _ in pairs]
        self.chance.shuffle(left)
        return pairs


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 9),
    st.integers(1, 4),
    st.sampled_from([(0,), (0, 5), (5, 0), (5,), (3, 7)]),
)
def test_any_tables_chunks_windows_and_swaps_give_the_reference_tokens(
    directory: Path, seed: int, block_size: int, num_sequences: int, windows: tuple[int, ...]
) -> None:
    chance = random.Random(seed)
    # Enough for four sequences of 55 tokens at one token per block, in two groups, here and there.
    runner = FakeRunner(directory, block_size=block_size, num_blocks=440, num_cpu_blocks=440, windows=windows)
    paging = Paging(runner, chance)
    live = [
        make_sequence(
            chance.choices(range(VOCAB_SIZE), k=chance.randint(1, 30)),
            *([] for _ in windows),
            params=sampling(i % 2, seed=i),
            index=i,
        )
        for i in range(num_sequences)
    ]
    for _ in range(25):
        block_moves = paging.swap(live) if chance.random() < 0.4 else BlockMoves()
        resident = [s for s in live if s not in paging.swapped]
        chosen = chance.sample(resident, chance.randint(0, len(resident)))
        items = [item(s, chance.randint(1, len(s.token_ids) - s.num_computed)) for s in chosen]
        for share in items:
            paging.grow(share)
        advance(runner, items, block_moves)
    window = 0 if 0 in windows else max(windows)
    for s in live:
        prompt = s.token_ids[: s.prompt_length]
        reference = expected_tokens(prompt, s.sampling, s.sequence_index, s.num_generated, VOCABULARY, window)
        assert s.token_ids[s.prompt_length :] == reference


def test_tokens_are_read_back_from_the_cache_and_not_from_the_sequence(directory: Path) -> None:
    runner = FakeRunner(directory, block_size=2, num_blocks=8)
    sequence, thief = make_sequence([1, 2, 3, 4], [0, 1, 2]), make_sequence([9], [1])
    advance(runner, [item(sequence, 3)])
    advance(runner, [item(thief, 1)])
    assert decode(runner, sequence, 1) != expected_tokens([1, 2, 3, 4], SAMPLED, 0, 1, VOCABULARY)


@pytest.mark.parametrize("table", [[1, 0, 2], [0, 3, 2]], ids=["swapped", "replaced"])
def test_a_wrong_block_table_changes_the_tokens(directory: Path, table: list[int]) -> None:
    runner = FakeRunner(directory, block_size=2, num_blocks=8)
    sequence = make_sequence(PROMPT, [0, 1, 2])
    advance(runner, [item(sequence, 4)])
    sequence.block_tables = [table]
    assert decode(runner, sequence, 1) != expected_tokens(PROMPT, SAMPLED, 0, 1, VOCABULARY)


@pytest.mark.parametrize(
    ("block_moves", "right"),
    [
        (moves(swap_in=[(0, 5), (1, 4), (2, 6)]), True),
        (moves(swap_in=[(0, 4), (1, 5), (2, 6)]), False),
        (moves(swap_in=[(0, 5), (1, 4)]), False),
        (BlockMoves(), False),
    ],
    ids=["right", "exchanged", "one lost", "all lost"],
)
def test_a_wrong_swap_changes_the_tokens(directory: Path, block_moves: BlockMoves, right: bool) -> None:
    runner = FakeRunner(directory, block_size=2, num_blocks=12)
    sequence = make_sequence(PROMPT, [0, 1, 2])
    advance(runner, [item(sequence, 5)])
    advance(runner, [item(make_sequence([9] * 6, [0, 1, 2]), 6)], moves(swap_out=[(0, 0), (1, 1), (2, 2)]))
    sequence.block_tables = [[5, 4, 6]]
    advance(runner, [], block_moves)
    reference = expected_tokens(PROMPT, SAMPLED, 0, 2, VOCABULARY)
    assert (decode(runner, sequence, 1) == reference) is right


@pytest.mark.parametrize("copied", [True, False])
def test_sequences_that_part_in_a_block_need_a_copy_of_it(directory: Path, copied: bool) -> None:
    runner = FakeRunner(directory, block_size=4, num_blocks=8)
    first = make_sequence(PROMPT, [0, 1])
    second = first.fork(1, 1)
    advance(runner, [item(first, 5, second)])
    second.block_tables = [[0, 2 if copied else 1]]
    advance(runner, [item(first, 1), item(second, 1)], moves(copy=[(1, 2)]) if copied else None)
    for sequence in (first, second):
        reference = expected_tokens(PROMPT, SAMPLED, sequence.sequence_index, 3, VOCABULARY)
        assert (decode(runner, sequence, 1) == reference) is (copied or sequence is second)


def test_followers_choose_from_the_row_of_their_leader_by_keys_of_their_own(directory: Path) -> None:
    runner = FakeRunner(directory, block_size=4, num_blocks=8)
    leader = make_sequence(PROMPT, [0, 1])
    output = advance(runner, [item(leader, 5, leader.fork(1, 1), leader.fork(2, 2))])
    references = [expected_tokens(PROMPT, SAMPLED, index, 1, VOCABULARY)[0] for index in range(3)]
    assert [(token.sequence_id, token.token_id) for token in output.sampled] == list(enumerate(references))


def test_a_kv_group_that_holds_other_tokens_is_found_out(directory: Path) -> None:
    runner = FakeRunner(directory, block_size=2, num_blocks=8, windows=(0, 3))
    sequence = make_sequence(PROMPT, [0, 1, 2], [3, 4, 5])
    advance(runner, [item(sequence, 4)])
    sequence.block_tables[1] = [NULL_BLOCK, 3, 5]
    with pytest.raises(FakeCacheError, match="other tokens in one KV group"):
        decode(runner, sequence, 1)


def test_a_block_that_left_its_window_too_early_is_found_out(directory: Path) -> None:
    runner = FakeRunner(directory, block_size=2, num_blocks=8, windows=(0, 4))
    sequence = make_sequence(PROMPT, [0, 1, 2], [3, 4, 5])
    advance(runner, [item(sequence, 4)])
    sequence.block_tables[1] = [NULL_BLOCK, NULL_BLOCK, 5]
    with pytest.raises(FakeCacheError, match="need blocks 0 to 2"):
        decode(runner, sequence, 1)


@pytest.mark.parametrize("windows", [(0,), (4, 2)])
def test_a_beam_is_offered_what_its_history_alone_decides(directory: Path, windows: tuple[int, ...]) -> None:
    runner = FakeRunner(directory, block_size=2, num_blocks=16, windows=windows)
    params = beam_sampling(width=3, stop_token_ids=[7, 8, 9])
    beam = make_sequence(PROMPT, *([4 * group + i for i in range(4)] for group in range(len(windows))), params=params)
    for generated in ([], [30], [30, 31]):
        beam.token_ids = PROMPT + generated
        (offered,) = advance(runner, [item(beam, len(beam.token_ids) - beam.num_computed)]).candidates
        expected = expected_candidates(PROMPT, generated, params, VOCABULARY, max(windows))
        assert list(zip(offered.token_ids, offered.logprobs, strict=True)) == expected
        assert len(expected) == 4 * 3
        assert len(set(offered.token_ids)) == len(expected)
        assert offered.logprobs == sorted(offered.logprobs, reverse=True)


def test_beams_are_offered_no_more_than_the_vocabulary_and_nothing_excluded() -> None:
    small = FakeVocabulary(9)

    def offered(**settings: Any) -> list[int]:
        return [token for token, _ in expected_candidates([1], [], beam_sampling(width=8, **settings), small)]

    assert sorted(offered()) == list(range(9))
    assert sorted(offered(banned_token_ids=[1, 2])) == [0, 3, 4, 5, 6, 7, 8]
    assert sorted(offered(allowed_token_ids=[1, 2], banned_token_ids=[2])) == [1]
    assert sorted(offered(min_tokens=1, stop_token_ids=[0])) == list(range(1, 9))
    assert offered(seed=4) == offered()
    assert offered(logit_bias=[(3, 2.0)]) != offered()


def test_stop_tokens_may_come_once_enough_tokens_are_generated(directory: Path) -> None:
    runner = FakeRunner(directory, block_size=4, num_blocks=8)
    second = expected_tokens(PROMPT, sampling(), 0, 2, VOCABULARY)[1]
    sequence = make_sequence(PROMPT, [0, 1], params=sampling(min_tokens=1, stop_token_ids=[second]))
    assert decode(runner, sequence, 2)[1] == second
    likeliest = expected_candidates(PROMPT, [30], beam_sampling(), VOCABULARY)[0][0]
    beam = make_sequence(PROMPT, [2, 3], params=beam_sampling(min_tokens=1, stop_token_ids=[likeliest]))
    beam.token_ids.append(30)
    (offered,) = advance(runner, [item(beam, 6)]).candidates
    assert offered.token_ids[0] == likeliest


def test_logprobs_are_the_models_own_whatever_chose_the_token(directory: Path) -> None:
    runner = FakeRunner(directory, block_size=4, num_blocks=8)
    plain = make_sequence(PROMPT, [0, 1])
    sequences = [
        make_sequence(PROMPT, [2 * i, 2 * i + 1], params=params, index=i)
        for i, params in enumerate(
            (sampling(logprobs=2), sampling(1.0, logprobs=0), sampling(logprobs=3, presence_penalty=1.0)), start=1
        )
    ]
    output = advance(runner, [item(sequence, 5) for sequence in (plain, *sequences)])
    assert output.sampled[0].logprobs is None
    for token, sequence in zip(output.sampled[1:], sequences, strict=True):
        top = sequence.sampling.logprobs or 0
        assert [token.logprobs] == expected_logprobs([*PROMPT, token.token_id], top, VOCABULARY)[4:]
    greedy = output.sampled[1].logprobs
    assert greedy is not None
    assert (greedy.rank, greedy.top_token_ids[0]) == (1, output.sampled[1].token_id)


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("chunks", [[8], [1, 1, 6], [3, 5], [5, 2, 1]])
def test_prompt_logprobs_come_chunk_by_chunk(directory: Path, chunks: list[int], window: int) -> None:
    runner = FakeRunner(directory, block_size=2, num_blocks=8, windows=(window,))
    prompt = [5, 6, 7, 8, 9, 10]
    sequence = make_sequence(prompt, [0, 1, 2, 3], params=sampling(prompt_logprobs=2))
    sequence.token_ids += [11, 12]
    reported: list[Logprobs] = []
    for chunk in chunks:
        for part in advance(runner, [item(sequence, chunk)]).prompt_logprobs:
            assert (part.sequence_id, part.start) == (0, len(reported) + 1)
            reported += part.logprobs
    assert reported == expected_logprobs(prompt, 2, VOCABULARY, window)


def test_nobody_is_told_of_a_prompt_without_asking(directory: Path) -> None:
    runner = FakeRunner(directory, block_size=4, num_blocks=8)
    assert advance(runner, [item(make_sequence(PROMPT, [0, 1]), 5)]).prompt_logprobs == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_excluded_tokens_are_never_chosen(temperature: float) -> None:
    small = FakeVocabulary(9)

    def chosen(**settings: Any) -> list[int]:
        return expected_tokens([1], sampling(temperature, **settings), 0, 60, small)

    assert set(chosen(banned_token_ids=[0, 1, 2])) <= {3, 4, 5, 6, 7, 8}
    assert set(chosen(allowed_token_ids=[3, 4, 5], banned_token_ids=[4])) <= {3, 5}
    assert 3 not in chosen(min_tokens=40, stop_token_ids=[3])[:40]
    assert chosen(min_tokens=40, stop_token_ids=[99]) == chosen()


@pytest.mark.parametrize(
    "shaping", [{"repetition_penalty": 1.2}, {"presence_penalty": 1.0}, {"logit_bias": [(3, 1.0)]}, {"top_k": 5}]
)
def test_a_lost_setting_changes_the_tokens(shaping: dict[str, Any]) -> None:
    shaped = expected_tokens(PROMPT, sampling(1.0, **shaping), 0, 20, VOCABULARY)
    assert shaped != expected_tokens(PROMPT, sampling(1.0), 0, 20, VOCABULARY)


@pytest.mark.parametrize("history", [[1, 2], [1, 2, 3, 3], [1, 3, 2], [2, 1, 3]])
def test_a_lost_repeated_or_misplaced_token_changes_all_that_follows(history: list[int]) -> None:
    right = expected_tokens([1, 2, 3], SAMPLED, 0, 20, VOCABULARY)
    wrong = expected_tokens(history, SAMPLED, 0, 20, VOCABULARY)
    assert sum(a == b for a, b in zip(right, wrong, strict=True)) <= 2


def test_a_replay_from_prompt_and_generated_tokens_goes_on_as_before(directory: Path) -> None:
    whole = expected_tokens([1, 2, 3], SAMPLED, 0, 10, VOCABULARY)
    replayed = make_sequence([1, 2, 3], [5, 4])
    replayed.token_ids += whole[:4]
    assert decode(FakeRunner(directory, block_size=16, num_blocks=8), replayed, 6) == whole


def test_sampling_knows_seed_and_index_and_greedy_knows_neither() -> None:
    def first(temperature: float, seed: int, index: int) -> list[int]:
        return expected_tokens([1, 2, 3], sampling(temperature, seed), index, 8, VOCABULARY)

    assert first(0.0, 1, 0) == first(0.0, 2, 5)
    assert len({tuple(first(0.7, seed, index)) for seed in (1, 2) for index in (0, 1)}) == 4
    assert first(0.7, 1, 0) != first(0.0, 1, 0)


def test_every_token_but_eos_is_chosen_and_eos_never() -> None:
    small = FakeVocabulary(7, (0, 3, 6))
    assert set(expected_tokens([1], SAMPLED, 0, 300, small)) == {1, 2, 4, 5}


def test_eos_comes_as_often_as_asked() -> None:
    chosen = expected_tokens([1], SAMPLED, 0, 1000, replace(VOCABULARY, eos_probability=0.2))
    assert 150 < chosen.count(END_TOKEN_ID) < 250


def test_the_vocabulary_is_that_of_the_model_directory(directory: Path) -> None:
    assert FakeVocabulary.read(directory) == VOCABULARY


def test_eos_ids_of_both_configurations_are_avoided(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 9, "eos_token_id": 2}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2, 11]}))
    assert FakeVocabulary.read(tmp_path).eos_token_ids == (2, 7)


def test_the_model_is_described_and_its_length_capped(directory: Path) -> None:
    assert FakeRunner(directory, block_size=1, num_blocks=1).model.max_model_len == 512
    assert FakeRunner(directory, block_size=1, num_blocks=1, max_model_len=2048).model.max_model_len == 512
    model = FakeRunner(directory, block_size=1, num_blocks=1, max_model_len=100).model
    assert (model.max_model_len, model.vocab_size, model.dtype) == (100, VOCAB_SIZE, "fake")


def test_memory_is_described_and_cpu_blocks_are_a_quarter_unless_told(directory: Path) -> None:
    runner = FakeRunner(directory, block_size=4, num_blocks=10, windows=(0, 8))
    assert (runner.num_blocks, runner.num_cpu_blocks, runner.kv_bytes_per_token) == (10, 2, 8)
    assert runner.kv_groups == [KVGroup(0), KVGroup(8)]
    # More than the device has are of use to the prefix cache.
    assert FakeRunner(directory, block_size=4, num_blocks=10, num_cpu_blocks=25).num_cpu_blocks == 25


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "no JSON object"),
        ("{}", "no positive vocab_size"),
        ('{"vocab_size": 5}', "no positive max_position_embeddings"),
    ],
)
def test_a_directory_that_tells_too_little_is_refused(tmp_path: Path, content: str, why: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelDirectoryError, match=why):
        FakeRunner(tmp_path, block_size=1, num_blocks=1)


def test_a_step_takes_the_time_it_is_told_to(directory: Path) -> None:
    runner = FakeRunner(directory, block_size=4, num_blocks=4, step_ms=20)
    assert runner.execute(BlockMoves(), [item(make_sequence([1, 2], [0]), 2)]).times.model_us >= 20_000
