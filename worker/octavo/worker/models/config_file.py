"""config.json as the Llama family reads it: the keys that decide the result, with the family's defaults."""

import re
from pathlib import Path
from typing import Annotated, Any

import msgspec

from octavo.worker.models.architectures import ARCHITECTURES, Architecture


class ModelConfigError(Exception):
    """Raised for a config.json that is broken, or asks for something Octavo does not do."""


class UnsupportedSetting(ModelConfigError):
    """Raised for a sound config.json of a model that the native families do not compute."""


# A limit beyond what positions and token ids can count to.
_MOST = (1 << 31) - 1
# A limit of layers, some ten times as many as any model has. Configurations list something for each, in every class
# that reads them.
MAX_LAYERS = 2048
# How transformers calls the same layers without a head, and with one for classes.
_OTHER_HEADS = re.compile("(Model|ForSequenceClassification)$")
_LAYER_KEYS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_encoder_layers", "num_decoder_layers")
_Count = Annotated[int, msgspec.Meta(ge=1, le=_MOST)]
_Factor = Annotated[float, msgspec.Meta(gt=0.0)]

# Keys that some families have and others ignore.
FAMILY_KEYS = frozenset(
    {
        "attention_bias",
        "attention_multiplier",
        "attention_out_bias",
        "attn_logit_softcapping",
        "embedding_multiplier",
        "final_logit_softcapping",
        "hidden_activation",
        "logits_scaling",
        "max_window_layers",
        "mlp_bias",
        "no_rope_layer_interval",
        "no_rope_layers",
        "query_pre_attn_scalar",
        "residual_multiplier",
        "rope_local_base_freq",
        "sliding_window_pattern",
        "use_bias",
        "use_sliding_window",
    }
)


class ConfigFile(msgspec.Struct):
    """Holds the keys of config.json that decide the result; others are ignored, as transformers' classes ignore
    them."""

    architectures: list[str]
    vocab_size: _Count
    hidden_size: _Count
    intermediate_size: _Count
    num_hidden_layers: _Count
    num_attention_heads: _Count
    max_position_embeddings: _Count
    num_key_value_heads: _Count | None = None
    head_dim: _Count | None = None
    hidden_act: str = "silu"
    hidden_activation: str | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    use_bias: bool = False
    pretraining_tp: int | None = 1
    use_bidirectional_attention: bool | str | None = None
    # Rotary embedding.
    rope_theta: _Factor | None = None
    rope_local_base_freq: _Factor | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float | None = None
    original_max_position_embeddings: _Count | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: _Count | None = None
    # Sliding windows.
    use_sliding_window: bool = True
    sliding_window: int | None = None
    sliding_window_pattern: int | str | None = None
    max_window_layers: int = 0
    layer_types: list[str] | None = None
    # Scales and bounds.
    query_pre_attn_scalar: _Factor | None = None
    attn_logit_softcapping: _Factor | None = None
    final_logit_softcapping: _Factor | None = None
    embedding_multiplier: float = 1.0
    attention_multiplier: float | None = None
    residual_multiplier: float = 1.0
    logits_scaling: _Factor = 1.0


# The methods whose weights are 8-bit floats.
_FLOATS = frozenset({"fp8", "finegrained_fp8"})


class _Quantized(msgspec.Struct):
    quantization_config: dict[str, Any] | None = None


def read_config_file(path: Path, *, headless: bool = False) -> tuple[Architecture, ConfigFile]:
    """Reads the file at `path` and returns the architecture that it names, and its values; `headless`: it may name one
    without an LM head, or with another head. Raises `ModelConfigError`.

    Code that `auto_map` names is not run, and not needed: an architecture of this name is known here.
    """
    try:
        keys = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        check_layers(keys)
        architecture = _architecture(keys, headless=headless)
        read = {key: value for key, value in keys.items() if key not in FAMILY_KEYS or architecture.reads(key)}
        return architecture, msgspec.convert({**architecture.defaults, **read}, ConfigFile)
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelConfigError(f"cannot read it: {error}") from error


def is_quantized(directory: Path) -> bool:
    """Tells whether the weights in `directory` are quantised, to integers or to floats. Raises `ModelConfigError`."""
    return _quantization(directory) is not None


def has_quantized_integers(directory: Path) -> bool:
    """Tells whether the weights in `directory` are quantised to integers, by which CPUs multiply. Raises
    `ModelConfigError`."""
    config = _quantization(directory)
    if config is None or config.get("quant_method") in _FLOATS:
        return False
    groups = config.get("config_groups")
    weights = [group.get("weights") for group in groups.values()] if isinstance(groups, dict) else []
    return not weights or any(not isinstance(each, dict) or each.get("type") != "float" for each in weights)


def _quantization(directory: Path) -> dict[str, Any] | None:
    path = directory / "config.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Quantized).quantization_config
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelConfigError(f"{path}: cannot read it: {error}") from error


def check_layers(keys: dict[str, Any]) -> None:
    """Refuses more layers than any model has, wherever `keys` of a config.json give their number.

    It comes before anything makes lists of them. Raises `ModelConfigError`.
    """
    for key in _LAYER_KEYS:
        number = keys.get(key)
        if isinstance(number, int | float) and number > MAX_LAYERS:
            raise ModelConfigError(
                f"{key} = {number} is more than the {MAX_LAYERS} layers that a model may have; correct it"
            )
    for nested in keys.values():
        if isinstance(nested, dict):
            check_layers(nested)


def _architecture(keys: dict[str, Any], *, headless: bool) -> Architecture:
    names = msgspec.convert(keys.get("architectures", []), list[str])
    for name in names:
        known = _OTHER_HEADS.sub("ForCausalLM", name) if headless else name
        if known in ARCHITECTURES:
            return ARCHITECTURES[known]
    raise UnsupportedSetting(f"architectures {names} is none of {', '.join(sorted(ARCHITECTURES))}")
