"""NaN in one sequence of a real model: it fails, its neighbours choose what they choose without it.

Tiny random models, one with full attention and one in which layers with windows alternate with others, that make NaN
of one token.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from octavo.testbed.models import (
    GREEDY,
    NO_MOVES,
    fp32_runner,
    generate,
    new_sequences,
    next_item,
    run_step,
    write_tiny_model,
)
from octavo.wire.sampling import BeamSearch, EarlyStopping, SamplingParams
from octavo.wire.steps import FailureReason
from octavo.worker.runner import StepOutput
from octavo.worker.sequences import WorkerSequence
from octavo.worker.step.model_runner import ModelRunner

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
CONFIGS = {
    "full": LlamaConfig(**SIZES),
    "windows": Qwen3Config(
        **SIZES,
        use_sliding_window=True,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
}
BLOCK_SIZE = 4
BROKEN_TOKEN = 299
PROMPTS = [list(range(50, 80)), [3, 1, 4, 1, 5, 9, 2, 6], [7]]
BROKEN_PROMPT = [11, 12, BROKEN_TOKEN, *range(20, 31)]


@pytest.fixture(scope="module", params=CONFIGS, name="directory")
def broken_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory, CONFIGS[request.param])
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight[BROKEN_TOKEN] = torch.nan
    model.save_pretrained(directory)
    return directory


@pytest.fixture(name="runner")
def broken_runner(directory: Path) -> ModelRunner:
    return fp32_runner(directory, block_size=BLOCK_SIZE, num_blocks=128, threads=1)


def run(runner: ModelRunner, *sequences: WorkerSequence, num_tokens: int | None = None) -> StepOutput:
    """One step over all that is known of each, or its next `num_tokens`; nothing is recorded."""
    items = [next_item(each, num_tokens or len(each.token_ids) - each.num_computed) for each in sequences]
    return runner.execute(NO_MOVES, items)


def failed(output: StepOutput) -> list[tuple[int, FailureReason]]:
    return [(failure.sequence_id, failure.reason) for failure in output.failed]


def test_a_token_that_makes_nan_fails_its_sequence_and_no_other(runner: ModelRunner) -> None:
    expected = generate(runner, PROMPTS, 1)
    first, broken, *others = new_sequences(runner, [PROMPTS[0], BROKEN_PROMPT, *PROMPTS[1:]], 12)
    output = run(runner, first, broken, *others)
    assert failed(output) == [(broken.sequence_id, FailureReason.NOT_FINITE)]
    assert [[token.token_id] for token in output.sampled] == expected
    assert [token.sequence_id for token in output.sampled] == [each.sequence_id for each in (first, *others)]


def test_nan_in_the_cache_of_a_running_sequence_fails_it_and_no_other(runner: ModelRunner) -> None:
    expected = generate(runner, PROMPTS, 4)
    sequences = new_sequences(runner, PROMPTS, 12)
    for _ in range(3):
        run_step(runner, sequences, 2048)
    broken = sequences[1]
    with torch.inference_mode():
        for layer in runner._kv_cache.layers:
            layer.values[broken.block_tables[layer.group][2]] = torch.nan
    output = run(runner, *sequences)
    assert failed(output) == [(broken.sequence_id, FailureReason.NOT_FINITE)]
    assert [token.token_id for token in output.sampled] == [expected[0][3], expected[2][3]]


def test_a_prompt_is_found_broken_before_its_last_token(runner: ModelRunner) -> None:
    broken, good = new_sequences(runner, [BROKEN_PROMPT, PROMPTS[0]], 12)
    assert failed(run(runner, broken, good, num_tokens=2)) == []
    output = run(runner, broken, good, num_tokens=5)
    assert (failed(output), output.sampled) == ([(broken.sequence_id, FailureReason.NOT_FINITE)], [])


def test_a_prompt_whose_logprobs_are_not_finite_fails_with_nothing_told_of_it(runner: ModelRunner) -> None:
    wanting = SamplingParams(max_tokens=64, prompt_logprobs=2)
    expected = run(runner, *new_sequences(runner, PROMPTS[:2], 1, wanting))
    broken, *others = new_sequences(runner, [BROKEN_PROMPT, *PROMPTS[:2]], 1, wanting)
    output = run(runner, broken, *others)
    assert failed(output) == [(broken.sequence_id, FailureReason.NOT_FINITE)]
    assert [part.logprobs for part in output.prompt_logprobs] == [part.logprobs for part in expected.prompt_logprobs]
    assert [token.token_id for token in output.sampled] == [token.token_id for token in expected.sampled]


def test_beams_fail_as_samples_do(runner: ModelRunner) -> None:
    search = SamplingParams(max_tokens=64, beam=BeamSearch(2, 1.0, EarlyStopping.ON))
    broken, good = new_sequences(runner, [BROKEN_PROMPT, PROMPTS[1]], 1, search)
    output = run(runner, broken, good)
    assert failed(output) == [(broken.sequence_id, FailureReason.NOT_FINITE)]
    assert [each.sequence_id for each in output.candidates] == [good.sequence_id]


def test_a_sequence_that_excludes_every_token_fails_and_no_other(runner: ModelRunner) -> None:
    expected = generate(runner, PROMPTS[:1], 1)
    stuck = SamplingParams(max_tokens=64, allowed_token_ids=[5], banned_token_ids=[5])
    sequences = new_sequences(runner, [PROMPTS[1], PROMPTS[0]], 1)
    sequences[0].sampling = stuck
    output = run(runner, *sequences)
    assert failed(output) == [(sequences[0].sequence_id, FailureReason.NO_TOKEN_LEFT)]
    assert [[token.token_id] for token in output.sampled] == expected


def test_the_next_owner_of_blocks_that_hold_nan_is_not_harmed(runner: ModelRunner) -> None:
    expected = generate(runner, [PROMPTS[0][:14]], 8)
    # The same blocks in the same order, for the fixture shuffles alike.
    [broken] = new_sequences(runner, [BROKEN_PROMPT], 8)
    assert failed(run(runner, broken)) == [(broken.sequence_id, FailureReason.NOT_FINITE)]
    [heir] = new_sequences(runner, [PROMPTS[0][:14]], 8)
    assert heir.block_tables == broken.block_tables
    assert generate(runner, [PROMPTS[0][:14]], 8, sampling=GREEDY) == expected
