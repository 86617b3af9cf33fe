"""The tensors of a model directory: safetensors only, each taken once, none forgotten."""

import json
from pathlib import Path
from typing import Protocol, cast

from safetensors import SafetensorError, safe_open
from torch import Tensor

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# Formats that can run code when they are read.
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class WeightsError(Exception):
    """Weights that are missing, broken, or not those of the configured model."""


class _TensorFile(Protocol):
    """What safetensors' untyped `safe_open` gives."""

    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str) -> Tensor: ...


class Checkpoint:
    """The weight files of `directory`, open for reading.

    Raises `WeightsError` if there are none that Octavo reads.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file_of = {name: file for path in _weight_files(directory) for file, name in _tensors(path)}
        self._left = set(self._file_of)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor called `name`, in its stored dtype. Raises `WeightsError` if it is absent or of another shape."""
        file = self._file_of.get(name)
        if file is None:
            raise WeightsError(
                f"{self._directory} has no tensor {name!r}, which its config.json calls for; is the download complete?"
            )
        tensor = file.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise WeightsError(
                f"tensor {name!r} in {self._directory} is {list(tensor.shape)}; config.json makes it {list(shape)}"
            )
        self._left.discard(name)
        return tensor

    def drop(self, name: str) -> None:
        """Says that `name`, if present, is rightly not used."""
        self._left.discard(name)

    def finish(self) -> None:
        """Raises `WeightsError` if a tensor was never taken: it would be part of a model that is not the one loaded."""
        if self._left:
            names = ", ".join(sorted(self._left)[:5])
            raise WeightsError(
                f"{self._directory} has {len(self._left)} tensors that its config.json has no place for: {names}"
            )


def _weight_files(directory: Path) -> list[Path]:
    if (directory / _INDEX).is_file():
        return _indexed_files(directory)
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE]
    pickled = sorted(path.name for pattern in _PICKLED for path in directory.glob(pattern))
    if pickled:
        raise WeightsError(
            f"{directory} holds {pickled[0]}, a format that can run code when it is read; Octavo reads"
            " safetensors only: save the model again with transformers' save_pretrained()"
        )
    raise WeightsError(f"{directory} holds neither {_SINGLE} nor {_INDEX}")


def _indexed_files(directory: Path) -> list[Path]:
    try:
        names = set(json.loads((directory / _INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{directory / _INDEX} is no index of safetensors files: {error!r}") from error
    for name in names:
        if Path(name).name != name or not (directory / name).is_file():
            raise WeightsError(f"{directory / _INDEX} names {name!r}, which is not a file beside it")
    return [directory / name for name in sorted(names)]


def _tensors(path: Path) -> list[tuple[_TensorFile, str]]:
    try:
        file = cast(_TensorFile, safe_open(path, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path} is no readable safetensors file: {error}") from error
    names = file.keys()
    return [(file, name) for name in names]
