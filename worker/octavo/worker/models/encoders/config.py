"""`EncoderConfig`: the config.json of an encoder, checked, with the names of its tensors in a checkpoint."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from octavo.worker.models.config_file import MAX_LAYERS, ModelConfigError, UnsupportedSetting
from octavo.worker.models.encoders.families import FAMILIES
from octavo.worker.models.linear import ACTIVATIONS
from octavo.worker.models.rotary import RotaryConfig

_Count = Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
_GLOBAL_THETA, _LOCAL_THETA = 160_000.0, 10_000.0
_SLIDING = "sliding_attention"


class EncoderFile(msgspec.Struct):
    """Holds the keys of an encoder's config.json that decide the result."""

    model_type: str
    vocab_size: _Count
    hidden_size: _Count
    intermediate_size: _Count
    num_hidden_layers: Annotated[int, msgspec.Meta(ge=1, le=MAX_LAYERS)]
    num_attention_heads: _Count
    max_position_embeddings: _Count
    architectures: list[str] = msgspec.field(default_factory=list)
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-12
    type_vocab_size: Annotated[int, msgspec.Meta(ge=0)] = 2
    pad_token_id: int | None = 0
    position_embedding_type: str | None = "absolute"
    is_decoder: bool = False
    # ModernBERT's.
    hidden_activation: str = "gelu"
    norm_eps: float = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    classifier_bias: bool = False
    classifier_activation: str = "gelu"
    classifier_pooling: str = "cls"
    local_attention: int = 128
    layer_types: list[str] | None = None
    global_attn_every_n_layers: Annotated[int, msgspec.Meta(ge=1)] = 3
    global_rope_theta: float = _GLOBAL_THETA
    local_rope_theta: float = _LOCAL_THETA
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    # Of a classifier.
    num_labels: Annotated[int, msgspec.Meta(ge=1)] | None = None
    id2label: dict[str, str] | None = None
    problem_type: str | None = None


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names the tensors of a family; `{}` stands for the number of a layer. `prefixes` come before all of them where
    the encoder is a part of a larger model. An empty name: there is none."""

    prefixes: tuple[str, ...]
    tokens: str
    positions: str
    types: str
    embedding_norm: str
    qkv: tuple[str, ...]
    attention_output: str
    attention_norm: str
    up: str
    down: str
    mlp_norm: str
    final_norm: str = ""


_BERT_NAMES = TensorNames(
    prefixes=("", "bert.", "roberta."),
    tokens="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    types="embeddings.token_type_embeddings",
    embedding_norm="embeddings.LayerNorm",
    qkv=tuple(f"encoder.layer.{{}}.attention.self.{part}" for part in ("query", "key", "value")),
    attention_output="encoder.layer.{}.attention.output.dense",
    attention_norm="encoder.layer.{}.attention.output.LayerNorm",
    up="encoder.layer.{}.intermediate.dense",
    down="encoder.layer.{}.output.dense",
    mlp_norm="encoder.layer.{}.output.LayerNorm",
)
_MODERN_NAMES = TensorNames(
    prefixes=("", "model."),
    tokens="embeddings.tok_embeddings",
    positions="",
    types="",
    embedding_norm="embeddings.norm",
    qkv=("layers.{}.attn.Wqkv",),
    attention_output="layers.{}.attn.Wo",
    attention_norm="layers.{}.attn_norm",
    up="layers.{}.mlp.Wi",
    down="layers.{}.mlp.Wo",
    mlp_norm="layers.{}.mlp_norm",
    final_norm="final_norm",
)


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Holds an encoder in numbers.

    `num_types` counts the embeddings that tell the texts of a pair apart. The first position has the number
    `first_position`. `pre_norm`: norms stand before attention and MLP rather than behind them; `gated`: the MLP's
    activation multiplies what stands beside it. `windows` holds how far the tokens of each layer see, themselves
    included, to either side; 0: everything. `rotaries`: each layer's, None where positions are embedded.
    """

    family: str
    names: TensorNames
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_model_len: int
    num_types: int
    first_position: int
    activation: str
    norm_eps: float
    norm_bias: bool
    attention_bias: bool
    mlp_bias: bool
    pre_norm: bool
    gated: bool
    windows: tuple[int, ...]
    rotaries: tuple[RotaryConfig | None, ...]

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def num_positions(self) -> int:
        """Returns how many positions are embedded, those before the first one too."""
        return self.first_position + self.max_model_len


def read_file(directory: Path) -> EncoderFile:
    """Reads config.json. Raises `ModelConfigError`."""
    path = directory / "config.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=EncoderFile)
    except (OSError, msgspec.DecodeError) as error:
        raise ModelConfigError(f"{path} is not the configuration of an encoder: {error}") from error


def encoder_config(file: EncoderFile, max_model_len: int | None = None) -> EncoderConfig:
    """Checks and resolves the configuration; `max_model_len` shortens the context. Raises `ModelConfigError`."""
    if file.model_type not in FAMILIES:
        raise UnsupportedSetting(f"model_type = {file.model_type!r} is no encoder that is computed here")
    if file.is_decoder:
        raise UnsupportedSetting("is_decoder is set: as a decoder this family is not served")
    if file.hidden_size % file.num_attention_heads:
        raise ModelConfigError(f"{file.num_attention_heads} heads do not share {file.hidden_size} dimensions")
    family = FAMILIES[file.model_type]
    config = _modern(file) if family == "modernbert" else _bert(file, family)
    if config.activation not in ACTIVATIONS:
        raise UnsupportedSetting(f"the activation {config.activation!r} is not implemented")
    if max_model_len is not None:
        if max_model_len > config.max_model_len:
            raise ModelConfigError(f"--max-model-len {max_model_len} exceeds the model's {config.max_model_len}")
        config = replace(config, max_model_len=max_model_len)
    return config


def _bert(file: EncoderFile, family: str) -> EncoderConfig:
    if file.position_embedding_type not in (None, "absolute"):
        raise UnsupportedSetting(f"position_embedding_type = {file.position_embedding_type!r} is not implemented")
    # RoBERTa counts positions from the one behind the padding's.
    first = (file.pad_token_id or 0) + 1 if family == "roberta" else 0
    if first >= file.max_position_embeddings:
        raise ModelConfigError(f"{file.max_position_embeddings} positions leave none after the first {first}")
    return EncoderConfig(
        family=family,
        names=_BERT_NAMES,
        **_sizes(file),
        max_model_len=file.max_position_embeddings - first,
        num_types=file.type_vocab_size,
        first_position=first,
        activation=file.hidden_act,
        norm_eps=file.layer_norm_eps,
        norm_bias=True,
        attention_bias=True,
        mlp_bias=True,
        pre_norm=False,
        gated=False,
        windows=(0,) * file.num_hidden_layers,
        rotaries=(None,) * file.num_hidden_layers,
    )


def _modern(file: EncoderFile) -> EncoderConfig:
    layers = range(file.num_hidden_layers)
    every = file.global_attn_every_n_layers
    kinds = file.layer_types or [_SLIDING if layer % every else "full_attention" for layer in layers]
    if len(kinds) != len(layers):
        raise ModelConfigError(f"layer_types has {len(kinds)} entries for {len(layers)} layers")
    slides = [kind == _SLIDING for kind in kinds]
    head_dim = file.hidden_size // file.num_attention_heads
    full, sliding = (RotaryConfig(_theta(file, local=local), head_dim) for local in (False, True))
    return EncoderConfig(
        family="modernbert",
        names=_MODERN_NAMES,
        **_sizes(file),
        max_model_len=file.max_position_embeddings,
        num_types=0,
        first_position=0,
        activation=file.hidden_activation,
        norm_eps=file.norm_eps,
        norm_bias=file.norm_bias,
        attention_bias=file.attention_bias,
        mlp_bias=file.mlp_bias,
        pre_norm=True,
        gated=True,
        # `local_attention` counts both sides.
        windows=tuple(file.local_attention // 2 + 1 if slide else 0 for slide in slides),
        rotaries=tuple(sliding if slide else full for slide in slides),
    )


def _sizes(file: EncoderFile) -> dict[str, Any]:
    return {
        "vocab_size": file.vocab_size,
        "hidden_size": file.hidden_size,
        "intermediate_size": file.intermediate_size,
        "num_layers": file.num_hidden_layers,
        "num_heads": file.num_attention_heads,
    }


def _theta(file: EncoderFile, *, local: bool) -> float:
    if file.rope_scaling is not None:
        raise UnsupportedSetting("rope_scaling of an encoder is not implemented")
    given = (file.rope_parameters or {}).get(_SLIDING if local else "full_attention") or {}
    if not isinstance(given, dict) or given.get("rope_type", "default") != "default":
        raise UnsupportedSetting(f"rope_parameters = {file.rope_parameters} are not implemented for an encoder")
    theta = given.get("rope_theta", file.local_rope_theta if local else file.global_rope_theta)
    if not isinstance(theta, float | int) or theta <= 1.0:
        raise ModelConfigError(f"a base frequency of {theta!r} makes no waves of different lengths")
    return float(theta)
