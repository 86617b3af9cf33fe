"""Configurations of transformers' architectures, made so small that their models run in a moment."""

from collections.abc import Iterator
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

# By the keys that configurations have for it; what a class does not know is left out.
_SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "embedding_size": 64,
    "word_embed_proj_dim": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "ffn_hidden_size": 96,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "mlp_hidden_size": 96,
    "num_hidden_layers": 4,
    "n_layer": 4,
    "decoder_layers": 4,
    "encoder_layers": 1,
    "num_attention_heads": 4,
    "n_head": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "max_seq_len": 256,
    "sliding_window": 20,
    "attention_chunk_size": 20,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 16,
    "is_decoder": True,
    # So low that they are felt.
    "attn_logit_softcapping": 1.0,
    "final_logit_softcapping": 3.0,
}

_NARROW_VALUES: dict[str, Any] = {"head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_ROTARY: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
_CONVOLVED: dict[str, Any] = {"layer_types": ["conv", "full_attention"] * 2}
# What an architecture needs beside that or instead, to be sound and to have what sets it apart from others; None: leave
# the key out.
_EXCEPTIONS: dict[str, dict[str, Any]] = {
    "axk1": _NARROW_VALUES,
    "axk2": _NARROW_VALUES,
    "cohere_compass_text": {"layer_types": _ALTERNATING, "rope_parameters": dict.fromkeys(_ALTERNATING, _ROTARY)},
    "ctrl": {"dff": 96},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "deepseek_v2": _NARROW_VALUES,
    "deepseek_v3": _NARROW_VALUES,
    "deepseek_v32": _NARROW_VALUES,
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma3_text": {"layer_types": _ALTERNATING},
    "gemma3n_text": {"layer_types": _ALTERNATING, "num_kv_shared_layers": 2, "laurel_rank": 8},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "glm4_moe_lite": {"head_dim": 8, "num_key_value_heads": 4},
    "glm_moe_dsa": _NARROW_VALUES,
    "lfm2": _CONVOLVED,
    "lfm2_moe": _CONVOLVED,
    "longcat_flash": {**_NARROW_VALUES, "num_layers": 2, "expert_ffn_hidden_size": 32, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8},
    "minicpm3": _NARROW_VALUES,
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "index_n_heads": 2,
        "index_head_dim": 16,
    },
    "prophetnet": {"num_hidden_layers": None, "num_decoder_layers": 2, "num_encoder_layers": 1},
    "xmod": {"default_language": "en_XX"},
    "youtu": _NARROW_VALUES,
    "zaya": {"num_experts_per_tok": 1},
}


def causal_model_types() -> list[str]:
    """transformers' names of the architectures it calls causal language models."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def causal_class(model_type: str) -> Any:
    """Returns transformers' class of causal language models of `model_type`."""
    return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def tiny_config(model_type: str, config_class: Any) -> Any:
    """A small configuration of `model_type`, or of the part of it that is a `config_class`.

    Raises whatever transformers raises if there can be none.
    """
    config = _tiny(CONFIG_MAPPING[model_type])
    parts = [part for _, part in _parts(config) if isinstance(part, config_class)]
    return parts[0] if parts else config


def _tiny(config_class: Any) -> Any:
    default = config_class()
    small = {key: value for key, value in _SMALL.items() if _fits(default, key)}
    small.update((key, _tiny(type(part))) for key, part in _parts(default))
    small.update(_EXCEPTIONS.get(config_class.model_type, {}))
    return config_class(**{key: value for key, value in small.items() if value is not None})


def _fits(default: Any, key: str) -> bool:
    """Tells whether the class has the key under this very name (two names of one thing would overrule each other), to
    set."""
    descriptor = getattr(type(default), key, None)
    settable = not isinstance(descriptor, property) or descriptor.fset is not None
    return settable and key in default.to_dict() and key not in getattr(default, "attribute_map", {})


def _parts(default: Any) -> Iterator[tuple[str, Any]]:
    """Yields the configurations inside a configuration: of text, of images."""
    for key in type(default).sub_configs:
        if isinstance(part := getattr(default, key, None), PreTrainedConfig):
            yield key, part
