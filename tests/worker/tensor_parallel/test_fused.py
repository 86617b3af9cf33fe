"""A model on Triton's kernels that several ranks share, against the same in torch's operations on one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, LlamaConfig, Olmo2Config

from octavo.kernels.attention import TorchAttention
from octavo.kernels.choice import AttentionChoice
from octavo.kernels.triton.attention import TritonAttention
from octavo.testbed.models import write_tiny_model
from octavo.testing.depth import deep_unless
from octavo.testing.shard_threads import RankRunner, ThreadGroup, run_ranks
from octavo.worker.models import linear
from octavo.worker.models.fused import FusedLlama
from octavo.worker.models.linear import LinearKind
from octavo.worker.models.llama import LlamaModel
from octavo.worker.step.model_runner import model_obstacle

SIZES: dict[str, Any] = {
    "vocab_size": 91,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
CONFIGS = {
    "biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, architectures=["LlamaForCausalLM"]),
    "norms of all heads, and after": Olmo2Config(**SIZES),
    "soft caps": Gemma2Config(**SIZES, sliding_window=3, tie_word_embeddings=True),
}
PROMPTS = [[7], [3, 1, 4, 1, 5, 9]]


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights lie on a CPU as they would on a GPU."""
    monkeypatch.setattr(linear, "best_kind", lambda weight: LinearKind.PLAIN)


@pytest.mark.parametrize("name", deep_unless("soft caps".__eq__, CONFIGS))
def test_logits_are_those_of_one_rank_in_torch(name: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, CONFIGS[name])

    def logits(group: ThreadGroup) -> tuple[type, Tensor]:
        attention = TorchAttention if group.size == 1 else TritonAttention
        runner = RankRunner(tmp_path, group, make_attention=attention)
        sequences = runner.sequences(PROMPTS, 1)
        first = runner.logits(sequences, [len(prompt) for prompt in PROMPTS])
        for sequence in sequences:
            sequence.token_ids.append(5)
        return type(runner.decoder), torch.cat((first, runner.logits(sequences, [1, 1])))

    [(plain, expected)] = run_ranks(1, logits)
    assert plain is LlamaModel
    for size in (2, 4):
        (fused, found), *_ = run_ranks(size, logits)
        assert fused is FusedLlama
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def test_exact_numerics_are_for_one_gpu(tmp_path: Path) -> None:
    CONFIGS["biases"].save_pretrained(tmp_path)

    def obstacle(group: ThreadGroup) -> str | None:
        runner = RankRunner(tmp_path, group, make_attention=TritonAttention, load_format="dummy")
        assert isinstance(runner.decoder, FusedLlama)
        return model_obstacle(runner.decoder, AttentionChoice(runner.attention, None))

    assert run_ranks(1, obstacle) == [None]
    for found in run_ranks(2, obstacle):
        assert found is not None
        assert "leave it or --tp out" in found
