"""Small models of one vocabulary, each of which may guess for any other, and runners with two of them."""

from pathlib import Path
from typing import Any

from transformers import Gemma2Config, LlamaConfig, Qwen3Config

from octavo.testbed.models import write_tiny_model
from octavo.testbed.tiny_model import VOCAB_SIZE, write_byte_model
from octavo.worker.model_settings import ModelSettings
from octavo.worker.step.model_runner import ModelRunner

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES),
    "windows": Qwen3Config(
        **SIZES,
        use_sliding_window=True,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
    ),
    "only windows": Gemma2Config(**{**SIZES, "layer_types": ["sliding_attention"] * 4}, sliding_window=20),
}


def write_model(directory: Path, name: str) -> None:
    """Writes one of the models of `CONFIGS`, and a tokenizer."""
    write_byte_model(directory, 256)
    write_tiny_model(directory, CONFIGS[name])


def make_runner(directory: Path, draft: Path, **options: Any) -> ModelRunner:
    """Loads a model with a draft model."""
    usual: dict[str, Any] = {"num_blocks": 512, "threads": 1, "dtype": "float32"}
    return ModelRunner(directory, ModelSettings(**usual | options), draft_directory=draft)
