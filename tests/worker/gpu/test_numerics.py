"""`--numerics exact` as a GPU computes it: what a sequence gets does not depend on how its tokens came into steps."""

from pathlib import Path

import pytest
from transformers import Qwen3Config

from octavo.testbed.models import new_sequences, run_step, write_tiny_model
from octavo.testing.gpu_runner import gpu_runner
from octavo.wire.sampling import Logprobs, SamplingParams
from octavo.worker.models.fused import FusedLlama
from octavo.worker.sequences import WorkerSequence
from octavo.worker.step.model_runner import ModelRunner

CONFIG = Qwen3Config(
    vocab_size=150,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    use_sliding_window=True,
    sliding_window=9,
    layer_types=["sliding_attention", "full_attention"],
)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8]
OTHERS = [[7], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8]]
SAMPLING = SamplingParams(temperature=1.0, seed=4, logprobs=2, max_tokens=9)
NUM_TOKENS = 2

# What a sequence chose, with the bits of its logprobs.
Choices = list[tuple[int, Logprobs | None]]


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    write_tiny_model(tmp_path, CONFIG)
    runner = gpu_runner(tmp_path, monkeypatch, numerics="exact")
    assert isinstance(runner.decoder, FusedLlama)
    return runner


def run(runner: ModelRunner, sequences: list[WorkerSequence], *budgets: int) -> Choices:
    """What the first of `sequences` gets from steps of these budgets, and further ones until it has `NUM_TOKENS`."""
    wanted, chosen = sequences[0], []
    pending = list(budgets)
    while wanted.num_generated < NUM_TOKENS:
        output = run_step(runner, sequences, pending.pop(0) if pending else 2048)
        chosen += [(e.token_id, e.logprobs) for e in output.sampled if e.sequence_id == wanted.sequence_id]
    runner.forget(sequence.sequence_id for sequence in sequences)
    return chosen


def test_chunks_batches_and_recomputation_change_no_bit(runner: ModelRunner) -> None:
    alone = run(runner, new_sequences(runner, [PROMPT], 4, SAMPLING))
    assert len(alone) == NUM_TOKENS
    assert run(runner, new_sequences(runner, [PROMPT], 4, SAMPLING), 5, 1, 9) == alone
    assert run(runner, new_sequences(runner, [PROMPT, *OTHERS], 4, SAMPLING), 7, 4) == alone

    [resumed] = new_sequences(runner, [[*PROMPT, alone[0][0]]], 4, SAMPLING)
    resumed.prompt_length = len(PROMPT)
    assert run(runner, [resumed]) == alone[1:]


@pytest.mark.deep
def test_a_batch_of_whole_prompts_changes_no_bit(runner: ModelRunner) -> None:
    alone = run(runner, new_sequences(runner, [PROMPT], 4, SAMPLING))
    assert run(runner, new_sequences(runner, [PROMPT, *OTHERS], 4, SAMPLING)) == alone
