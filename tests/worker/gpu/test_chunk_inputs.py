"""Steps with chunks of prompts over buffers that stay where they are, against the same steps one after the other on
the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from octavo.testbed.models import fp32_runner, generate, new_sequences, next_item, run_step, write_tiny_model
from octavo.testing.gpu_runner import gpu_runner
from octavo.worker.gpu.chunk_inputs import MOST_CHUNKS, ChunkInputs
from octavo.worker.gpu.executor import GpuExecutor
from octavo.worker.gpu.inputs import SequenceRows
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
PROMPTS = [list(range(50, 71)), [3, 1, 4, 1, 5, 9, 2, 6], [7]]


def replayed(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the steps with chunks that a captured graph would have computed, from now on."""
    assert isinstance(runner.executor, GpuExecutor)
    graphs, sizes = runner.executor._chunk_graphs, list[int]()
    replay = graphs.replay

    def noted(size: int) -> Any:
        sizes.append(size)
        return replay(size)

    monkeypatch.setattr(graphs, "replay", noted)
    return sizes


@pytest.mark.parametrize(
    ("config", "numerics"),
    [
        pytest.param(WINDOWS, "fast", id="windows"),
        pytest.param(LlamaConfig(**SIZES), "exact", id="exact", marks=pytest.mark.deep),
    ],
)
def test_chunks_beside_decodes_give_the_tokens_of_the_cpu(
    config: Any, numerics: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_model(tmp_path, config)
    plain = fp32_runner(tmp_path, num_blocks=32, threads=1)
    expected = generate(plain, PROMPTS, 3)
    runner = gpu_runner(tmp_path, monkeypatch, num_blocks=32, graph_tokens=40, numerics=numerics)
    sizes = replayed(runner, monkeypatch)
    sequences = new_sequences(runner, PROMPTS, 3)
    while any(each.num_generated < 3 for each in sequences):
        # The shortest first: it decodes while the others are still in their prompts.
        run_step(runner, [each for each in sequences[::-1] if each.num_generated < 3], 12)
    assert [each.token_ids[each.prompt_length :] for each in sequences] == expected
    assert len(sizes) >= 2
    assert set(sizes) == {32}


def test_steps_that_have_no_place_are_launched_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_model(tmp_path, WINDOWS)
    plain = fp32_runner(tmp_path, num_blocks=32, threads=1)
    runner = gpu_runner(tmp_path, monkeypatch, num_blocks=32, graph_tokens=25)
    sizes = replayed(runner, monkeypatch)
    assert generate(runner, PROMPTS, 2) == generate(plain, PROMPTS, 2)
    # 30 tokens are too many.
    assert sizes == []


def test_there_are_places_for_a_few_chunks(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, WINDOWS)
    runner = fp32_runner(tmp_path, num_blocks=64, threads=1)
    sequences = new_sequences(runner, [[1, 2]] * (MOST_CHUNKS + 1) + [[1]] * 3, 0)
    paging = runner.paged_model._paging
    rows = SequenceRows(len(paging.groups), 8, torch.device("cpu"), 40)
    inputs = ChunkInputs(paging, [], rows, 2, 64)
    items = [next_item(each, each.prompt_length) for each in sequences]
    assert inputs.fits(items[1 : MOST_CHUNKS + 1] + items[-2:])
    assert not inputs.fits(items[: MOST_CHUNKS + 1])
    assert not inputs.fits(items[-3:])
