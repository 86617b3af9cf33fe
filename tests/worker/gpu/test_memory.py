"""What the profiling run computes, and what it makes of what it sees."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from octavo.testbed.models import write_tiny_model
from octavo.testing.gpu_runner import gpu_runner
from octavo.worker.gpu import memory
from octavo.worker.gpu.chunk_inputs import MOST_CHUNKS
from octavo.worker.gpu.memory import memory_for_blocks, profile_prompts
from octavo.worker.model_settings import ModelSettings
from octavo.worker.step.kv_cache import KVCacheError
from octavo.worker.step.model_runner import ModelRunner

GIB = 1 << 30


@pytest.mark.parametrize(
    ("tokens", "longest", "prompts"),
    [(8192, 4096, [4096, 4096]), (10, 4, [4, 4, 2]), (3, 4096, [3]), (1, 1, [1])],
)
def test_the_largest_step_is_filled_with_the_longest_prompts(tokens: int, longest: int, prompts: list[int]) -> None:
    assert profile_prompts(tokens, longest) == prompts


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
    write_tiny_model(tmp_path, LlamaConfig(**sizes, **heads))
    return gpu_runner(tmp_path, monkeypatch)


class _FakeGpu:
    """One whose allocator is asked between steps; every measured step takes `step_gib` more."""

    def __init__(self, patch: pytest.MonkeyPatch, *, free_gib: float, step_gib: float) -> None:
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free_gib * GIB), 100 * GIB))
        patch.setattr(torch.cuda, "empty_cache", lambda: None)
        patch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
        patch.setattr(torch.cuda, "memory_allocated", lambda device: 20 * GIB)
        patch.setattr(torch.cuda, "max_memory_allocated", lambda device: int((20 + step_gib) * GIB))


SETTINGS = ModelSettings(gpu_memory_utilization=0.9, max_num_batched_tokens=40, graph_batch=4)


def table_bytes(max_num_seqs: int, graph_batch: int) -> int:
    """32 positions are two blocks of 16 in the one KV group: a row of 4 bytes each, and the last token's 8."""
    rows = (2 * max_num_seqs + 1) * (2 * 4 + 8)
    # Ids, positions and slots are of 8 bytes, rows and contexts of 4; numbers from 0 on of both.
    decodes = graph_batch * (3 * 8 + 2 * 4) + (graph_batch + 1) * 12
    # Four numbers and one more of each sequence.
    return rows + decodes + SETTINGS.graph_tokens * 3 * 8 + (4 * (graph_batch + MOST_CHUNKS) + 1) * 4


def left(runner: ModelRunner, settings: ModelSettings = SETTINGS) -> int:
    with torch.inference_mode():
        return memory_for_blocks(runner._model, runner._layout, runner.executor._paging, settings)


def test_blocks_get_what_weights_and_steps_leave(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    _FakeGpu(monkeypatch, free_gib=70, step_gib=5)
    tables = table_bytes(max_num_seqs=256, graph_batch=4)
    assert left(runner, replace(SETTINGS, cuda_graphs=False)) == (90 - 30 - 5) * GIB - tables
    logits = 4 * 4 * 64
    assert left(runner) == (90 - 30 - 5 - 5) * GIB - logits - memory._GRAPHS_BYTES - tables


def test_tables_of_many_sequences_take_from_what_blocks_get(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    _FakeGpu(monkeypatch, free_gib=70, step_gib=5)
    more = left(runner) - left(runner, replace(SETTINGS, max_num_seqs=4096))
    assert more == table_bytes(4096, 4) - table_bytes(256, 4) == 2 * 3840 * (4 * 2 + 8)


def test_no_room_is_refused_with_what_to_do(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    _FakeGpu(monkeypatch, free_gib=12, step_gib=3)
    with pytest.raises(KVCacheError, match=r"88\.0 GiB are in use.*raise --gpu-memory-utilization"):
        left(runner)
