"""From a model directory to a model that runs."""

from pathlib import Path

import torch

from octavo.worker.loading import open_weights
from octavo.worker.models.config import read_config
from octavo.worker.models.llama import LlamaModel


def load_model(
    directory: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int | None = None,
    load_format: str = "auto",
) -> LlamaModel:
    """The model in `directory`, its weights on `device` in `dtype`; `max_model_len` shortens its context.

    All architectures known so far (`octavo.worker.models.config.ARCHITECTURES`) are one family. Raises `ConfigError` or
    `WeightsError`.
    """
    config = read_config(directory, max_model_len)
    return LlamaModel(config, open_weights(directory, load_format), dtype, device)
