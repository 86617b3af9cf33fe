"""The architectures that llama.cpp writes to GGUF files and Octavo computes: their metadata as a config.json, and the
names of their tensors."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from octavo.runtime.models.gguf.file import GGUFError, GGUFFile, GGUFTensor, UnsupportedGGUF
from octavo.runtime.models.gguf.metadata import Metadata

# As many as `octavo.worker.models.config_file` accepts.
_MOST_LAYERS = 2048
_OTHERWISE: Final = (
    "serve the model's directory of safetensors instead, or make one of this file with `octavo prepare-model --gguf"
    " FILE --output DIRECTORY`: transformers may know the model"
)
_OUTER: Final = MappingProxyType({"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"})
# Tensors that are read into config.json, or follow from it.
_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_IN_CONFIG: Final = frozenset(_FACTORS)

_PROJECTIONS: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FUSED_UP: Final = {
    **{name: told for name, told in _PROJECTIONS.items() if name not in ("ffn_gate", "ffn_up")},
    "ffn_up": "mlp.gate_up_proj",
}
_FUSED: Final = {
    "attn_qkv": "self_attn.qkv_proj",
    **{name: told for name, told in _FUSED_UP.items() if name not in ("attn_q", "attn_k", "attn_v")},
}
_HEAD_NORMS: Final = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_INPUT_NORMS: Final = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_OUTPUT_NORMS: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FOUR_NORMS: Final = {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm", **_OUTPUT_NORMS}


def _nothing(_: Metadata) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Describes an architecture of GGUF files.

    `architecture` and `model_type` are those of transformers. `layer` gives the names in a layer, as llama.cpp's and
    transformers have them. With `permuted`, the rows of queries and keys lie with rotary pairs beside each other, where
    transformers has them half a head apart. `norm_offset` is added to the norms in the file. `constants` and
    `settings` are what config.json has beyond what all have.
    """

    architecture: str
    model_type: str
    layer: Mapping[str, str]
    permuted: bool = False
    norm_offset: float = 0.0
    constants: Mapping[str, Any] = field(default_factory=dict)
    settings: Callable[[Metadata], dict[str, Any]] = _nothing

    def transformers_name(self, name: str) -> str | None:
        """Returns transformers' name of the tensor `name`; None if this architecture has no such tensor."""
        match name.split("."):
            case ["blk", layer, kind, ("weight" | "bias") as suffix] if kind in self.layer and layer.isdecimal():
                return f"model.layers.{int(layer)}.{self.layer[kind]}.{suffix}"
            case [kind, "weight"] if kind in _OUTER:
                return f"{_OUTER[kind]}.weight"
        return None


def _window(metadata: Metadata) -> dict[str, Any]:
    key = "{arch}.attention.sliding_window"
    # Without a key there is no window, whatever transformers' class has as its default.
    return {"sliding_window": metadata.count(key, 0, least=0) or None}


def _exaone4(metadata: Metadata) -> dict[str, Any]:
    window = _window(metadata)
    if window["sliding_window"]:
        return {**window, "sliding_window_pattern": 4}
    return {**window, "layer_types": ["full_attention"] * metadata.count("{arch}.block_count")}


def _softcaps(metadata: Metadata) -> dict[str, Any]:
    return _present(metadata, {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")})


def _present(metadata: Metadata, names: Mapping[str, str]) -> dict[str, Any]:
    """Returns the numbers that the file has, by the names in config.json; None for those that it lacks."""
    return {
        name: metadata.number(f"{{arch}}.{key}") if metadata.has(f"{{arch}}.{key}") else None
        for name, key in names.items()
    }


def _gemma_scale(metadata: Metadata, layers_of_largest: int) -> dict[str, Any]:
    """Returns the number whose square root divides attention: the file does not say it, and the largest model of the
    family has another than its head's size."""
    heads, hidden = metadata.count("{arch}.attention.head_count"), metadata.count("{arch}.embedding_length")
    largest = metadata.count("{arch}.block_count") == layers_of_largest
    return {"query_pre_attn_scalar": hidden / heads if largest else head_dim(metadata)}


def _gemma2(metadata: Metadata) -> dict[str, Any]:
    return _window(metadata) | _softcaps(metadata) | _gemma_scale(metadata, 46)


def _gemma3(metadata: Metadata) -> dict[str, Any]:
    local = metadata.number("{arch}.rope.freq_base_swa", 10000.0)
    return _window(metadata) | _softcaps(metadata) | _gemma_scale(metadata, 62) | {"rope_local_base_freq": local}


def _granite(metadata: Metadata) -> dict[str, Any]:
    names = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    return {name: value for name, value in _present(metadata, names).items() if value is not None}


_GEMMA: Final = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
_LLAMA: Final = {**_PROJECTIONS, **_INPUT_NORMS}
_NORMED_OUTPUTS: Final = {**_PROJECTIONS, **_HEAD_NORMS, **_OUTPUT_NORMS}

FAMILIES: Final = MappingProxyType(
    {
        "ernie4_5": Family(architecture="Ernie4_5ForCausalLM", model_type="ernie4_5", layer=_LLAMA),
        "exaone4": Family(
            architecture="Exaone4ForCausalLM",
            model_type="exaone4",
            layer=_NORMED_OUTPUTS,
            settings=_exaone4,
        ),
        "gemma": Family(
            architecture="GemmaForCausalLM", model_type="gemma", layer=_LLAMA, norm_offset=1.0, constants=_GEMMA
        ),
        "gemma2": Family(
            architecture="Gemma2ForCausalLM",
            model_type="gemma2",
            layer={**_PROJECTIONS, **_FOUR_NORMS},
            norm_offset=1.0,
            constants=_GEMMA,
            settings=_gemma2,
        ),
        "gemma3": Family(
            architecture="Gemma3ForCausalLM",
            model_type="gemma3_text",
            layer={**_PROJECTIONS, **_HEAD_NORMS, **_FOUR_NORMS},
            norm_offset=1.0,
            constants={**_GEMMA, "sliding_window_pattern": 6},
            settings=_gemma3,
        ),
        "glm4": Family(
            architecture="Glm4ForCausalLM",
            model_type="glm4",
            layer={
                **_FUSED_UP,
                **_INPUT_NORMS,
                "post_attention_norm": "post_self_attn_layernorm",
                "post_ffw_norm": "post_mlp_layernorm",
            },
        ),
        "granite": Family(
            architecture="GraniteForCausalLM",
            model_type="granite",
            layer=_LLAMA,
            permuted=True,
            settings=_granite,
        ),
        "llama": Family(architecture="LlamaForCausalLM", model_type="llama", layer=_LLAMA, permuted=True),
        "olmo2": Family(architecture="Olmo2ForCausalLM", model_type="olmo2", layer=_NORMED_OUTPUTS),
        "phi3": Family(
            architecture="Phi3ForCausalLM", model_type="phi3", layer={**_FUSED, **_INPUT_NORMS}, settings=_window
        ),
        "qwen2": Family(architecture="Qwen2ForCausalLM", model_type="qwen2", layer=_LLAMA),
        "qwen3": Family(architecture="Qwen3ForCausalLM", model_type="qwen3", layer={**_LLAMA, **_HEAD_NORMS}),
        "seed_oss": Family(
            architecture="SeedOssForCausalLM",
            model_type="seed_oss",
            layer={
                **_PROJECTIONS,
                "attn_norm": "input_layernorm",
                "post_attention_norm": "post_attention_layernorm",
            },
        ),
        "smollm3": Family(
            architecture="SmolLM3ForCausalLM",
            model_type="smollm3",
            layer=_LLAMA,
            permuted=True,
            constants={"no_rope_layer_interval": 4},
        ),
    }
)
# OLMo 3, which llama.cpp writes as OLMo 2 with a window.
_OLMO3: Final = Family(
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    layer=_NORMED_OUTPUTS,
    constants={"sliding_window_pattern": 4},
    settings=lambda metadata: {
        **_window(metadata),
        "rope_local_base_freq": metadata.number("{arch}.rope.freq_base", 10000.0),
    },
)


def family_of(file: GGUFFile) -> Family:
    """Returns the family of the model in `file`. Raises `GGUFError` if it is none of them."""
    metadata = Metadata(file.path, file.metadata)
    family = FAMILIES.get(metadata.architecture)
    if family is None:
        raise UnsupportedGGUF(
            f"{file.path} holds a {metadata.architecture!r} model; from GGUF files Octavo serves"
            f" {', '.join(sorted(FAMILIES))}; {_OTHERWISE}"
        )
    if metadata.architecture == "olmo2" and metadata.has("{arch}.attention.sliding_window"):
        family = _OLMO3
    return family


def head_dim(metadata: Metadata) -> int:
    heads, hidden = metadata.count("{arch}.attention.head_count"), metadata.count("{arch}.embedding_length")
    found = metadata.count("{arch}.attention.key_length", max(1, hidden // heads))
    if metadata.count("{arch}.attention.value_length", found) != found:
        raise UnsupportedGGUF(f"{metadata.path} has keys and values of different sizes, which is not implemented")
    return found


def tensors_of(file: GGUFFile, family: Family) -> Iterator[tuple[str, GGUFTensor]]:
    """Yields the weights in `file` by transformers' names. Raises `GGUFError` for one that has no place."""
    metadata = Metadata(file.path, file.metadata)
    layers = metadata.count("{arch}.block_count")
    for name, tensor in file.tensors.items():
        if name in _IN_CONFIG:
            continue
        told = family.transformers_name(name)
        layer = int(name.split(".")[1]) if told is not None and name.startswith("blk.") else 0
        if told is None or layer >= layers:
            raise UnsupportedGGUF(
                f"{file.path} has a tensor {name!r} that a {metadata.architecture!r} of {layers} layers has no place"
                f" for; {_OTHERWISE}"
            )
        yield told, tensor


def config_of(file: GGUFFile, *, quantized: bool) -> dict[str, Any]:
    """Returns the config.json of the model in `file`; with `quantized`, of the model with the weights in the file.

    Raises `GGUFError`.
    """
    family, metadata = family_of(file), Metadata(file.path, file.metadata)
    if metadata.count("{arch}.expert_count", 0, least=0):
        raise UnsupportedGGUF(
            f"{file.path} holds a mixture of experts, which is not served from GGUF files; {_OTHERWISE}"
        )
    layers = metadata.count("{arch}.block_count")
    if layers > _MOST_LAYERS:
        raise GGUFError(f"{file.path} announces {layers} layers, and no model has more than {_MOST_LAYERS}")
    tensors = dict(tensors_of(file, family))
    heads, hidden = metadata.count("{arch}.attention.head_count"), metadata.count("{arch}.embedding_length")
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": _vocab_size(file, metadata, hidden),
        "hidden_size": hidden,
        "intermediate_size": metadata.count("{arch}.feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.count("{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim(metadata),
        "hidden_act": "silu",
        "max_position_embeddings": metadata.count("{arch}.context_length"),
        "rms_norm_eps": metadata.number("{arch}.attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        **_biases(tensors),
        **_layer_types(metadata, layers),
        **family.constants,
        **family.settings(metadata),
        **_rotary(file, metadata),
        **(_weights(file, tensors) if quantized else {}),
        "dtype": "bfloat16",
    }


def _weights(file: GGUFFile, tensors: Mapping[str, GGUFTensor]) -> dict[str, Any]:
    """Says which weights belong to the config.json: whoever reads them sees whether they have changed since."""
    types = sorted({tensor.type.name for tensor in tensors.values() if tensor.type.block > 1})
    quantization = {"quantization_config": {"quant_method": "gguf", "types": types}} if types else {}
    return {"gguf_header": file.digest, **quantization}


def _vocab_size(file: GGUFFile, metadata: Metadata, hidden: int) -> int:
    """Returns the number of tokens. Raises `GGUFError` unless there is an embedding for each."""
    tokens, embedding = len(metadata.texts("tokenizer.ggml.tokens")), file.tensors.get("token_embd.weight")
    if embedding is None or embedding.shape != (tokens, hidden):
        found = "none" if embedding is None else list(embedding.shape)
        raise GGUFError(
            f"{file.path} has {tokens} tokens of {hidden} numbers each, and an embedding of {found}; convert the model"
            " again, or take another file of it"
        )
    return tokens


def _biases(tensors: Mapping[str, GGUFTensor]) -> dict[str, bool]:
    """Tells which biases the first layer has, under the keys of all families."""
    layer = "model.layers.0"
    attention = f"{layer}.self_attn.q_proj.bias" in tensors
    mlp = f"{layer}.mlp.down_proj.bias" in tensors
    output = f"{layer}.self_attn.o_proj.bias" in tensors
    return {"attention_bias": attention, "attention_out_bias": output, "mlp_bias": mlp, "use_bias": attention}


def _layer_types(metadata: Metadata, layers: int) -> dict[str, Any]:
    """Returns which layers slide, where the file lists them or says how often one does not."""
    key = "{arch}.attention.sliding_window_pattern"
    if not metadata.has(key):
        return {}
    if isinstance(metadata.values[f"{metadata.architecture}.attention.sliding_window_pattern"], int):
        return {"sliding_window_pattern": metadata.count(key)}
    slides = metadata.numbers(key, layers)
    return {"layer_types": ["sliding_attention" if each else "full_attention" for each in slides]}


def _rotary(file: GGUFFile, metadata: Metadata) -> dict[str, Any]:
    size, context = head_dim(metadata), metadata.count("{arch}.context_length")
    turning = metadata.count("{arch}.rope.dimension_count", size)
    scaling = _factors(file, metadata, context) or _scaling(metadata)
    beside = "original_max_position_embeddings"
    return {
        "rope_theta": metadata.number("{arch}.rope.freq_base", 10000.0),
        **({"partial_rotary_factor": turning / size} if turning != size else {}),
        **({"rope_scaling": scaling} if scaling else {}),
        # Some families have it here.
        **({beside: scaling[beside]} if beside in scaling else {}),
    }


def _factors(file: GGUFFile, metadata: Metadata, context: int) -> dict[str, Any]:
    """Returns the scaling of a file with a factor for each frequency: those of Llama 3, or long and short ones."""
    every, long, short = map(file.floats, _FACTORS)
    if every is not None:
        # One for all contexts.
        return _longrope(every, every, context, 1.0)
    if long is None or short is None:
        return {}
    original = metadata.count("{arch}.rope.scaling.original_context_length", context)
    stretch = context / original
    usual = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 and original > 1 else 1.0
    return _longrope(long, short, original, metadata.number("{arch}.rope.scaling.attn_factor", usual))


def _longrope(long: list[float], short: list[float], original: int, attention_factor: float) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "long_factor": long,
        "short_factor": short,
        "original_max_position_embeddings": original,
        "attention_factor": attention_factor,
    }


def _scaling(metadata: Metadata) -> dict[str, Any]:
    kind = metadata.text("{arch}.rope.scaling.type", "none")
    if kind in ("none", "longrope"):
        return {}
    factor = metadata.number("{arch}.rope.scaling.factor")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = metadata.count("{arch}.rope.scaling.original_context_length")
        given = metadata.number("{arch}.rope.scaling.attn_factor", 1.0)
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": metadata.number("{arch}.rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": metadata.number("{arch}.rope.scaling.yarn_beta_slow", 1.0),
            "attention_factor": given * (0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0),
        }
    raise UnsupportedGGUF(
        f"{metadata.path} scales its rotary embedding by {kind!r}, and none, linear, yarn and longrope are served;"
        f" {_OTHERWISE}"
    )
