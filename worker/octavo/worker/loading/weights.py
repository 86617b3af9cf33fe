"""The tensors of a model directory. They are read from safetensors only, each is taken once, and none is forgotten."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
from torch import Tensor

from octavo.kernels.quantized import Quantized
from octavo.worker.loading.tensor_file import StoredTensor, TensorFileError, TensorPart, stored_tensors

T = TypeVar("T")

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# Formats that can run code when they are read.
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class WeightsError(Exception):
    """Raised for weights that are missing, broken, or not those of the configured model."""


class _Index(msgspec.Struct):
    """Holds the names of the files by the names of their tensors."""

    weight_map: dict[str, str]


class WeightSource(Protocol):
    """Supplies a model's tensors. A model takes or drops each by name, then calls `finish`."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Returns the stored names with their shapes; empty for a source that makes whatever is taken."""
        ...

    def take(self, name: str, shape: tuple[int, ...], part: TensorPart | None = None) -> Tensor:
        """Returns the tensor called `name`, of `shape`, or `part` of it; on the CPU, in its stored dtype.

        Raises `WeightsError` if there is no such tensor.
        """
        ...

    def take_weight(self, name: str, shape: tuple[int, ...], part: TensorPart | None = None) -> Tensor | Quantized:
        """Returns the weight of a linear layer or of an embedding as `take` does, or as it is quantised."""
        ...

    def drop(self, name: str) -> None:
        """Declares that `name`, if present, is rightly not used."""
        ...

    def finish(self) -> None:
        """Raises `WeightsError` if a tensor was neither taken nor dropped."""
        ...


class Checkpoint:
    """A `WeightSource` of the weight files in `directory`, of `num_bytes` in all.

    Raises `WeightsError` if there are none that Octavo reads.
    """

    def __init__(self, directory: Path) -> None:
        paths = _weight_files(directory)
        self._directory = directory
        self._stored: dict[str, StoredTensor] = {}
        for path in paths:
            for name, stored in _readable(partial(stored_tensors, path)).items():
                if (other := self._stored.setdefault(name, stored)) is not stored:
                    raise WeightsError(
                        f"tensor {name!r} is in {other.path.name} and in {path.name} of {directory}, and nothing says"
                        " which of them is meant; download the model anew, or remove the file that is not of it"
                    )
        self._left = set(self._stored)
        self.num_bytes = sum(path.stat().st_size for path in paths)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns every stored tensor's name and shape, in the order of the files."""
        return {name: stored.shape for name, stored in self._stored.items()}

    def take(self, name: str, shape: tuple[int, ...], part: TensorPart | None = None) -> Tensor:
        """Reads the tensor called `name`, or `part` of it, in its stored dtype.

        Raises `WeightsError` if it is absent or of another shape than `shape`.
        """
        stored = self._stored.get(name)
        if stored is None:
            raise WeightsError(
                f"{self._directory} has no tensor {name!r}, which its config.json calls for; is the download complete?"
            )
        if stored.shape != shape:
            raise WeightsError(
                f"tensor {name!r} in {self._directory} is {list(stored.shape)}; config.json makes it {list(shape)}"
            )
        self._left.discard(name)
        return _readable(partial(stored.read, part))

    def take_weight(self, name: str, shape: tuple[int, ...], part: TensorPart | None = None) -> Tensor:
        """Reads a weight as `take` does."""
        return self.take(name, shape, part)

    def drop(self, name: str) -> None:
        """Declares that `name`, if present, is rightly not used."""
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
        return read_index(directory / _INDEX)
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE]
    pickled = sorted(path.name for pattern in PICKLED for path in directory.glob(pattern))
    if pickled:
        raise WeightsError(
            f"{directory} holds {pickled[0]}, a format that can run code when it is read, and Octavo serves safetensors"
            f" only; run `octavo convert-weights {directory} --output {directory}-safetensors` and serve that directory"
        )
    raise WeightsError(
        f"{directory} holds neither {_SINGLE} nor {_INDEX}; is the download complete?"
        " (--load-format dummy makes random weights)"
    )


def read_index(path: Path) -> list[Path]:
    """Returns the weight files that the index at `path` names, in order.

    Raises `WeightsError` unless they are files beside the index.
    """
    try:
        index = msgspec.json.decode(path.read_bytes(), type=_Index)
    except (OSError, msgspec.MsgspecError) as error:
        raise WeightsError(f"{path} is no index of weight files: {error}") from error
    names = sorted(set(index.weight_map.values()))
    for name in names:
        if Path(name).name != name or not (path.parent / name).is_file():
            raise WeightsError(f"{path} names {name!r}, which is not a file beside it; is the download complete?")
    return [path.parent / name for name in names]


def _readable(read: Callable[[], T]) -> T:
    try:
        return read()
    except (OSError, TensorFileError) as error:
        raise WeightsError(str(error)) from error
