"""Steps as a GPU runs them, against the same steps one after the other on the CPU.

Tiny random models: one with full attention, one in which layers with windows alternate with others. On a machine with a
GPU it computes; without one Triton's interpreter does.
"""

import itertools
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from octavo.testbed.models import (
    GREEDY,
    NO_MOVES,
    drop_passed_blocks,
    finish,
    fp32_runner,
    generate,
    new_sequences,
    next_item,
    run_items,
    run_step,
    write_tiny_model,
)
from octavo.testing.depth import deep
from octavo.testing.gpu_runner import gpu_runner
from octavo.wire.sampling import BeamSearch, EarlyStopping, SamplingParams
from octavo.wire.steps import BlockMove, BlockMoves, FailureReason
from octavo.worker.gpu.executor import GpuExecutor, halves
from octavo.worker.gpu.logprobs import launch_prompt_logprobs
from octavo.worker.runner import DeviceLostError, LaunchedStep, StepOutput
from octavo.worker.sequences import PENDING_TOKEN, WorkerSequence, WorkItem
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
CONFIGS = {
    "full": LlamaConfig(**SIZES),
    "windows": Qwen3Config(
        **SIZES, use_sliding_window=True, sliding_window=9, layer_types=["sliding_attention", "full_attention"]
    ),
}
PROMPTS = [list(range(50, 71)), [3, 1, 4, 1, 5, 9, 2, 6], [7]]
NUM_TOKENS = 3


BOTH = pytest.mark.parametrize("tiny", [*deep("full"), "windows"], indirect=True)


@pytest.fixture(scope="module", name="tiny")
def tiny_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With windows, unless a test names another."""
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory, CONFIGS[getattr(request, "param", "windows")])
    return directory


@pytest.fixture(name="plain")
def plain_runner(tiny: Path) -> ModelRunner:
    return fp32_runner(tiny, num_blocks=32, num_cpu_blocks=16, threads=1)


@pytest.fixture(name="runner")
def tiny_runner(tiny: Path, monkeypatch: pytest.MonkeyPatch, plain: ModelRunner) -> ModelRunner:
    runner = gpu_runner(tiny, monkeypatch, num_blocks=32, num_cpu_blocks=16)
    assert isinstance(runner.executor, GpuExecutor)
    return runner


def both(plain: ModelRunner, runner: ModelRunner, items: Any) -> tuple[StepOutput, StepOutput]:
    """What each gives of the items that `items(runner)` makes."""
    return plain.execute(NO_MOVES, items(plain)), runner.execute(NO_MOVES, items(runner))


@BOTH
def test_prompts_and_decodes_give_the_tokens_of_the_cpu(plain: ModelRunner, runner: ModelRunner) -> None:
    assert generate(runner, PROMPTS, NUM_TOKENS) == generate(plain, PROMPTS, NUM_TOKENS)


def test_chunks_beside_decodes_give_the_tokens_of_the_cpu(plain: ModelRunner, runner: ModelRunner) -> None:
    expected = generate(plain, PROMPTS, NUM_TOKENS)
    sequences = new_sequences(runner, PROMPTS, NUM_TOKENS)
    for _ in range(3):
        # The shortest first: it decodes while the others are still in their prompts.
        run_step(runner, sequences[::-1], 9)
    assert [sequence.token_ids[sequence.prompt_length :] for sequence in sequences][2] == expected[2][:3]
    assert finish(runner, sequences, NUM_TOKENS) == expected


def generated_ahead(runner: ModelRunner, sampling: SamplingParams = GREEDY) -> list[list[int]]:
    """What `generate` gives, with all steps launched before the first one is answered."""
    sequences = new_sequences(runner, PROMPTS, NUM_TOKENS, sampling)
    launched = []
    for _ in range(NUM_TOKENS):
        items = [next_item(each, len(each.token_ids) - each.num_computed) for each in sequences]
        launched.append(runner.launch(NO_MOVES, items))
        for item in items:
            item.sequence.num_computed = item.end
            item.sequence.token_ids.append(PENDING_TOKEN)
            drop_passed_blocks(runner, item.sequence)
    sampled = [[each.token_id for each in step.output().sampled] for step in launched]
    return [list(tokens) for tokens in zip(*sampled, strict=True)]


def test_the_next_step_is_launched_with_tokens_that_only_the_device_knows(
    plain: ModelRunner, runner: ModelRunner
) -> None:
    assert generated_ahead(runner) == generate(plain, PROMPTS, NUM_TOKENS)


def test_penalties_count_tokens_that_only_the_device_knows(plain: ModelRunner, runner: ModelRunner) -> None:
    """In two steps under way, of which the first has not been read."""
    penalised = SamplingParams(max_tokens=9, repetition_penalty=5.0, frequency_penalty=2.0)
    expected = generate(plain, PROMPTS, NUM_TOKENS, sampling=penalised)
    assert expected != generate(plain, PROMPTS, NUM_TOKENS)
    sequences = new_sequences(runner, PROMPTS, NUM_TOKENS, penalised)
    found: list[list[int]] = []
    launched = None
    for _ in range(NUM_TOKENS):
        items = [next_item(each, len(each.token_ids) - each.num_computed) for each in sequences]
        before, launched = launched, runner.launch(NO_MOVES, items)
        if before is not None:
            found.append(known(before, sequences))
        for each in sequences:
            each.num_computed = len(each.token_ids)
            each.token_ids.append(PENDING_TOKEN)
            drop_passed_blocks(runner, each)
    assert launched is not None
    found.append(known(launched, sequences))
    assert [list(tokens) for tokens in zip(*found, strict=True)] == expected


def known(step: LaunchedStep, sequences: list[WorkerSequence]) -> list[int]:
    """What a step has sampled, which stands where it was pending from now on."""
    tokens = [each.token_id for each in step.output().sampled]
    for sequence, token in zip(sequences, tokens, strict=True):
        sequence.token_ids[-1] = token
    return tokens


def test_a_step_that_runs_out_of_memory_late_reads_the_same_tokens_again(
    plain: ModelRunner, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = itertools.count()

    def scarce(*arguments: Any) -> Any:
        # Each step fails once; then it is computed in two.
        if next(calls) % 3 == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return launch_prompt_logprobs(*arguments)

    monkeypatch.setattr("octavo.worker.gpu.executor.launch_prompt_logprobs", scarce)
    assert generated_ahead(runner) == generate(plain, PROMPTS, NUM_TOKENS)
    assert next(calls) == 3 * NUM_TOKENS


def test_swapped_blocks_come_back(plain: ModelRunner, runner: ModelRunner) -> None:
    expected = generate(plain, PROMPTS[:2], NUM_TOKENS)
    first, second = new_sequences(runner, PROMPTS[:2], NUM_TOKENS)
    run_step(runner, [first, second], 2048)
    held = [block for table in first.block_tables for block in table if block >= 0]
    out = {block: place for place, block in enumerate(held)}
    run_items(runner, [next_item(second, 1)], moves(swap_out=out))
    with torch.inference_mode():
        runner._kv_cache.clear(torch.tensor(held, device=runner._device))
    free = sorted(set(range(runner.num_blocks)) - {b for s in (first, second) for t in s.block_tables for b in t})
    back = {place: free[place] for place in out.values()}
    first.block_tables = [
        [back[out[block]] if block >= 0 else block for block in table] for table in first.block_tables
    ]
    runner.forget([first.sequence_id])
    run_items(runner, [next_item(first, 1), next_item(second, 1)], moves(swap_in=back))
    assert finish(runner, [first, second], NUM_TOKENS) == expected


def moves(**pairs: dict[int, int]) -> BlockMoves:
    """Moves by their kind, `swap_out`, `swap_in` or `copy`: targets by their sources."""
    return BlockMoves(**{kind: [BlockMove(*pair) for pair in some.items()] for kind, some in pairs.items()})


def test_layers_that_lie_apart_give_the_same_tokens_and_come_back_from_a_swap(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, plain: ModelRunner
) -> None:
    expected = generate(plain, PROMPTS[:2], NUM_TOKENS)
    runner = gpu_runner(tiny, monkeypatch, num_blocks=32, num_cpu_blocks=16, kv_layout=1)
    sequences = new_sequences(runner, PROMPTS[:2], NUM_TOKENS)
    run_step(runner, sequences, 2048)
    held = [block for each in sequences for table in each.block_tables for block in table if block >= 0]
    places = {block: place for place, block in enumerate(held)}
    run_items(runner, [], moves(swap_out=places, copy={held[0]: 31}))
    with torch.inference_mode():
        runner._kv_cache.clear(torch.tensor(held, device=runner._device))
    run_items(runner, [], moves(swap_in={place: block for block, place in places.items()}))
    for layer in runner._kv_cache.layers:
        assert torch.equal(layer.keys[held[0]], layer.keys[31])
    assert finish(runner, sequences, NUM_TOKENS) == expected


def test_a_step_of_moves_alone_moves_and_answers_nothing(runner: ModelRunner) -> None:
    output = runner.execute(moves(swap_out={3: 1, 4: 0}), [])
    assert (output.sampled, output.candidates, output.prompt_logprobs, output.failed) == ([], [], [], [])


SETTINGS = {
    "drawn": {"temperature": 0.9, "seed": 5},
    "cut": {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "seed": 6},
    "logprobs": {"logprobs": 3},
    "penalised": {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "logit_bias": [(17, 4.0)]},
    "prompt": {"prompt_logprobs": 2},
    "beam": {"beam": BeamSearch(3, 1.0, EarlyStopping.OFF), "stop_token_ids": [7]},
}


def test_every_way_to_choose_in_one_batch(plain: ModelRunner, runner: ModelRunner) -> None:
    def items(each: ModelRunner) -> list[WorkItem]:
        sequences = new_sequences(each, [[*PROMPTS[1], number] for number in range(len(SETTINGS))], 2)
        for sequence, settings in zip(sequences, SETTINGS.values(), strict=True):
            sequence.sampling = SamplingParams(max_tokens=9, **settings)  # type: ignore[arg-type]
        return [next_item(sequence, len(sequence.token_ids)) for sequence in sequences]

    expected, found = both(plain, runner, items)
    assert [(each.sequence_id, each.token_id) for each in found.sampled] == [
        (each.sequence_id, each.token_id) for each in expected.sampled
    ]
    [ours], [theirs] = ([each.logprobs for each in output.sampled if each.logprobs] for output in (found, expected))
    assert (ours.rank, ours.top_token_ids) == (theirs.rank, theirs.top_token_ids)
    assert [ours.logprob, *ours.top_logprobs] == pytest.approx([theirs.logprob, *theirs.top_logprobs], abs=1e-4)
    assert found.candidates[0].token_ids == expected.candidates[0].token_ids
    assert found.candidates[0].logprobs == pytest.approx(expected.candidates[0].logprobs, abs=1e-4)
    [ours_prompt], [theirs_prompt] = found.prompt_logprobs, expected.prompt_logprobs
    assert ours_prompt.start == theirs_prompt.start
    assert [each.top_token_ids for each in ours_prompt.logprobs] == [e.top_token_ids for e in theirs_prompt.logprobs]


def test_followers_choose_from_their_leaders_row_by_their_own_keys(plain: ModelRunner, runner: ModelRunner) -> None:
    def items(each: ModelRunner) -> list[WorkItem]:
        leader, other = new_sequences(each, PROMPTS[:2], 2, SamplingParams(temperature=1.0, seed=5, max_tokens=9))
        return [next_item(leader, len(leader.token_ids), leader.fork(100, 1), leader.fork(101, 2)), next_item(other, 3)]

    expected, found = both(plain, runner, items)
    assert found.sampled == expected.sampled
    assert len({token.token_id for token in found.sampled}) > 1


def test_answers_come_in_the_order_of_the_items(plain: ModelRunner, runner: ModelRunner) -> None:
    def items(each: ModelRunner) -> list[WorkItem]:
        sequences = new_sequences(each, [PROMPTS[1], PROMPTS[2], PROMPTS[0], [9]], 2)
        return [next_item(sequence, len(sequence.token_ids)) for sequence in sequences]

    expected, found = both(plain, runner, items)
    assert found.sampled == expected.sampled
    assert [each.sequence_id for each in found.sampled] == [0, 1, 2, 3]


# Of the interpreter, which takes the largest of nothing but NaNs.
@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("chooses", [True, False])
def test_a_sequence_that_sees_a_nan_fails_alone(runner: ModelRunner, plain: ModelRunner, chooses: bool) -> None:
    expected = generate(plain, PROMPTS[1:2], 2)
    broken, good = new_sequences(runner, [PROMPTS[0], PROMPTS[1]], 2)
    run_items(runner, [WorkItem(broken, 0, 8, ())])
    broken.num_computed = 8
    for layer in runner._kv_cache.layers:
        with torch.inference_mode():
            layer.values[[block for block in broken.block_tables[layer.group] if block >= 0]] = torch.nan
    count = len(broken.token_ids) - 8 if chooses else 1
    output = runner.execute(NO_MOVES, [next_item(broken, count), next_item(good, len(good.token_ids))])
    assert [(each.sequence_id, each.reason) for each in output.failed] == [(0, FailureReason.NOT_FINITE)]
    assert [(each.sequence_id, each.token_id) for each in output.sampled] == [(1, expected[0][0])]


def test_a_step_without_memory_is_computed_in_parts(
    plain: ModelRunner, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = generate(plain, PROMPTS, NUM_TOKENS)
    forward = runner._model.forward
    taken: list[weakref.ref[torch.Tensor]] = []

    def scarce(step: Any) -> torch.Tensor:
        assert not any(each() is not None for each in taken), "what a larger step took is held"
        if len(step.input_ids) > 7:
            hidden = torch.zeros(len(step.input_ids))
            taken.append(weakref.ref(hidden))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(step)

    monkeypatch.setattr(runner._model, "forward", scarce)
    assert generate(runner, PROMPTS, NUM_TOKENS) == expected
    assert "no memory for 30 tokens in one go" in caplog.text


def test_a_token_that_finds_no_memory_fails_its_step_and_the_next_one_is_computed(
    plain: ModelRunner, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequences = new_sequences(runner, PROMPTS[1:], 2)
    items = [next_item(each, len(each.token_ids)) for each in sequences]

    def exhausted(step: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(runner._model, "forward", exhausted)
        with pytest.raises(torch.OutOfMemoryError):
            runner.launch(NO_MOVES, items)
    assert [[each.token_id] for each in runner.execute(NO_MOVES, items).sampled] == generate(plain, PROMPTS[1:], 1)


@pytest.mark.parametrize("said_by", ["CUDA error", "Triton Error [CUDA]"])
def test_a_device_that_is_lost_ends_the_worker(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, said_by: str
) -> None:
    def lost(step: Any) -> torch.Tensor:
        raise RuntimeError(f"{said_by}: an illegal memory access was encountered")

    [sequence] = new_sequences(runner, PROMPTS[2:], 2)
    monkeypatch.setattr(runner._model, "forward", lost)
    with pytest.raises(DeviceLostError, match="illegal memory access"):
        runner.launch(NO_MOVES, [next_item(sequence, 1)])


def sequence_of(sequence_id: int) -> WorkerSequence:
    return WorkerSequence(sequence_id, 0, SamplingParams(max_tokens=1), 9, list(range(9)), 0, [[0]])


def test_halves_of_a_single_item_choose_once() -> None:
    one = sequence_of(1)
    [first], [second] = halves([WorkItem(one, 2, 7, (one,))])
    assert (first.start, first.num_tokens, first.choosers) == (2, 3, ())
    assert (second.start, second.num_tokens, second.choosers) == (5, 4, (one,))


def test_halves_of_many_keep_their_order() -> None:
    items = [WorkItem(sequence_of(each), 0, 1, ()) for each in range(5)]
    first, second = halves(items)
    assert [*first, *second] == items
    assert first
    assert second


def test_a_batch_larger_than_any_graph_is_computed_all_the_same(plain: ModelRunner, runner: ModelRunner) -> None:
    prompts = [[number] for number in range(10, 19)]
    assert generate(runner, prompts, 2) == generate(plain, prompts, 2)


def test_what_a_forgotten_sequence_had_serves_the_next(plain: ModelRunner, runner: ModelRunner) -> None:
    for prompt in PROMPTS[:2]:
        assert generate(runner, [prompt], 2) == generate(plain, [prompt], 2)
        runner.forget([0])


def test_warming_up_changes_no_answer(plain: ModelRunner, runner: ModelRunner) -> None:
    assert isinstance(runner.executor, GpuExecutor)
    runner.executor._warm_up(2)
    assert generate(runner, PROMPTS[1:], 2) == generate(plain, PROMPTS[1:], 2)
