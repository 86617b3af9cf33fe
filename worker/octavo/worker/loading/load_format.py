"""The source of weights that `--load-format` names: a checkpoint, or random weights for measuring and testing."""

import ctypes
import functools
import hashlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from octavo.runtime.models.gguf.directory import weight_files
from octavo.worker.loading.gguf_weights import open_gguf
from octavo.worker.loading.progress import LoadProgress, WatchedWeights
from octavo.worker.loading.quantization_config import read_scheme
from octavo.worker.loading.quantized_checkpoint import QuantizedCheckpoint
from octavo.worker.loading.quantized_on_load import ENDS, DequantizedWeights, QuantizingWeights
from octavo.worker.loading.tensor_file import TensorPart
from octavo.worker.loading.weights import Checkpoint, WeightsError, WeightSource

# The deviation with which transformers initialises: activations stay finite through any number of layers.
_STANDARD_DEVIATION = 0.02
# The number of values drawn, once; a prime, so that no two rows of a matrix begin with the same one.
_NUM_DRAWN = 1_048_573
_NOTHING_STORED: Mapping[str, tuple[int, ...]] = MappingProxyType({})


@functools.cache
def _drawn() -> Tensor:
    """Returns the values that fill tensors, twice, one after the other.

    A model has billions of numbers, which take minutes to draw and seconds to copy.
    """
    drawn = torch.empty(_NUM_DRAWN).normal_(0, _STANDARD_DEVIATION, generator=torch.Generator().manual_seed(0))
    return torch.cat((drawn, drawn))


def _fill(flat: Tensor, begin: int) -> None:
    """Fills `flat` with the drawn values from the place `begin` on, over and over."""
    first = begin % _NUM_DRAWN
    for piece in torch.split(flat, _NUM_DRAWN):
        piece.copy_(_drawn()[first : first + len(piece)])


class DummyWeights:
    """A `WeightSource` that makes the tensors taken: norms are ones, the rest is as if drawn from a normal distribution
    of small deviation.

    A tensor depends on its name and shape only, so every process makes the same model.
    """

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Returns no names: nothing is stored."""
        return _NOTHING_STORED

    def take(self, name: str, shape: tuple[int, ...], part: TensorPart | None = None) -> Tensor:
        """Returns a float32 tensor of `shape`, or `part` of it."""
        filled = torch.empty(shape if part is None else part.shape(shape))
        if len(shape) == 1 and name.endswith("weight"):
            return filled.fill_(1)
        begin = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        flat, end = filled.view(-1), 0
        for first, count in [(0, math.prod(shape))] if part is None else part.pieces(shape):
            end += count
            _fill(flat[end - count : end], begin + first)
        return filled

    def take_weight(self, name: str, shape: tuple[int, ...], part: TensorPart | None = None) -> Tensor:
        """Returns what `take` returns."""
        return self.take(name, shape, part)

    def drop(self, name: str) -> None:
        """Does nothing: nothing is stored, so nothing can be left over."""

    def finish(self) -> None:
        """Does nothing, and never raises."""


def open_weights(
    directory: Path,
    load_format: str,
    *,
    quantization: str = "none",
    is_end: Callable[[str], bool] = ENDS.__contains__,
    dequantized: bool = False,
    ranks: int = 1,
) -> WeightSource:
    """Opens the weights of `directory` by one of the words of `octavo.runtime.options.common.LOAD_FORMAT`.

    Each of `ranks` processes takes a share. Weights are quantised as `octavo.runtime.options.common.QUANTIZATION` says;
    `is_end` tells the names of embedding and LM head. `dequantized`: what is quantised, or has been, comes as numbers.
    Raises `WeightsError` if stored weights cannot be read, or are quantised already where they shall be.
    """
    source = _quantized(directory, load_format, quantization, is_end, ranks)
    return DequantizedWeights(source) if dequantized else source


def _quantized(
    directory: Path, load_format: str, quantization: str, is_end: Callable[[str], bool], ranks: int
) -> WeightSource:
    source = _open(directory, load_format, ranks)
    if quantization == "none":
        return source
    if isinstance(source, QuantizedCheckpoint) or weight_files(directory):
        raise WeightsError(
            f"{directory} is quantised already, and would only lose by --quantization {quantization}; leave it out, or"
            " serve the model that it was made of"
        )
    return QuantizingWeights(source, quantization, is_end)


def _open(directory: Path, load_format: str, ranks: int) -> WeightSource:
    scheme = read_scheme(directory)
    if load_format == "dummy":
        if scheme:
            raise WeightsError(
                f"{directory} is quantised, and --load-format dummy makes no such weights; take quantization_config"
                " out of its config.json, and give --quantization"
            )
        return DummyWeights()
    files = [] if load_format == "safetensors" else weight_files(directory)
    checkpoint = open_gguf(directory, files[0]) if files else Checkpoint(directory)
    source = WatchedWeights(checkpoint, LoadProgress(f"loading {directory}", checkpoint.num_bytes // ranks))
    return QuantizedCheckpoint(source, scheme) if scheme else source


def release_free_memory() -> None:
    """Gives freed memory that the C library keeps back to the system.

    Packing weights leaves a good part of their size, which blocks of keys and values can have. It does nothing where
    the C library is not glibc.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
