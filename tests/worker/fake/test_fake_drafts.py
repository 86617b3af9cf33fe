"""The fake model says with drafts what it says without, and checks no more of them than it must."""

from pathlib import Path
from random import Random

import pytest

from octavo.runtime.models.grammar import load_vocabulary
from octavo.testbed.tiny_model import VOCAB_SIZE, write_byte_model
from octavo.testing.depth import every
from octavo.testing.oracles.drafted_runs import compare, compare_proposed, random_requests
from octavo.testing.oracles.worker_plans import sampling
from octavo.testing.small.constraints import DIGITS, WORDS, compiled, schema_constraint
from octavo.wire.steps import BlockMoves, FurtherTokens, SampledToken
from octavo.worker.fake.cache import FakeCacheError
from octavo.worker.fake.runner import FakeRunner, FakeVocabulary, expected_logprobs, expected_tokens
from octavo.worker.sequences import WorkerSequence, WorkItem

PROMPT = [1, 2, 3, 4, 5]
SCHEMA = schema_constraint(
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]}
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_byte_model(directory, max_model_len=512)
    return directory


@pytest.mark.parametrize("seed", every(25, range(300)))
def test_drafts_of_any_quality_change_no_answer(directory: Path, seed: int) -> None:
    random = Random(seed)
    vocabulary = load_vocabulary(directory)
    runner = FakeRunner(
        directory,
        block_size=random.randint(1, 8),
        num_blocks=1000,
        windows=random.choice([(0,), (0, 5), (5,), (3, 7)]),
        max_model_len=random.choice([60, 400]),
        eos_probability=0.05,
    )
    texts = [compiled(each, vocabulary) for each in (DIGITS, WORDS, SCHEMA)]
    asked = random_requests(random, 16, VOCAB_SIZE, longest_prompt=30, most_tokens=24, grammars=texts)
    drafted = compare(runner, asked, seed)
    assert 0 < drafted.num_accepted < drafted.num_drafted


@pytest.mark.parametrize(("num_right", "num_tokens"), [(0, 1), (1, 2), (3, 4), (4, 5)])
def test_tokens_come_as_far_as_the_draft_is_right(directory: Path, num_right: int, num_tokens: int) -> None:
    params, vocabulary = sampling(temperature=1.0, seed=3, logprobs=1), FakeVocabulary(VOCAB_SIZE, (257,))
    runner = FakeRunner(directory, block_size=4, num_blocks=8)
    expected = expected_tokens(PROMPT, params, 0, 5, vocabulary)
    draft = [token if place < num_right else (token + 1) % 250 for place, token in enumerate(expected[:4])]
    sequence = WorkerSequence(1, 0, params, len(PROMPT), list(PROMPT), 0, [[3, 0, 5]])
    output = runner.execute(BlockMoves(), [WorkItem(sequence, 0, 9, (sequence,), draft)])
    reports = expected_logprobs([*PROMPT, *expected], 1, vocabulary)[4 : 4 + num_tokens]
    assert output.sampled == [SampledToken(1, expected[0], reports[0])]
    more = [FurtherTokens(1, expected[1:num_tokens], reports[1:])]
    assert output.further == (more if num_tokens > 1 else [])


@pytest.mark.parametrize("seed", every(25, range(100)))
@pytest.mark.parametrize("hit_rate", [0.0, 0.7, 1.0])
def test_guesses_of_the_draft_model_change_no_answer(directory: Path, hit_rate: float, seed: int) -> None:
    random = Random(seed)
    vocabulary = load_vocabulary(directory)
    runner = FakeRunner(
        directory,
        block_size=random.randint(1, 8),
        num_blocks=1000,
        windows=random.choice([(0,), (0, 5), (5,), (3, 7)]),
        eos_probability=0.05,
        draft_model="draft",
        draft_hit_rate=hit_rate,
    )
    texts = [compiled(each, vocabulary) for each in (DIGITS, WORDS, SCHEMA)]
    asked = random_requests(random, 16, VOCAB_SIZE, longest_prompt=30, most_tokens=24, grammars=texts)
    drafted = compare_proposed(runner, asked, seed)
    assert (drafted.num_accepted > 0) == (hit_rate > 0)
    assert (drafted.num_wrong > 0) == (hit_rate < 1)


def test_the_draft_model_notices_what_it_has_not_computed(directory: Path) -> None:
    runner = FakeRunner(directory, block_size=4, num_blocks=8, draft_model="draft", draft_hit_rate=1.0)
    sequence = WorkerSequence(1, 0, sampling(), len(PROMPT), list(PROMPT), 4, [[3, 0, 5]])
    for table in sequence.block_tables:
        runner._cache.write(table, 0, PROMPT)
    with pytest.raises(FakeCacheError, match="the draft model has other tokens"):
        runner.execute(BlockMoves(), [WorkItem(sequence, 4, 1, (sequence,), [], 2)])
