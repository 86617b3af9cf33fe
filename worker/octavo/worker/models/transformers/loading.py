"""The loader of transformers models, which also gives the reason for refusing one."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from octavo.kernels.quantized import Quantized
from octavo.runtime.models.directory import CONTEXT_KEYS
from octavo.worker.loading.weights import WeightsError, WeightSource
from octavo.worker.models.config import checked_context
from octavo.worker.models.config_file import ModelConfigError, check_layers
from octavo.worker.models.linear import Linear, obstacle_to_quantized
from octavo.worker.models.transformers.attention import PAGED
from octavo.worker.models.transformers.check import UnsupportedModel
from octavo.worker.models.transformers.linear import emptied, put_quantized, stored_linears
from octavo.worker.models.transformers.names import StoredNames
from octavo.worker.models.transformers.shards import ModelShare, SharedTensor, shared_architecture

logger = logging.getLogger(__name__)
_CPU = torch.device("cpu")
_NOTHING: Mapping[str, str] = MappingProxyType({})
_CAUSAL_NAMES = frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
# The kinds of layers in config.json's `layer_types`. The check at start finds out how far chunks reach.
_ATTENDING = {"full_attention", "sliding_attention", "chunked_attention"}
# Rotary embeddings that change for all sequences of a batch with the longest one, beyond their original context.
_SHIFTING_ROTARY = ("dynamic", "longrope")


class _ConfigFile(msgspec.Struct):
    """Holds the keys of config.json that are read before transformers is asked."""

    architectures: list[str] | None = None
    model_type: str | None = None
    auto_map: dict[str, Any] | None = None


def read_transformers_config(directory: Path) -> Any:
    """Returns transformers' configuration object, without running code from `directory`. Raises `ModelConfigError`."""
    path = directory / "config.json"
    try:
        content = path.read_bytes()
        file = msgspec.json.decode(content, type=_ConfigFile)
        check_layers(msgspec.json.decode(content, type=dict[str, Any]))
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelConfigError(f"cannot read {path}: {error}") from error
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # Hundreds of classes read it, and raise as they like.
        if file.auto_map and file.model_type not in CONFIG_MAPPING:
            raise UnsupportedModel(
                f"transformers {transformers.__version__} has no model_type {file.model_type!r} of its own, and"
                " the code that auto_map names is never run; serve a model that needs none"
            ) from error
        reason = " ".join(str(error).split())
        raise ModelConfigError(f"transformers {transformers.__version__} cannot use {path}: {reason}") from error
    # Octavo unpacks quantised weights itself.
    vars(config).pop("quantization_config", None)
    return config


def model_class(config: Any) -> type[PreTrainedModel]:
    """Returns the class of transformers that `config` names. Raises `UnsupportedModel` if it cannot be served."""
    if config.is_encoder_decoder:
        raise UnsupportedModel("it is an encoder with a decoder, which attends to it across")
    named = [getattr(transformers, name) for name in config.architectures or () if name in _CAUSAL_NAMES]
    fitting = [each for each in named if _takes(each, config)]
    if not fitting:
        raise UnsupportedModel(
            f"architectures {config.architectures}, model_type {config.model_type!r}: no causal language model that"
            f" transformers {transformers.__version__} knows"
        )
    if reason := refusal(fitting[0]):
        raise UnsupportedModel(reason)
    if others := set(getattr(_text(config), "layer_types", None) or ()) - _ATTENDING:
        raise UnsupportedModel(f"it has layers that are not plain attention: {', '.join(sorted(others))}")
    found: type[PreTrainedModel] = fitting[0]
    return found


def _takes(architecture: Any, config: Any) -> bool:
    """Tells whether `config` belongs to `architecture`: by its class, or because transformers pairs the two."""
    paired = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), ())
    return isinstance(config, architecture.config_class) or architecture in (
        paired if isinstance(paired, tuple) else (paired,)
    )


def refusal(architecture: type[PreTrainedModel]) -> str | None:
    """Returns why no model of the class can be served, whatever its configuration; None: there is no such reason."""
    if architecture._is_stateful:
        return f"{architecture.__name__} has a recurrent state, which paged attention does not hold"
    if not architecture._supports_attention_backend:
        return f"{architecture.__name__} computes its attention itself: it is not pluggable in transformers"
    return None


def _text(config: Any) -> Any:
    """Returns the part of a configuration that is about text."""
    return config.get_text_config(decoder=True)


def context_length(config: Any, max_model_len: int | None) -> int:
    """Returns the tokens of the model's context, shortened to `max_model_len`. Raises `ModelConfigError` if that is
    longer."""
    text = _text(config)
    known = [value for key in CONTEXT_KEYS if isinstance(value := getattr(text, key, None), int) and value > 0]
    if not known and max_model_len is None:
        raise ModelConfigError("config.json does not say how long the context is; say so with --max-model-len")
    context = known[0] if known else max_model_len
    assert context is not None
    if max_model_len is not None and not 1 <= max_model_len <= context:
        raise ModelConfigError(f"a context of {max_model_len} tokens is asked for; the model has 1 to {context}")
    _refuse_shifting_rotary(text, max_model_len or context)
    return checked_context(max_model_len or context)


def _refuse_shifting_rotary(text: Any, context: int) -> None:
    of_model = getattr(text, "original_max_position_embeddings", None)
    for parameters in _rotary_parameters(getattr(text, "rope_parameters", None)):
        original = parameters.get("original_max_position_embeddings") or of_model or context
        if parameters.get("rope_type") in _SHIFTING_ROTARY and context > original:
            raise UnsupportedModel(
                f"its rotary embedding ({parameters['rope_type']}) changes with the longest sequence of a batch beyond"
                f" {original} tokens; with --max-model-len {original} it does not"
            )


def _rotary_parameters(parameters: Any) -> Iterator[dict[str, Any]]:
    """Yields the rotary parameters of the model, or of each kind of layer."""
    if not isinstance(parameters, dict):
        return
    if "rope_type" in parameters:
        yield parameters
    for nested in parameters.values():
        yield from _rotary_parameters(nested)


def empty_model(config: Any) -> Any:
    """Returns the model of `config` without values."""
    architecture: Any = model_class(config)
    with _constructing(config), torch.device("meta"):
        return architecture(config)


def load(
    config: Any,
    source: WeightSource,
    dtype: torch.dtype,
    share: ModelShare | None = None,
    linears: Mapping[str, str] = _NOTHING,
    device: torch.device = _CPU,
) -> Any:
    """Loads the model of `config`, or `share` of it, on the CPU in `dtype`, with the weights of `source`.

    For a share only its parts are read. `linears` are the parameters, by the stored names, of linear layers whose
    weights stay quantised if they are, on `device`, and can. Raises `WeightsError`.
    """
    architecture: Any = model_class(config)
    quantized: dict[str, Linear] = {}
    state = _state(source, config, dtype, share, linears, quantized, device)
    if share:
        architecture = shared_architecture(architecture, share)
    if quantized:
        architecture = emptied(architecture, quantized)
    try:
        with _quiet(), _constructing(config):
            model, info = architecture.from_pretrained(
                None,
                config=config,
                state_dict=state,
                dtype=dtype,
                attn_implementation=PAGED,
                experts_implementation="eager",
                local_files_only=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except RuntimeError as error:
        raise WeightsError(f"the weights do not fit config.json: {error}") from error
    _refuse_misfits(info, complete=not source.shapes())
    put_quantized(model, quantized)
    return model


def quantizable_linears(config: Any, source: WeightSource) -> dict[str, str]:
    """Returns the parameters of linear layers whose weights can stay quantised, by their names in `source`."""
    model = empty_model(config)
    stored = source.shapes() or _parameter_shapes(config)
    linears = stored_linears(model, StoredNames(model), stored)
    if getattr(_text(config), "tie_word_embeddings", False):
        # It is the embedding too, which is no linear layer.
        head = head_weight(model)
        return {name: parameter for name, parameter in linears.items() if parameter != head}
    return linears


def head_weight(model: Any) -> str | None:
    """Returns the name of the weight of the LM head; None if there is none."""
    head = model.get_output_embeddings()
    return next((f"{name}.weight" for name, module in model.named_modules() if module is head), None)


def _state(
    source: WeightSource,
    config: Any,
    dtype: torch.dtype,
    share: ModelShare | None,
    linears: Mapping[str, str],
    quantized: dict[str, Linear],
    device: torch.device,
) -> dict[str, Tensor]:
    """Returns the stored tensors as they are, for transformers to round; without any, all parameters of the model in
    `dtype`. Weights of `linears` that are quantised and stay so go to `quantized`, by the names of their parameters,
    and have no inputs in the state."""
    stored, told = source.shapes(), set[str]()
    state: dict[str, Tensor] = {}
    for name, shape in (stored or _parameter_shapes(config)).items():
        take = source.take_weight if name in linears else source.take
        tensor = _take(take, source, name, shape, share.tensor(name) if share else None)
        if isinstance(tensor, Quantized) and (reason := obstacle_to_quantized(device, tensor.format)):
            if reason not in told:
                told.add(reason)
                logger.info("quantised weights (%s) become %s: %s", tensor.format.name, dtype, reason)
            tensor = tensor.dequantize()
        if isinstance(tensor, Quantized):
            quantized[linears[name]] = Linear(tensor.to(device))
            tensor = torch.empty(tensor.shape[0], 0, dtype=dtype)
        state[name] = tensor if stored else tensor.to(dtype)
    source.finish()
    return state


def _parameter_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in empty_model(config).named_parameters()}


def _take(
    take: Callable[..., Tensor | Quantized],
    source: WeightSource,
    name: str,
    shape: tuple[int, ...],
    shared: SharedTensor | None,
) -> Tensor | Quantized:
    if shared is None:
        return take(name, shape)
    if shared.is_held:
        return take(name, shared.whole, shared.part)
    source.drop(name)
    return torch.zeros(shared.whole)


def _refuse_misfits(info: dict[str, Any], *, complete: bool) -> None:
    """Raises `WeightsError` on tensors that do not fit the model.

    With `complete`, tensors may be missing: all parameters were given, and the rest of a model's state keeps its start
    values.
    """
    if misfits := sorted(info["mismatched_keys"]):
        name, stored, expected = misfits[0]
        raise WeightsError(f"tensor {name!r} is {list(stored)} in the weights; config.json makes it {list(expected)}")
    if (missing := sorted(info["missing_keys"])) and not complete:
        raise WeightsError(f"the weights lack {len(missing)} tensors that config.json calls for: {_some(missing)}")
    if unexpected := sorted(info["unexpected_keys"]):
        raise WeightsError(
            f"the weights have {len(unexpected)} tensors that config.json has no place for: {_some(unexpected)}"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5])


@contextmanager
def _constructing(config: Any) -> Iterator[None]:
    """Raises `ModelConfigError` for a name that a model's class does not find: of an activation, of a kind of rotary
    embedding."""
    try:
        yield
    except (AttributeError, LookupError, NotImplementedError, TypeError, ValueError) as error:
        where = "".join(f"; {key} = {value!r} is what it does not know" for key, value in _named(config, error))
        raise ModelConfigError(
            f"transformers {transformers.__version__} cannot make the model of config.json:"
            f" {type(error).__name__}: {error}{where}; correct config.json, or see which version of transformers it"
            " needs"
        ) from error


def _named(config: Any, error: Exception) -> Iterator[tuple[str, str]]:
    """Yields the settings whose value is the very key that was not found."""
    if isinstance(error, KeyError) and error.args:
        yield from ((key, value) for key, value in _settings(config.to_dict()) if value == error.args[0])


def _settings(keys: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in keys.items():
        if isinstance(value, dict):
            yield from _settings(value)
        else:
            yield key, value


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences transformers' own progress bar and its report of tensors that were not loaded: Octavo has both."""
    logging: Any = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
