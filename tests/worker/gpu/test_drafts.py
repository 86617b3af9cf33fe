"""Drafts on a GPU: with them it says what the CPU says without."""

import itertools
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from octavo.testbed.models import NO_MOVES, fp32_runner, new_sequences, write_tiny_model
from octavo.testing.depth import deep
from octavo.testing.gpu_runner import gpu_runner
from octavo.testing.oracles.drafted_runs import Answer, Asked, DraftedRun, Place, any_draft
from octavo.testing.oracles.worker_plans import plan, start, work
from octavo.wire.sampling import SamplingParams
from octavo.worker.gpu.executor import GpuExecutor
from octavo.worker.gpu.logprobs import launch_prompt_logprobs
from octavo.worker.sequence_table import SequenceTable
from octavo.worker.sequences import WorkItem
from octavo.worker.step.model_runner import ModelRunner

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
WINDOWS = Qwen3Config(
    **SIZES, use_sliding_window=True, sliding_window=9, layer_types=["sliding_attention", "full_attention"]
)
# Never chosen in these tests; its keys and values are not finite.
POISON = 299


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory, WINDOWS)
    return directory


@pytest.fixture
def plain(directory: Path) -> ModelRunner:
    return fp32_runner(directory, num_blocks=64, threads=1)


@pytest.fixture
def runner(directory: Path, monkeypatch: pytest.MonkeyPatch, plain: ModelRunner) -> ModelRunner:
    return on_gpu(directory, monkeypatch)


def on_gpu(directory: Path, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    runner = gpu_runner(directory, monkeypatch, num_blocks=64)
    assert isinstance(runner.executor, GpuExecutor)
    return runner


def sampling(**params: Any) -> SamplingParams:
    usual: dict[str, Any] = {"max_tokens": 5, "banned_token_ids": [POISON]}
    return SamplingParams(**usual | params)


ASKED = [
    Asked([3, 1, 4, 1, 5, 9, 2, 6], sampling(logprobs=2, prompt_logprobs=1)),
    Asked([7], sampling(temperature=0.8, seed=4, top_p=0.9, logprobs=1)),
    Asked(list(range(50, 71)), sampling(temperature=1.0, seed=5, repetition_penalty=1.3, frequency_penalty=0.4)),
    Asked([8, 8, 9], sampling(temperature=1.2, seed=6, top_k=9, stop_token_ids=list(range(60)), min_tokens=3)),
]
MORE = [
    Asked([*each.prompt, number], msgspec.structs.replace(each.params, seed=number, max_tokens=16), 1 + number % 2)
    for number in range(3)
    for each in ASKED
]


def assert_alike(found: dict[Place, Answer], expected: dict[Place, Answer]) -> None:
    """The same tokens, and logprobs as near as two devices compute them."""
    assert found.keys() == expected.keys()
    for place, answer in found.items():
        other = expected[place]
        assert (answer.token_ids, answer.failure) == (other.token_ids, other.failure)
        for one, two in ((answer.logprobs, other.logprobs), (answer.prompt_logprobs, other.prompt_logprobs)):
            assert [each.logprob for each in one] == pytest.approx([each.logprob for each in two], abs=1e-3)


@pytest.mark.parametrize("asked", [ASKED, *deep(MORE)], ids=["few", "many"])
def test_a_gpu_says_with_drafts_what_the_cpu_says_without(
    plain: ModelRunner, runner: ModelRunner, asked: list[Asked]
) -> None:
    expected = DraftedRun(plain, asked, Random(0)).run()
    random = Random(1)
    drafted = DraftedRun(runner, asked, random, any_draft(expected, random, POISON))
    assert_alike(drafted.run(), expected)
    assert 0 < drafted.num_accepted < drafted.num_drafted


def test_short_drafts_are_computed_as_further_decodes_of_a_captured_step(
    plain: ModelRunner, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one sequence and of two; what is longer, or does not fit, is computed as other steps are."""
    params = sampling(max_tokens=40, logprobs=1)
    asked = [Asked([3, 1, 4, 1, 5], params), Asked([2, 7], params)]
    right = {place: answer.token_ids for place, answer in DraftedRun(plain, asked, Random(0)).run().items()}
    assert isinstance(runner.executor, GpuExecutor)
    graphs, sizes = runner.executor._graphs, list[int]()
    replay = graphs.replay

    def counted(size: int) -> Any:
        sizes.append(size)
        return replay(size)

    monkeypatch.setattr(graphs, "replay", counted)
    sequences = new_sequences(runner, [each.prompt for each in asked], 40, params)
    told: list[list[int]] = [[], []]

    def step(*lengths: int) -> list[int]:
        """Checks so many guesses of each, of which the last is wrong; returns the sizes that were replayed."""
        sizes.clear()
        items = []
        for number, (sequence, length) in enumerate(zip(sequences, lengths, strict=False)):
            start, said = sequence.num_computed, len(told[number])
            draft = [*right[number, 0][said : said + length - 1], 7][: length and length]
            known = len(sequence.token_ids) - start
            items.append(WorkItem(sequence, start, known + len(draft), (sequence,), draft))
        output = runner.execute(NO_MOVES, items)
        further = {each.sequence_id: each.token_ids for each in output.further}
        for number, sampled in enumerate(output.sampled):
            sequence = sequences[number]
            sequence.num_computed = len(sequence.token_ids) + len(further.get(sequence.sequence_id, []))
            chosen = [sampled.token_id, *further.get(sequence.sequence_id, [])]
            sequence.token_ids += chosen
            told[number] += chosen
        return list(sizes)

    assert step(0, 0) == []
    assert step(3, 2) == [8]
    assert step(4, 5) == []
    assert step(8) == []
    assert step(7) == [8]
    assert told == [right[0, 0][: len(told[0])], right[1, 0][: len(told[1])]]
    assert len(told[0]) > 20


def test_what_was_sent_of_a_block_table_is_sent_anew_where_a_draft_has_left_it(
    plain: ModelRunner, runner: ModelRunner
) -> None:
    """A wrong draft takes two blocks and gives them back; a right one then writes over others at the same places."""
    prompt, params = list(range(14)), sampling(max_tokens=24)
    right = DraftedRun(plain, [Asked(prompt, params)], Random(0)).run()[0, 0].token_ids
    table = SequenceTable(
        vocab_size=300,
        max_model_len=128,
        num_blocks=64,
        num_cpu_blocks=0,
        block_size=16,
        kv_groups=runner.kv_groups,
        on_forget=runner.forget,
    )
    wrong = [(token + 1) % POISON for token in right[:20]]
    told: list[int] = []
    for step in (
        plan(starts=[start(1, prompt, params=params)], work=[work(1, 14, [5, 9, 3], [6, 8, 4])], drafts={1: wrong}),
        plan(work=[work(1, 1, [7, 2], [1, 10])], drafts={1: right[1:20]}),
    ):
        items = table.apply(step)
        launched = runner.launch(step.moves, items)
        table.begin(items)
        table.complete(items, output := launched.output())
        told += [output.sampled[0].token_id, *(token for more in output.further for token in more.token_ids)]
    assert told == right[:21]


def test_a_step_that_finds_no_memory_leaves_its_guesses_out(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [Asked([3, 1, 4], sampling())]
    right = DraftedRun(runner, asked, Random(0)).run()[0, 0].token_ids
    calls = itertools.count()

    def scarce(*arguments: Any) -> Any:
        if next(calls) == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return launch_prompt_logprobs(*arguments)

    monkeypatch.setattr("octavo.worker.gpu.executor.launch_prompt_logprobs", scarce)
    [sequence] = new_sequences(runner, [asked[0].prompt], 9, asked[0].params)
    output = runner.execute(NO_MOVES, [WorkItem(sequence, 0, 6, (sequence,), right[:3])])
    assert ([token.token_id for token in output.sampled], output.further) == (right[:1], [])
    # Not in halves: that would be one more.
    assert next(calls) == 2


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_a_guess_that_overflows_changes_nothing(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    runner = on_gpu(tmp_path, monkeypatch)
    asked = [Asked([3, 1, 4], sampling(logprobs=1)), Asked([7, 7], sampling(temperature=1.0, seed=3))]
    expected = DraftedRun(runner, asked, Random(0)).run()

    def with_poison(place: Place, told: list[int]) -> list[int]:
        return [*expected[place].token_ids[len(told) : len(told) + 2], POISON, 5]

    assert_alike(DraftedRun(runner, asked, Random(1), with_poison).run(), expected)
