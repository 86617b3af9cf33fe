"""The fake model gives the tokens of its reference exactly as long as the cache is managed rightly."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.testing.tiny_model import END_TOKEN_ID, VOCAB_SIZE, write_byte_model
from octavo.testing.worker_plans import sampling
from octavo.wire.model_directory import ModelDirectoryError
from octavo.wire.sampling import SamplingParams
from octavo.worker.fake_runner import FakeRunner, FakeVocabulary, expected_tokens
from octavo.worker.sequences import WorkerSequence, WorkItem

# Enough for four sequences of 55 tokens at one token per block.
NUM_BLOCKS = 220
VOCABULARY = FakeVocabulary(VOCAB_SIZE, (END_TOKEN_ID,))
SAMPLED = sampling(temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_byte_model(directory, max_model_len=512)
    return directory


def make_sequence(prompt: list[int], params: SamplingParams = SAMPLED, index: int = 0) -> WorkerSequence:
    return WorkerSequence(1, index, params, len(prompt), list(prompt), 0, [])


def item(sequence: WorkerSequence, num_tokens: int) -> WorkItem:
    end = sequence.num_computed + num_tokens
    return WorkItem(sequence, sequence.num_computed, num_tokens, end == len(sequence.token_ids))


def advance(runner: FakeRunner, items: list[WorkItem]) -> None:
    """One step: computes the items and appends what they sample, as the worker's table does."""
    sampled = iter(runner.execute(items).sampled)
    for done in items:
        done.sequence.num_computed += done.num_tokens
        if done.samples:
            done.sequence.token_ids.append(next(sampled))


def decode(runner: FakeRunner, sequence: WorkerSequence, count: int) -> list[int]:
    for _ in range(count):
        advance(runner, [item(sequence, len(sequence.token_ids) - sequence.num_computed)])
    return sequence.token_ids[sequence.prompt_length :]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 9), st.integers(1, 4))
def test_any_block_table_and_any_chunks_give_the_reference_tokens(
    directory: Path, seed: int, block_size: int, num_sequences: int
) -> None:
    chance = random.Random(seed)
    runner = FakeRunner(directory, block_size=block_size, num_blocks=NUM_BLOCKS)
    free = list(range(NUM_BLOCKS))
    chance.shuffle(free)
    live = [
        make_sequence(chance.choices(range(VOCAB_SIZE), k=chance.randint(1, 30)), sampling(i % 2, seed=i), i)
        for i in range(num_sequences)
    ]
    for _ in range(25):
        chosen = chance.sample(live, chance.randint(1, num_sequences))
        items = [item(s, chance.randint(1, len(s.token_ids) - s.num_computed)) for s in chosen]
        for share in items:
            while len(share.sequence.block_ids) * block_size < share.start + share.num_tokens:
                share.sequence.block_ids.append(free.pop())
        advance(runner, items)
    for s in live:
        prompt = s.token_ids[: s.prompt_length]
        reference = expected_tokens(prompt, s.sampling, s.sequence_index, s.num_generated, VOCABULARY)
        assert s.token_ids[s.prompt_length :] == reference


def test_tokens_are_read_back_from_the_cache_and_not_from_the_sequence(directory: Path) -> None:
    runner = FakeRunner(directory, block_size=2, num_blocks=8)
    sequence, thief = make_sequence([1, 2, 3, 4]), make_sequence([9])
    sequence.block_ids, thief.block_ids = [0, 1, 2], [1]
    advance(runner, [item(sequence, 3)])
    advance(runner, [item(thief, 1)])
    assert decode(runner, sequence, 1) != expected_tokens([1, 2, 3, 4], SAMPLED, 0, 1, VOCABULARY)


@pytest.mark.parametrize("table", [[1, 0, 2], [0, 3, 2]], ids=["swapped", "replaced"])
def test_a_wrong_block_table_changes_the_tokens(directory: Path, table: list[int]) -> None:
    runner = FakeRunner(directory, block_size=2, num_blocks=8)
    sequence = make_sequence([1, 2, 3, 4, 5])
    sequence.block_ids = [0, 1, 2]
    advance(runner, [item(sequence, 4)])
    sequence.block_ids = table
    assert decode(runner, sequence, 1) != expected_tokens([1, 2, 3, 4, 5], SAMPLED, 0, 1, VOCABULARY)


@pytest.mark.parametrize("history", [[1, 2], [1, 2, 3, 3], [1, 3, 2], [2, 1, 3]])
def test_a_lost_repeated_or_misplaced_token_changes_all_that_follows(history: list[int]) -> None:
    right = expected_tokens([1, 2, 3], SAMPLED, 0, 20, VOCABULARY)
    wrong = expected_tokens(history, SAMPLED, 0, 20, VOCABULARY)
    assert sum(a == b for a, b in zip(right, wrong, strict=True)) <= 2


def test_a_replay_from_prompt_and_generated_tokens_goes_on_as_before(directory: Path) -> None:
    whole = expected_tokens([1, 2, 3], SAMPLED, 0, 10, VOCABULARY)
    replayed = make_sequence([1, 2, 3])
    replayed.token_ids += whole[:4]
    replayed.block_ids = [5, 4]
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
    sequence = make_sequence([1, 2])
    sequence.block_ids = [0]
    assert runner.execute([item(sequence, 2)]).times.model_us >= 20_000
