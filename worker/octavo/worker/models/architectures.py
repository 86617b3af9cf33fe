"""The architectures of the Llama family: the differences between its members, as data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

FULL = "full_attention"
SLIDING = "sliding_attention"

# The layers that slide where config.json does not list them: none; all; every other, from the first on; those from
# `max_window_layers` on; all but every `sliding_window_pattern`-th; all but the first of four; those without rotary
# positions.
LayerPattern = Literal[
    "none", "all", "every other", "from max_window_layers", "all but nth", "all but first of four", "unrotated"
]


def _nothing() -> Mapping[str, Any]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One member of the Llama family.

    `defaults` holds the meaning of keys that a config.json lacks; the keys of
    `octavo.worker.models.config_file.FAMILY_KEYS` are read only where they have a default here.

    A bias exists, does not exist, or is config.json's to choose under the key named here. `qk_norm` is over one head,
    or over all of a token's heads at once. The four norms of a layer (before and after attention, before and after the
    MLP) go by the names of their tensors; None: there is no such norm. `norm_offset` is added to the weights of all
    norms.
    """

    defaults: Mapping[str, Any] = field(default_factory=_nothing)
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: Literal["head", "all"] | None = None
    input_norm: str | None = "input_layernorm"
    attention_output_norm: str | None = None
    post_attention_norm: str | None = "post_attention_layernorm"
    mlp_output_norm: str | None = None
    norm_offset: float = 0.0
    # The checkpoint holds queries, keys and values as one tensor; likewise gate and up.
    fused_qkv: bool = False
    fused_gate_up: bool = False
    # The pairs that turn together are neighbours in the checkpoint, not half a head apart.
    interleaved_rotary: bool = False
    rotary_by_layer_type: bool = False
    # With a sliding window, layers that do not slide have no rotary positions.
    full_layers_unrotated: bool = False
    layer_pattern: LayerPattern = "none"
    # Embeddings are multiplied with the square root of the hidden size.
    normalized_embedding: bool = False
    # Other names of activations and kinds of rotary embeddings.
    activations: Mapping[str, str] = field(default_factory=_nothing)
    rope_types: Mapping[str, str] = field(default_factory=_nothing)

    def reads(self, key: str) -> bool:
        """Tells whether `key` of config.json has a meaning for this architecture."""
        return key in self.defaults


# These values are those that transformers' configuration classes give to keys that a config.json leaves out.
_BIASES: dict[str, Any] = {"attention_bias": False, "mlp_bias": False}
_WINDOW_KEYS: dict[str, Any] = {"sliding_window": 4096, "layer_types": None}
_QWEN_WINDOW_KEYS: dict[str, Any] = {**_WINDOW_KEYS, "use_sliding_window": False, "max_window_layers": 28}
_GEMMA_KEYS: dict[str, Any] = {"attention_bias": False, "head_dim": 256, "tie_word_embeddings": True}
_GEMMA2_KEYS: dict[str, Any] = {
    **_GEMMA_KEYS,
    **_WINDOW_KEYS,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "num_key_value_heads": 4,
}
_GRANITE_KEYS: dict[str, Any] = {
    **_BIASES,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_GLM_KEYS: dict[str, Any] = {
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-07,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
_CWM_ROTARY: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

_ALL_BIASES: dict[str, Any] = {"qkv_bias": "attention_bias", "output_bias": "attention_bias", "mlp_bias": "mlp_bias"}
_ATTENTION_BIASES: dict[str, Any] = {"qkv_bias": "attention_bias", "output_bias": "attention_bias"}
_OUTPUT_NORMS: dict[str, Any] = {
    "input_norm": None,
    "attention_output_norm": "post_attention_layernorm",
    "post_attention_norm": None,
    "mlp_output_norm": "post_feedforward_layernorm",
}
_GEMMA2_NORMS: dict[str, Any] = {
    **_OUTPUT_NORMS,
    "input_norm": "input_layernorm",
    "post_attention_norm": "pre_feedforward_layernorm",
}
_GEMMA: dict[str, Any] = {**_ATTENTION_BIASES, "norm_offset": 1.0, "normalized_embedding": True}
_GLM: dict[str, Any] = {"qkv_bias": "attention_bias", "fused_gate_up": True, "interleaved_rotary": True}

ARCHITECTURES = MappingProxyType(
    {
        "CwmForCausalLM": Architecture(
            defaults={
                **_WINDOW_KEYS,
                "sliding_window": 8192,
                "rms_norm_eps": 1e-5,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "rope_theta": 1000000.0,
                "rope_parameters": _CWM_ROTARY,
            },
            layer_pattern="all but first of four",
        ),
        "Ernie4_5ForCausalLM": Architecture(
            defaults={
                "use_bias": False,
                "rms_norm_eps": 1e-5,
                "rope_theta": 500000.0,
                "num_key_value_heads": 2,
                "head_dim": 128,
                "tie_word_embeddings": True,
            },
            qkv_bias="use_bias",
            output_bias="use_bias",
            mlp_bias="use_bias",
            interleaved_rotary=True,
        ),
        "Exaone4ForCausalLM": Architecture(
            defaults={**_WINDOW_KEYS, "sliding_window_pattern": 4, "rms_norm_eps": 1e-5, "num_key_value_heads": 32},
            qk_norm="head",
            full_layers_unrotated=True,
            layer_pattern="all but nth",
            **_OUTPUT_NORMS,
        ),
        "GemmaForCausalLM": Architecture(
            defaults={**_GEMMA_KEYS, "hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 16},
            # Released files say "gelu" and mean the approximation.
            activations={"gelu": "gelu_pytorch_tanh"},
            **_GEMMA,
        ),
        "Gemma2ForCausalLM": Architecture(
            defaults=_GEMMA2_KEYS, layer_pattern="every other", **_GEMMA, **_GEMMA2_NORMS
        ),
        "Gemma3ForCausalLM": Architecture(
            defaults={
                **_GEMMA2_KEYS,
                "attn_logit_softcapping": None,
                "final_logit_softcapping": None,
                "sliding_window_pattern": 6,
                "rope_theta": 1000000.0,
                "rope_local_base_freq": 10000.0,
            },
            qk_norm="head",
            rotary_by_layer_type=True,
            layer_pattern="all but nth",
            **_GEMMA,
            **_GEMMA2_NORMS,
        ),
        "GlmForCausalLM": Architecture(defaults=_GLM_KEYS, **_GLM),
        "Glm4ForCausalLM": Architecture(
            defaults=_GLM_KEYS,
            attention_output_norm="post_self_attn_layernorm",
            mlp_output_norm="post_mlp_layernorm",
            **_GLM,
        ),
        "GraniteForCausalLM": Architecture(defaults=_GRANITE_KEYS, **_ALL_BIASES),
        "HeliumForCausalLM": Architecture(
            defaults={
                **_BIASES,
                "rms_norm_eps": 1e-8,
                "rope_theta": 100000.0,
                "num_key_value_heads": 20,
                "head_dim": 128,
            },
            qkv_bias="attention_bias",
            mlp_bias="mlp_bias",
            interleaved_rotary=True,
        ),
        "LlamaForCausalLM": Architecture(defaults=_BIASES, **_ALL_BIASES),
        "MinistralForCausalLM": Architecture(defaults={**_WINDOW_KEYS, "num_key_value_heads": 8}, layer_pattern="all"),
        "MistralForCausalLM": Architecture(
            defaults={"sliding_window": 4096, "num_key_value_heads": 8}, layer_pattern="all"
        ),
        "Olmo2ForCausalLM": Architecture(
            defaults={"attention_bias": False, "rms_norm_eps": 1e-5},
            qk_norm="all",
            **_ATTENTION_BIASES,
            **_OUTPUT_NORMS,
        ),
        "Olmo3ForCausalLM": Architecture(
            defaults={
                **_WINDOW_KEYS,
                "attention_bias": False,
                "rms_norm_eps": 1e-5,
                "rope_theta": 500000.0,
                "rope_local_base_freq": 500000.0,
                "sliding_window_pattern": 4,
            },
            qk_norm="all",
            rotary_by_layer_type=True,
            layer_pattern="all but nth",
            **_ATTENTION_BIASES,
            **_OUTPUT_NORMS,
        ),
        "Phi3ForCausalLM": Architecture(
            defaults={
                "rms_norm_eps": 1e-5,
                "original_max_position_embeddings": 4096,
                "partial_rotary_factor": 1.0,
                "sliding_window": None,
            },
            fused_qkv=True,
            fused_gate_up=True,
            rope_types={"su": "longrope", "yarn": "longrope"},
            layer_pattern="all",
        ),
        "Qwen2ForCausalLM": Architecture(
            defaults={**_QWEN_WINDOW_KEYS, "num_key_value_heads": 32},
            qkv_bias=True,
            layer_pattern="from max_window_layers",
        ),
        "Qwen3ForCausalLM": Architecture(
            defaults={**_QWEN_WINDOW_KEYS, "attention_bias": False, "num_key_value_heads": 32, "head_dim": 128},
            qk_norm="head",
            layer_pattern="from max_window_layers",
            **_ATTENTION_BIASES,
        ),
        "SeedOssForCausalLM": Architecture(
            defaults={
                "attention_bias": True,
                "attention_out_bias": False,
                "mlp_bias": False,
                "num_key_value_heads": 8,
                "head_dim": 128,
            },
            qkv_bias="attention_bias",
            output_bias="attention_out_bias",
            mlp_bias="mlp_bias",
        ),
        "SmolLM3ForCausalLM": Architecture(
            defaults={
                **_BIASES,
                "use_sliding_window": False,
                "sliding_window": None,
                "layer_types": None,
                "no_rope_layers": None,
                "no_rope_layer_interval": 4,
                "rope_theta": 2000000.0,
                "num_key_value_heads": 4,
                "tie_word_embeddings": True,
            },
            layer_pattern="unrotated",
            **_ALL_BIASES,
        ),
    }
)
