"""The configuration of a decoder, from its config.json: an unimplemented setting that would change the result is
refused."""

from dataclasses import dataclass
from pathlib import Path

from octavo.wire.base import MAX_TOKENS
from octavo.worker.models.architectures import ARCHITECTURES, FULL, SLIDING, Architecture
from octavo.worker.models.config_file import ConfigFile, ModelConfigError, UnsupportedSetting, read_config_file
from octavo.worker.models.rotary import RotaryConfig, rotary_config


def layer_types(file: ConfigFile, architecture: Architecture) -> list[str]:
    """Returns `FULL` or `SLIDING` for each layer, as transformers derives it where config.json does not list them."""
    types = file.layer_types if architecture.reads("layer_types") else None
    types = _derived(file, architecture) if types is None else types
    possible = {FULL} if _window(file) is None else {FULL, SLIDING}
    if file.layer_types not in (None, types) or len(types) != file.num_hidden_layers or not set(types) <= possible:
        raise UnsupportedSetting(
            f"layer_types = {file.layer_types or types!r} is not implemented for {file.num_hidden_layers} layers with"
            f" {'no' if _window(file) is None else 'a'} sliding window in force"
        )
    return types


def windows(file: ConfigFile, architecture: Architecture, types: list[str], context: int) -> tuple[int, ...]:
    """Returns the number of tokens that each layer of `types` attends to; 0: all, also if the window holds the whole
    context."""
    window = _window(file)
    if window is None or window >= context:
        window = 0
    elif architecture.layer_pattern == "none":
        raise UnsupportedSetting(
            f"sliding_window = {window} is not implemented for {file.architectures};"
            f" with --max-model-len {window} it makes no difference"
        )
    return tuple(window if layer_type == SLIDING else 0 for layer_type in types)


def rotated(file: ConfigFile, architecture: Architecture, types: list[str]) -> list[bool]:
    """Tells for each layer of `types` whether it has rotary positions."""
    if architecture.full_layers_unrotated and file.sliding_window is not None:
        return [layer_type == SLIDING for layer_type in types]
    return _rotated(file)


def _window(file: ConfigFile) -> int | None:
    """Returns the window of the layers that slide; None if none does."""
    window = file.sliding_window if file.use_sliding_window else None
    if window is not None and window < 1:
        raise ModelConfigError(f"sliding_window = {window} leaves a token nothing to attend to")
    return window


def _derived(file: ConfigFile, architecture: Architecture) -> list[str]:
    return [SLIDING if slides else FULL for slides in _slides(file, architecture)]


def _slides(file: ConfigFile, architecture: Architecture) -> list[bool]:
    layers = range(file.num_hidden_layers)
    match architecture.layer_pattern:
        case "none":
            return [False for _ in layers]
        case "all":
            return [_window(file) is not None for _ in layers]
        case "every other":
            return [layer % 2 == 0 for layer in layers]
        case "from max_window_layers":
            return [_window(file) is not None and layer >= file.max_window_layers for layer in layers]
        case "all but nth":
            return [(layer + 1) % _pattern(file) != 0 for layer in layers]
        case "all but first of four":
            return [layer % 4 != 0 for layer in layers]
        case "unrotated":
            return [_window(file) is not None and not turns for turns in _rotated(file)]


def _rotated(file: ConfigFile) -> list[bool]:
    layers = range(file.num_hidden_layers)
    if file.no_rope_layers is not None:
        if len(file.no_rope_layers) != len(layers):
            raise ModelConfigError(f"no_rope_layers has {len(file.no_rope_layers)} entries for {len(layers)} layers")
        return [bool(turns) for turns in file.no_rope_layers]
    if file.no_rope_layer_interval is None:
        return [True for _ in layers]
    return [(layer + 1) % file.no_rope_layer_interval != 0 for layer in layers]


def _pattern(file: ConfigFile) -> int:
    pattern = file.sliding_window_pattern
    if not isinstance(pattern, int) or pattern < 1:
        raise UnsupportedSetting(f"sliding_window_pattern = {pattern!r} is not implemented; a number of layers is")
    return pattern


__all__ = ["ARCHITECTURES", "DecoderConfig", "ModelConfigError", "RotaryConfig", "UnsupportedSetting", "read_config"]

_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Holds a decoder of the Llama family in numbers.

    `windows` holds the number of tokens that each layer attends to, the querying one included; 0: all. `rotaries` holds
    the rotary embedding of each layer; None: it has none. A soft-cap of 0 is none. `logits_scale` multiplies the
    logits, before `final_softcap` bounds them.
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    activation: str
    max_model_len: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    attention_scale: float
    attention_softcap: float
    embedding_scale: float
    residual_scale: float
    logits_scale: float
    final_softcap: float
    rotaries: tuple[RotaryConfig | None, ...]
    windows: tuple[int, ...]


def read_config(directory: Path, max_model_len: int | None = None, *, headless: bool = False) -> DecoderConfig:
    """Reads the configuration in `directory`; `max_model_len` shortens the context, and a model that is `headless` may
    have no LM head.

    Raises `ModelConfigError`: as `UnsupportedSetting` if only this family lacks the setting.
    """
    path = directory / "config.json"
    try:
        architecture, file = read_config_file(path, headless=headless)
        return _decoder_config(file, architecture, max_model_len)
    except ModelConfigError as error:
        raise type(error)(f"{path}: {error}") from None


def _decoder_config(file: ConfigFile, architecture: Architecture, max_model_len: int | None) -> DecoderConfig:
    _refuse_unimplemented(file)
    context = _context_length(file, max_model_len)
    head_dim = _head_dim(file)
    types = layer_types(file, architecture)
    return DecoderConfig(
        architecture=architecture,
        vocab_size=file.vocab_size,
        hidden_size=file.hidden_size,
        intermediate_size=file.intermediate_size,
        num_layers=file.num_hidden_layers,
        num_heads=file.num_attention_heads,
        num_kv_heads=_kv_heads(file),
        head_dim=head_dim,
        rms_norm_eps=file.rms_norm_eps,
        activation=_activation(file, architecture),
        max_model_len=context,
        tie_word_embeddings=file.tie_word_embeddings,
        qkv_bias=_bias(file, architecture.qkv_bias),
        output_bias=_bias(file, architecture.output_bias),
        mlp_bias=_bias(file, architecture.mlp_bias),
        attention_scale=_attention_scale(file, head_dim),
        attention_softcap=file.attn_logit_softcapping or 0.0,
        embedding_scale=file.embedding_multiplier,
        residual_scale=file.residual_multiplier,
        logits_scale=1.0 / file.logits_scaling,
        final_softcap=file.final_logit_softcapping or 0.0,
        rotaries=_rotaries(file, architecture, types, head_dim, context),
        windows=windows(file, architecture, types, context),
    )


def _refuse_unimplemented(file: ConfigFile) -> None:
    for accepted, key, value in (
        (file.pretraining_tp in (None, 1), "pretraining_tp", file.pretraining_tp),
        (not file.use_bidirectional_attention, "use_bidirectional_attention", file.use_bidirectional_attention),
    ):
        if not accepted:
            raise UnsupportedSetting(f"{key} = {value!r} is not implemented")


def _activation(file: ConfigFile, architecture: Architecture) -> str:
    key = "hidden_act" if file.hidden_activation is None else "hidden_activation"
    name: str = getattr(file, key)
    activation = architecture.activations.get(name, name)
    if activation not in _ACTIVATIONS:
        raise UnsupportedSetting(f"{key} = {name!r} is not implemented; {', '.join(_ACTIVATIONS)} are")
    return activation


def _kv_heads(file: ConfigFile) -> int:
    kv_heads = file.num_key_value_heads or file.num_attention_heads
    if file.num_attention_heads % kv_heads:
        raise ModelConfigError(f"{file.num_attention_heads} attention heads do not share {kv_heads} KV heads evenly")
    return kv_heads


def _head_dim(file: ConfigFile) -> int:
    head_dim = file.head_dim or file.hidden_size // file.num_attention_heads
    if not head_dim:
        raise ModelConfigError(
            f"a hidden size of {file.hidden_size} leaves {file.num_attention_heads} heads nothing each"
        )
    return head_dim


def _bias(file: ConfigFile, bias: bool | str) -> bool:
    return bool(getattr(file, bias)) if isinstance(bias, str) else bias


def _attention_scale(file: ConfigFile, head_dim: int) -> float:
    if file.attention_multiplier is not None:
        return file.attention_multiplier
    return float((file.query_pre_attn_scalar or head_dim) ** -0.5)


def _context_length(file: ConfigFile, max_model_len: int | None) -> int:
    if max_model_len is None:
        return checked_context(file.max_position_embeddings)
    if not 1 <= max_model_len <= file.max_position_embeddings:
        raise ModelConfigError(
            f"a context of {max_model_len} tokens is asked for; the model has 1 to {file.max_position_embeddings}"
        )
    return checked_context(max_model_len)


def checked_context(context: int) -> int:
    """Returns `context`. Raises `ModelConfigError` if no request can be that long."""
    if context > MAX_TOKENS:
        raise ModelConfigError(
            f"the context has {context} tokens, and no request has more than {MAX_TOKENS}: give --max-model-len, as"
            " many as requests need"
        )
    return context


def _rotaries(
    file: ConfigFile, architecture: Architecture, types: list[str], head_dim: int, context: int
) -> tuple[RotaryConfig | None, ...]:
    configs = {kind: rotary_config(file, architecture, kind, head_dim, context) for kind in dict.fromkeys(types)}
    turns = rotated(file, architecture, types)
    return tuple(configs[kind] if turned else None for kind, turned in zip(types, turns, strict=True))
