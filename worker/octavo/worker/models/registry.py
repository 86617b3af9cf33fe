"""The registry of models: it loads the model in a directory, by Octavo's own family or by transformers."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from octavo.kernels.quantized import FORMATS
from octavo.worker.loading.load_format import open_weights
from octavo.worker.loading.quantized_on_load import ENDS
from octavo.worker.loading.weights import WeightSource
from octavo.worker.models.config import read_config
from octavo.worker.models.config_file import ModelConfigError, UnsupportedSetting, is_quantized
from octavo.worker.models.decoder import Decoder
from octavo.worker.models.linear import obstacle_to_quantized
from octavo.worker.models.llama import LlamaModel
from octavo.worker.tensor_parallel.group import SINGLE, ShardGroup

logger = logging.getLogger(__name__)


def load_model(
    directory: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int | None = None,
    load_format: str = "auto",
    model_impl: str = "auto",
    quantization: str = "none",
    dequantized: bool = False,
    group: ShardGroup = SINGLE,
) -> Decoder:
    """Loads the model in `directory`, its weights on `device` in `dtype`; `max_model_len` shortens its context.

    Each rank of a `group` loads its share. `model_impl` is one of the words of `MODEL_IMPL`, `quantization` of
    `QUANTIZATION`; `dequantized`: what is quantised becomes numbers of `dtype` again. Raises `ModelConfigError` or
    `WeightsError`.
    """
    if quantization != "none" and (reason := obstacle_to_quantized(device, FORMATS[quantization])):
        raise ModelConfigError(
            f"--quantization {quantization} would only lose where Octavo's own kernels cannot multiply by what is"
            f" quantised: {reason}; or leave it out"
        )
    open_source = partial(
        open_weights, directory, load_format, quantization=quantization, dequantized=dequantized, ranks=group.size
    )
    quantized = not dequantized and (quantization != "none" or (load_format != "dummy" and is_quantized(directory)))
    if model_impl == "transformers":
        return _transformers_model(directory, dtype, device, max_model_len, open_source, group, quantized)
    try:
        config = read_config(directory, max_model_len)
    except UnsupportedSetting as error:
        if model_impl == "native":
            raise
        logger.info("%s; transformers computes this model", error)
        return _transformers_model(directory, dtype, device, max_model_len, open_source, group, quantized)
    return LlamaModel(config, open_source(), dtype, device, group)


def quantizable(directory: Path) -> tuple[set[str], set[str]]:
    """Returns the stored names of what can be quantised of the model in `directory`: the weights of linear layers; and
    which of them, or beside them, are those of the embedding and the LM head.

    Raises `ModelConfigError` or `WeightsError`.
    """
    from octavo.worker.models.transformers.loading import (
        empty_model,
        head_weight,
        quantizable_linears,
        read_transformers_config,
    )

    config = read_transformers_config(directory)
    source = open_weights(directory, "safetensors")
    linears, head = quantizable_linears(config, source), head_weight(empty_model(config))
    ends = {name for name, parameter in linears.items() if parameter == head}
    try:
        read_config(directory)
    except UnsupportedSetting:
        return set(linears), ends
    return set(linears), ends | (ENDS & source.shapes().keys())


def _transformers_model(
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int | None,
    open_source: Callable[..., WeightSource],
    group: ShardGroup,
    quantized: bool,
) -> Decoder:
    # transformers takes seconds to import, which native models need not wait for.
    from octavo.worker.models.transformers.model import TransformersModel

    try:
        return TransformersModel(directory, dtype, device, max_model_len, open_source, group, quantized=quantized)
    except ModelConfigError as error:
        raise type(error)(f"{directory}: {error}") from error
