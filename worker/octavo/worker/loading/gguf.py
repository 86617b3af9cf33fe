"""The reader of GGUF files: a model's configuration, its tensors and its tokenizer."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

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


_CONTROL_TOKEN = 3


class GGUFError(Exception):
    """Raised for a file that is no GGUF, or holds a model that cannot be converted."""


class UnknownGGUFError(GGUFError):
    """Raised for a model that this reader does not know; another may."""


class GGUFModel:
    """Reads a GGUF file.

    Raises `GGUFError` if the file is none, `UnknownGGUFError` if it holds no Llama model.
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
        """Returns the metadata under `key`. Without a `default`, raises `GGUFError` if it is absent."""
        field = self._reader.fields.get(key)
        if field is not None:
            return field.contents()
        if default is None:
            raise GGUFError(f"{self.path} has no metadata {key!r}, which the conversion needs")
        return default

    def config(self) -> dict[str, Any]:
        """Returns the model's config.json. Embeddings are tied if the file has no output tensor.

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
        """Returns BOS, EOS and padding under transformers' names; padding is EOS where the file names none."""
        eos = self.value("tokenizer.ggml.eos_token_id")
        return {
            "bos_token_id": self.value("tokenizer.ggml.bos_token_id"),
            "eos_token_id": eos,
            "pad_token_id": self.value("tokenizer.ggml.padding_token_id", eos),
        }

    def tensors(self) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
        """Yields every tensor under transformers' name, dequantized, in transformers' layout."""
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
    """Undoes GGUF's order, which interleaves the two halves of each head's rotary pairs; transformers keeps the halves
    one after the other."""
    interleaved = weight.reshape(heads, -1, 2, weight.shape[-1])
    return interleaved.swapaxes(1, 2).reshape(weight.shape)


def _shortest(value: float) -> float:
    """Returns the shortest decimal with the same fp32 value: 1e-05, where fp32 made it 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def build_tokenizer(model: GGUFModel) -> Tokenizer:
    """Builds the byte-level BPE of `model`. Raises `UnknownGGUFError` for tokenizers of another kind."""
    kind = model.value("tokenizer.ggml.model"), model.value("tokenizer.ggml.pre", "default")
    if kind != ("gpt2", "smollm"):
        raise UnknownGGUFError(f"{model.path} has a tokenizer of kind {kind[0]!r} with pre-tokenizer {kind[1]!r}")
    if model.value("tokenizer.ggml.add_bos_token", False):
        raise UnknownGGUFError(f"{model.path} wants BOS before every text")
    tokens: list[str] = model.value("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in model.value("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # What `smollm` stands for: each digit alone, and so the space before digits too.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(tokens[i], special=True, normalized=False) for i in _control_ids(model)])
    return tokenizer


def tokenizer_config(model: GGUFModel) -> dict[str, Any]:
    """Returns the tokenizer_config.json of `model`, with its chat template."""
    tokens: list[str] = model.value("tokenizer.ggml.tokens")
    special = {name.removesuffix("_id"): tokens[i] for name, i in model.special_token_ids().items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "unk_token": tokens[model.value("tokenizer.ggml.unknown_token_id")],
        "model_max_length": int(model.config()["max_position_embeddings"]),
        "clean_up_tokenization_spaces": False,
        "chat_template": model.value("tokenizer.chat_template"),
    }


def _control_ids(model: GGUFModel) -> list[int]:
    return [i for i, kind in enumerate(model.value("tokenizer.ggml.token_type")) if kind == _CONTROL_TOKEN]


def convert_with_transformers(gguf: Path, directory: Path) -> None:
    """Writes the model in `gguf`, its configuration and its tokenizer to `directory`.

    Raises `GGUFError` if transformers cannot read them, `ModuleNotFoundError` without the package it needs for this.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise ModuleNotFoundError("transformers reads GGUF files with accelerate only", name="accelerate")
    # A second to import, for files of this kind only.
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        model = AutoModelForCausalLM.from_pretrained(**where, **_dequantized(), dtype="bfloat16")
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except Exception as error:  # The library raises whatever a file that it does not understand makes it stumble over.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise GGUFError(f"{gguf} can be read neither here nor by transformers: {reason}") from error
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _dequantized() -> dict[str, Any]:
    """Returns the arguments that make this version of transformers dequantize: older ones always do."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}
