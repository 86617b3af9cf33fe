"""What a GGUF file says of a Llama model, in the words of transformers: configuration and tensors.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

_ARCHITECTURE = "llama"
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class GGUFError(Exception):
    """A file that is no GGUF, or holds a model that cannot be converted."""


class UnknownGGUFError(GGUFError):
    """A model that this reader does not know; another may."""


class GGUFModel:
    """A GGUF file, open for reading.

    Raises `GGUFError` if it is none, `UnknownGGUFError` if it holds no Llama model.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = gguf.GGUFReader(str(path))
        except (OSError, ValueError, IndexError) as error:
            raise GGUFError(f"{path} is no readable GGUF file: {error}") from error
        architecture = self.value("general.architecture")
        if architecture != _ARCHITECTURE:
            raise UnknownGGUFError(f"{path} holds a {architecture!r} model, not a {_ARCHITECTURE!r}")
        self._names = {tensor.name for tensor in self._reader.tensors}

    def value(self, key: str, default: Any = None) -> Any:
        """The metadata under `key`; without a `default`, `GGUFError` if it is absent."""
        field = self._reader.fields.get(key)
        if field is not None:
            return field.contents()
        if default is None:
            raise GGUFError(f"{self.path} has no metadata {key!r}, which the conversion needs")
        return default

    def config(self) -> dict[str, Any]:
        """config.json of the model. Tied embeddings are those without an output tensor.

        Raises `UnknownGGUFError` for variants of the architecture.
        """
        heads = self._number("attention.head_count")
        if "rope_freqs.weight" in self._names or self.value(f"{_ARCHITECTURE}.rope.scaling.type", "none") != "none":
            raise UnknownGGUFError(f"{self.path} scales its rotary embedding")
        for name in self._names:
            self._transformers_name(name)
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": len(self.value("tokenizer.ggml.tokens")),
            "hidden_size": self._number("embedding_length"),
            "intermediate_size": self._number("feed_forward_length"),
            "num_hidden_layers": self._number("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._number("attention.head_count_kv", heads),
            "head_dim": self._number("embedding_length") // heads,
            "hidden_act": "silu",
            "max_position_embeddings": self._number("context_length"),
            "rms_norm_eps": _shortest(self.value(f"{_ARCHITECTURE}.attention.layer_norm_rms_epsilon")),
            "rope_theta": _shortest(self.value(f"{_ARCHITECTURE}.rope.freq_base", 10000.0)),
            "tie_word_embeddings": "output.weight" not in self._names,
            "attention_bias": False,
            "mlp_bias": False,
            **self.special_token_ids(),
            "dtype": "bfloat16",
        }

    def special_token_ids(self) -> dict[str, int]:
        """BOS, EOS and padding under transformers' names; padding is EOS where the file names none."""
        eos = self.value("tokenizer.ggml.eos_token_id")
        return {
            "bos_token_id": self.value("tokenizer.ggml.bos_token_id"),
            "eos_token_id": eos,
            "pad_token_id": self.value("tokenizer.ggml.padding_token_id", eos),
        }

    def tensors(self) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
        """Every tensor under transformers' name, dequantized, in transformers' layout."""
        heads = self._number("attention.head_count")
        head_counts = {"attn_q": heads, "attn_k": self._number("attention.head_count_kv", heads)}
        for tensor in self._reader.tensors:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            kind = tensor.name.split(".")[-2]
            if kind in head_counts:
                values = _unpermute(values, head_counts[kind])
            yield self._transformers_name(tensor.name), values

    def _transformers_name(self, name: str) -> str:
        match name.split("."):
            case ["blk", layer, kind, "weight"] if kind in _LAYER_TENSORS:
                return f"model.layers.{layer}.{_LAYER_TENSORS[kind]}.weight"
            case [kind, "weight"] if kind in _OUTER_TENSORS:
                return f"{_OUTER_TENSORS[kind]}.weight"
        raise UnknownGGUFError(f"{self.path} has a tensor {name!r} that a plain {_ARCHITECTURE!r} has no place for")

    def _number(self, key: str, default: int | None = None) -> int:
        return int(self.value(f"{_ARCHITECTURE}.{key}", default))


def _unpermute(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """GGUF interleaves the two halves of each head's rotary pairs; transformers keeps them one after the other."""
    interleaved = weight.reshape(heads, -1, 2, weight.shape[-1])
    return interleaved.swapaxes(1, 2).reshape(weight.shape)


def _shortest(value: float) -> float:
    """The decimal that was meant: 1e-05, where fp32 made it 9.999999747378752e-06."""
    return float(str(np.float32(value)))
