"""The converter of PyTorch's pickled weights, which writes safetensors. Only this module opens pickles, and never while
serving."""

import json
import logging
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from octavo.runtime.models.directory import check_files
from octavo.runtime.models.publish import copy_description, publish
from octavo.worker.loading.progress import LoadProgress
from octavo.worker.loading.weights import PICKLED, read_index

logger = logging.getLogger(__name__)

_INDEX = "pytorch_model.bin.index.json"
_SINGLE = "pytorch_model.bin"
_NEW_INDEX = "model.safetensors.index.json"


class ConvertError(Exception):
    """Raised for weights that cannot be converted, with the reason."""


def convert_weights(source: Path, directory: Path) -> None:
    """Writes the model in `source` to `directory` with its weights as safetensors, all or nothing.

    It returns at once if `directory` holds a model. One shard is in memory at a time. Raises `ConvertError`,
    `ModelDirectoryError`, or `PublishError` if `directory` holds something else.
    """
    files = _weight_files(source)
    if directory.resolve() == source.resolve():
        raise ConvertError(f"{source} cannot be converted in its place; name another directory to write")
    publish(directory, lambda partial: _write(source, files, partial))


def _weight_files(source: Path) -> list[Path]:
    if not (source / "config.json").is_file():
        raise ConvertError(f"{source} holds no config.json, so there is no model to convert")
    check_files(source)
    if any(source.glob("*.safetensors")):
        raise ConvertError(f"{source} holds safetensors already; serve it as it is")
    if (source / _INDEX).is_file():
        return read_index(source / _INDEX)
    if (source / _SINGLE).is_file():
        return [source / _SINGLE]
    found = sorted(path for pattern in PICKLED for path in source.glob(pattern))
    if len(found) != 1:
        raise ConvertError(
            f"{source} holds neither {_SINGLE} nor {_INDEX}, and {len(found)} weight files of other names where one"
            " could be meant"
        )
    return found


def _write(source: Path, files: list[Path], directory: Path) -> None:
    progress = LoadProgress(f"converting {source}", sum(file.stat().st_size for file in files))
    file_of: dict[str, str] = {}
    num_bytes = 0
    for number, file in enumerate(files, 1):
        name = "model.safetensors" if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        tensors = _unshared(_read(file))
        save_file(tensors, directory / name, metadata={"format": "pt"})
        file_of |= dict.fromkeys(tensors, name)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
        progress.advance(file.stat().st_size)
    if len(files) > 1:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": file_of}
        (directory / _NEW_INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    copy_description(source, directory, but=_INDEX)
    progress.close()


def _read(file: Path) -> dict[str, Tensor]:
    """Reads the tensors in `file` with torch's reader of plain tensors, which calls nothing that a file names."""
    try:
        # Files from before PyTorch 1.6 are no archives, and cannot be mapped.
        content: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:  # The reader raises whatever a broken or hostile file makes it stumble over.
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConvertError(f"{file} is refused; it does not hold plain tensors alone: {reason}") from error
    if not isinstance(content, dict) or not content:
        raise ConvertError(f"{file} holds no table of tensors")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ConvertError(f"{file} holds more than a table of tensors: {name!r} is a {type(value).__name__}")
    return content


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors with memory of its own for each, as safetensors needs: tied tensors are written under every
    name."""
    storages: set[int] = set()
    unshared = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        unshared[name] = tensor.clone(memory_format=torch.contiguous_format) if storage in storages else tensor
        storages.add(storage)
    return {name: tensor.contiguous() for name, tensor in unshared.items()}
