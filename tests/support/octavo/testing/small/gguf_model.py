"""Writes models of transformers to GGUF files as llama.cpp's converter does: its names, its order of rows, its
metadata."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

# Architectures whose queries and keys are put in an order of neighbouring pairs, and those whose norms get 1 added.
PERMUTED = ("llama", "granite", "smollm3")
OFFSET = ("gemma", "gemma2", "gemma3")
# One token for each byte would do for any text; models of a test have as many tokens as their configuration says.
SPECIAL = ("<|end|>", "<|start|>")

# The types that the package does not quantise to, and where the fp16 factors of their blocks lie.
FACTORS = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}

Choice = Callable[[str, tuple[int, ...]], str]


def everything(kind: str) -> Choice:
    """Stores matrices as `kind` and the rest in fp32."""
    return lambda name, shape: kind if len(shape) > 1 else "F32"


def write_model(
    path: Path, model: Any, architecture: str, choose: Choice, *, extra: Callable[[Any], None] | None = None
) -> Path:
    """Writes `model` (of transformers, in fp32) to `path`, each tensor in the type that `choose` names.

    `extra` is called with the writer. Afterwards `model` has the values of the file, dequantized.
    """
    writer = gguf.GGUFWriter(str(path), architecture)
    config = model.config
    write_settings(writer, config)
    write_tokenizer(writer, config.vocab_size)
    if extra is not None:
        extra(writer)
    names = gguf.get_tensor_name_map(
        next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), config.num_hidden_layers
    )
    for name, tensor in stored(model):
        kind = gguf.GGMLQuantizationType[choose(name, tuple(tensor.shape))]
        base, _, suffix = name.rpartition(".")
        values = to_llama_cpp(name, tensor, architecture, config)
        packed = random_blocks(kind.name, values.shape) if kind.name in FACTORS else gguf.quantize(values, kind)
        found = from_llama_cpp(name, gguf.dequantize(packed, kind), architecture, config)
        tensor.copy_(torch.from_numpy(np.ascontiguousarray(found)))
        told = names.get_name(base)
        assert told is not None, name
        writer.add_tensor(f"{told}.{suffix}", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_blocks(kind: str, shape: tuple[int, ...], factor: float = 2e-4) -> Any:
    """Rows of blocks of `kind` with any codes, and factors of about `factor`."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    drawn = np.random.default_rng(sum(shape))
    rows = drawn.integers(0, 256, (shape[0], shape[1] // block, size), dtype=np.uint8)
    for place in FACTORS.get(kind, (0, 2) if kind in ("Q4_1", "Q5_1") else (0,)):
        factors = drawn.normal(0, factor, (*rows.shape[:2], 1)).astype(np.float16)
        rows[..., place : place + 2] = factors.view(np.uint8)
    return rows.reshape(shape[0], -1)


def stored(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a checkpoint holds: tied embeddings once."""
    tied = getattr(model.config, "tie_word_embeddings", False)
    for name, tensor in model.state_dict().items():
        if not (tied and name == "lm_head.weight"):
            yield name, tensor


def to_llama_cpp(name: str, tensor: Tensor, architecture: str, config: Any) -> Any:
    values = tensor.detach().clone()
    if heads := permuted_heads(name, architecture, config):
        shape = values.shape
        values = values.view(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
    if architecture in OFFSET and name.endswith("norm.weight"):
        values = values + 1
    return values.contiguous().numpy()


def from_llama_cpp(name: str, values: Any, architecture: str, config: Any) -> Any:
    if heads := permuted_heads(name, architecture, config):
        shape = values.shape
        values = values.reshape(heads, shape[0] // heads // 2, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
    if architecture in OFFSET and name.endswith("norm.weight"):
        values = values - 1
    return values


def permuted_heads(name: str, architecture: str, config: Any) -> int:
    """The heads whose rows are put in another order; 0 for tensors that keep theirs."""
    if architecture not in PERMUTED:
        return 0
    counts = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    return int(counts.get(name.split(".")[-2], 0))


def write_settings(writer: Any, config: Any) -> None:
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    for name, add in (
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("attention_multiplier", writer.add_attention_scale),
        ("embedding_multiplier", writer.add_embedding_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("logits_scaling", writer.add_logit_scale),
    ):
        if getattr(config, name, None):
            add(getattr(config, name))


def write_tokenizer(writer: Any, size: int) -> None:
    """`size` tokens, of which some end a text."""
    letters = [chr(0x100 + n) for n in range(size - len(SPECIAL) - 1)]
    tokens = [*SPECIAL, *letters, letters[0] + letters[1]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges([f"{letters[0]} {letters[1]}"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
