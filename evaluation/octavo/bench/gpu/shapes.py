"""Holds the sizes of what is measured: models by their config.json, attention by its heads."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from octavo.bench.figures import LinearShapes

MODELS = Path(__file__).with_name("models")
LARGE_MODELS = ("qwen3-8b", "llama-3.1-8b")
SMALL_MODEL, TINY_MODEL = "qwen3-0.6b", "tiny"
# bf16.
ITEM_SIZE = 2


@dataclass(frozen=True)
class AttentionShape:
    """Holds the heads of one layer, and the slots of a block of the layer's keys and values."""

    query_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16

    @property
    def group(self) -> int:
        """Returns how many query heads share a KV head."""
        return self.query_heads // self.kv_heads

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.kv_heads * self.head_dim * ITEM_SIZE

    @property
    def query_bytes_per_token(self) -> int:
        return self.query_heads * self.head_dim * ITEM_SIZE

    def with_block_size(self, block_size: int) -> Self:
        return replace(self, block_size=block_size)


@dataclass(frozen=True)
class DecoderShape:
    """Describes one of the models in `MODELS`."""

    name: str
    linear: LinearShapes
    attention: AttentionShape

    @classmethod
    def read(cls, name: str) -> Self:
        """Raises `OSError` if there is none of this name."""
        config = json.loads((MODELS / name / "config.json").read_bytes())
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        return cls(name, LinearShapes.read(MODELS / name), AttentionShape(heads, kv_heads, config["head_dim"]))

    @property
    def num_layers(self) -> int:
        return self.linear.num_layers

    @property
    def vocab_size(self) -> int:
        return self.linear.head[0]

    @property
    def weight_bytes(self) -> int:
        """Returns the bytes of the weights that every step reads."""
        return self.linear.num_weights * ITEM_SIZE

    @property
    def layer_weights(self) -> int:
        """Counts the weights that every token goes through; the LM head's weights are for the last token of each
        sequence."""
        return self.linear.num_weights - self.head_weights

    @property
    def head_weights(self) -> int:
        return self.linear.head[0] * self.linear.head[1]

    @property
    def kv_bytes_per_token(self) -> int:
        return self.num_layers * self.attention.kv_bytes_per_token

    @property
    def kv_bytes_per_block(self) -> int:
        return self.attention.block_size * self.kv_bytes_per_token
