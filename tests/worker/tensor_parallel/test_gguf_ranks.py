"""Ranks share the quantised weights of a GGUF file: rows of queries, columns behind them, rows of the vocabulary."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from octavo.runtime.models.directory import resolve_model
from octavo.testbed.models import write_tiny_model
from octavo.testing.shard_threads import RankRunner, ThreadGroup, run_ranks
from octavo.testing.small.gguf_model import everything, write_model

CONFIG: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
PROMPT = [3, 1, 4, 1, 5]


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_answer_nearly_as_the_values_of_the_file_do(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    model = write_tiny_model(tmp_path / "model", LlamaConfig(**CONFIG))
    directory = resolve_model(str(write_model(tmp_path / "tiny.gguf", model, "llama", everything("Q8_0"))))
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0, -1]

    def logits(group: ThreadGroup) -> Tensor:
        return RankRunner(directory, group).prompt_logits([PROMPT])

    [found] = run_ranks(size, logits)[0]
    assert torch.cosine_similarity(found, expected, dim=0) > 0.999
