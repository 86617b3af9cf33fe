"""The registry of models: it loads the model in a directory, by Octavo's own family or by transformers."""

import logging
from pathlib import Path

import torch

from octavo.worker.loading.load_format import open_weights
from octavo.worker.models.config import read_config
from octavo.worker.models.config_file import ModelConfigError, UnsupportedSetting
from octavo.worker.models.decoder import Decoder
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
    group: ShardGroup = SINGLE,
) -> Decoder:
    """Loads the model in `directory`, its weights on `device` in `dtype`; `max_model_len` shortens its context.

    Each rank of a `group` loads its share. `model_impl` is one of the words of `MODEL_IMPL`. Raises
    `ModelConfigError` or `WeightsError`.
    """
    if model_impl == "transformers":
        return _transformers_model(directory, dtype, device, max_model_len, load_format, group)
    try:
        config = read_config(directory, max_model_len)
    except UnsupportedSetting as error:
        if model_impl == "native":
            raise
        logger.info("%s; transformers computes this model", error)
        return _transformers_model(directory, dtype, device, max_model_len, load_format, group)
    return LlamaModel(config, open_weights(directory, load_format, ranks=group.size), dtype, device, group)


def _transformers_model(
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int | None,
    load_format: str,
    group: ShardGroup,
) -> Decoder:
    # transformers takes seconds to import, which native models need not wait for.
    from octavo.worker.models.transformers.model import TransformersModel

    try:
        return TransformersModel(directory, dtype, device, max_model_len, load_format, group)
    except ModelConfigError as error:
        raise type(error)(f"{directory}: {error}") from error
