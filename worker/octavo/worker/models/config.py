"""What a decoder's config.json says, checked: whatever would change the result and is not implemented is refused."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

_FULL = "full_attention"
_SLIDING = "sliding_attention"


class ConfigError(Exception):
    """A config.json that is broken, or asks for something Octavo's native models do not do."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """Where the members of the Llama family differ. A bias that is None is config.json's to choose."""

    qkv_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool | None = None
    qk_norm: bool = False
    # The attention window of a config.json that does not name one; None: the family has no windows.
    default_sliding_window: int | None = None
    # Whether config.json says which layers have the window (`use_sliding_window` and what goes with it), not all.
    window_by_layer: bool = False


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(),
    "MistralForCausalLM": Architecture(qkv_bias=False, output_bias=False, mlp_bias=False, default_sliding_window=4096),
    "Qwen2ForCausalLM": Architecture(
        qkv_bias=True, output_bias=False, mlp_bias=False, default_sliding_window=4096, window_by_layer=True
    ),
    "Qwen3ForCausalLM": Architecture(mlp_bias=False, qk_norm=True, default_sliding_window=4096, window_by_layer=True),
}


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """Rotary embedding: base frequency and, for `llama3` and `linear`, how positions are stretched."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder of the Llama family, in numbers. `windows`: how many tokens each layer attends to, the querying one
    included; 0: all."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_model_len: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rotary: RotaryConfig
    windows: tuple[int, ...]


class _File(msgspec.Struct):
    """The keys of config.json that decide the result, with the defaults of the families above; others are ignored, as
    transformers' classes for these families ignore them."""

    architectures: list[str]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    pretraining_tp: int = 1
    partial_rotary_factor: float = 1.0
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    use_sliding_window: bool = False
    sliding_window: int | msgspec.UnsetType | None = msgspec.UNSET
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    quantization_config: dict[str, Any] | None = None
    auto_map: dict[str, Any] | None = None


def read_config(directory: Path, max_model_len: int | None = None) -> DecoderConfig:
    """The configuration in `directory`; `max_model_len` shortens the context. Raises `ConfigError`."""
    path = directory / "config.json"
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    try:
        return _decoder_config(file, max_model_len)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _decoder_config(file: _File, max_model_len: int | None) -> DecoderConfig:
    architecture = _architecture(file)
    _refuse_unimplemented(file)
    context = _context_length(file, max_model_len)
    kv_heads = file.num_key_value_heads or file.num_attention_heads
    if min(file.num_attention_heads, kv_heads) < 1 or file.num_attention_heads % kv_heads:
        raise ConfigError(f"{file.num_attention_heads} attention heads do not share {kv_heads} KV heads evenly")
    return DecoderConfig(
        vocab_size=file.vocab_size,
        hidden_size=file.hidden_size,
        intermediate_size=file.intermediate_size,
        num_layers=file.num_hidden_layers,
        num_heads=file.num_attention_heads,
        num_kv_heads=kv_heads,
        head_dim=file.head_dim or file.hidden_size // file.num_attention_heads,
        rms_norm_eps=file.rms_norm_eps,
        max_model_len=context,
        tie_word_embeddings=file.tie_word_embeddings,
        qkv_bias=_choose(architecture.qkv_bias, file.attention_bias),
        output_bias=_choose(architecture.output_bias, file.attention_bias),
        mlp_bias=_choose(architecture.mlp_bias, file.mlp_bias),
        qk_norm=architecture.qk_norm,
        rotary=_rotary(file),
        windows=_windows(file, architecture, context),
    )


def _choose(fixed: bool | None, configured: bool) -> bool:
    return configured if fixed is None else fixed


def _architecture(file: _File) -> Architecture:
    if file.auto_map is not None:
        raise ConfigError("auto_map asks for code from the model directory to be run; Octavo never does that")
    for name in file.architectures:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    raise ConfigError(f"architectures {file.architectures} is none of {', '.join(sorted(ARCHITECTURES))}")


def _refuse_unimplemented(file: _File) -> None:
    for accepted, key, value in (
        (file.hidden_act == "silu", "hidden_act", file.hidden_act),
        (file.pretraining_tp == 1, "pretraining_tp", file.pretraining_tp),
        (file.partial_rotary_factor == 1, "partial_rotary_factor", file.partial_rotary_factor),
        (file.quantization_config is None, "quantization_config", file.quantization_config),
    ):
        if not accepted:
            raise ConfigError(f"{key} = {value!r} is not implemented")


def _context_length(file: _File, max_model_len: int | None) -> int:
    if max_model_len is None:
        return file.max_position_embeddings
    if not 1 <= max_model_len <= file.max_position_embeddings:
        raise ConfigError(
            f"a context of {max_model_len} tokens is asked for; the model has 1 to {file.max_position_embeddings}"
        )
    return max_model_len


def _windows(file: _File, architecture: Architecture, context: int) -> tuple[int, ...]:
    """Each layer's window. One that takes in the whole context is none."""
    window = _sliding_window(file, architecture)
    if window is None or window >= context:
        window = 0
    elif architecture.default_sliding_window is None:
        raise ConfigError(
            f"sliding_window = {window} is not implemented for {file.architectures};"
            f" with --max-model-len {window} it makes no difference"
        )
    return tuple(window if layer_type == _SLIDING else 0 for layer_type in _layer_types(file, architecture))


def _sliding_window(file: _File, architecture: Architecture) -> int | None:
    """The window of the layers that slide; None if none does."""
    if architecture.window_by_layer and not file.use_sliding_window:
        return None
    window = file.sliding_window
    if window is msgspec.UNSET:
        return architecture.default_sliding_window
    if window is not None and window < 1:
        raise ConfigError(f"sliding_window = {window} leaves a token nothing to attend to")
    return window


def _layer_types(file: _File, architecture: Architecture) -> list[str]:
    """What kind of attention each layer has, as transformers derives it where config.json does not say."""
    slides = _sliding_window(file, architecture) is not None
    first = file.max_window_layers if architecture.window_by_layer else 0
    derived = [_SLIDING if slides and layer >= first else _FULL for layer in range(file.num_hidden_layers)]
    layer_types = derived if file.layer_types is None else file.layer_types
    if architecture.window_by_layer and slides:
        fits = len(layer_types) == len(derived) and set(layer_types) <= {_FULL, _SLIDING}
    else:
        fits = layer_types == derived
    if not fits:
        raise ConfigError(
            f"layer_types = {layer_types!r} is not implemented for {len(derived)} layers with"
            f" {'a' if slides else 'no'} sliding window in force"
        )
    return layer_types


def _rotary(file: _File) -> RotaryConfig:
    """Both layouts: `rope_theta` beside `rope_scaling`, and transformers 5's `rope_parameters` with all in one."""
    parameters = {**(file.rope_scaling or {}), **(file.rope_parameters or {})}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    theta = parameters.get("rope_theta", file.rope_theta)
    try:
        rotary = RotaryConfig(theta=10000.0 if theta is None else float(theta), kind=kind)
        match kind:
            case "default":
                pass
            case "linear":
                rotary = RotaryConfig(rotary.theta, kind, factor=float(parameters["factor"]))
            case "llama3":
                rotary = RotaryConfig(
                    rotary.theta,
                    kind,
                    factor=float(parameters["factor"]),
                    low_frequency_factor=float(parameters["low_freq_factor"]),
                    high_frequency_factor=float(parameters["high_freq_factor"]),
                    original_max_position=int(
                        parameters.get("original_max_position_embeddings", file.max_position_embeddings)
                    ),
                )
            case _:
                raise ConfigError(f"rope_type = {kind!r} is not implemented; default, linear and llama3 are")
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"the rotary embedding's parameters {parameters} are not usable: {error!r}") from error
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"partial_rotary_factor = {parameters['partial_rotary_factor']!r} is not implemented")
    return rotary
