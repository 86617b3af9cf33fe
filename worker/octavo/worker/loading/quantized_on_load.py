"""The quantisation of weights as they are loaded, one tensor after the other."""

from collections.abc import Callable, Mapping

from torch import Tensor

from octavo.kernels.quantize import quantize
from octavo.kernels.quantized import FORMATS, GROUP, Quantized
from octavo.worker.loading.tensor_file import TensorPart
from octavo.worker.loading.weights import WeightsError, WeightSource

# The format of the embedding and of the LM head, where tokens are lost first.
END_FORMAT = "q8_0"
# The names of both in Octavo's own families.
ENDS = frozenset({"model.embed_tokens.weight", "lm_head.weight"})


def format_of(name: str, quantization: str, is_end: Callable[[str], bool]) -> str:
    """Returns the format in which the weight called `name` is kept where others are kept in that of `quantization`."""
    return END_FORMAT if is_end(name) else quantization


class QuantizingWeights:
    """A `WeightSource` of the tensors in `source`, whose weights it quantises as they are taken.

    `is_end` tells the name of the embedding and of the LM head. Weights whose inputs fill no group stay as they are,
    and so do norms and biases.
    """

    def __init__(
        self, source: WeightSource, quantization: str, is_end: Callable[[str], bool] = ENDS.__contains__
    ) -> None:
        self._source = source
        self._quantization = quantization
        self._is_end = is_end

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Returns the source's names and shapes."""
        return self._source.shapes()

    def take(self, name: str, shape: tuple[int, ...], part: TensorPart | None = None) -> Tensor:
        """Returns the source's tensor. Raises `WeightsError`."""
        return self._source.take(name, shape, part)

    def take_weight(self, name: str, shape: tuple[int, ...], part: TensorPart | None = None) -> Tensor | Quantized:
        """Returns the source's weight, quantised. Raises `WeightsError`, also on values that cannot be."""
        weight = self._source.take(name, shape, part)
        return quantized(name, weight, format_of(name, self._quantization, self._is_end))

    def drop(self, name: str) -> None:
        """Drops the tensor in the source."""
        self._source.drop(name)

    def finish(self) -> None:
        """Raises `WeightsError` if a tensor was neither taken nor dropped."""
        self._source.finish()


class DequantizedWeights:
    """A `WeightSource` of the tensors in `source`, whose weights are what they are as numbers."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Returns the source's names and shapes."""
        return self._source.shapes()

    def take(self, name: str, shape: tuple[int, ...], part: TensorPart | None = None) -> Tensor:
        """Returns the source's tensor. Raises `WeightsError`."""
        return self._source.take(name, shape, part)

    def take_weight(self, name: str, shape: tuple[int, ...], part: TensorPart | None = None) -> Tensor:
        """Returns the source's weight, dequantised. Raises `WeightsError`."""
        weight = self._source.take_weight(name, shape, part)
        return weight.dequantize() if isinstance(weight, Quantized) else weight

    def drop(self, name: str) -> None:
        """Drops the tensor in the source."""
        self._source.drop(name)

    def finish(self) -> None:
        """Raises `WeightsError` if a tensor was neither taken nor dropped."""
        self._source.finish()


def quantized(name: str, weight: Tensor, to: str) -> Tensor | Quantized:
    """Returns the `weight` called `name` in the format called `to`, or as it is if its inputs fill no group. Raises
    `WeightsError` on values that cannot be quantised."""
    if weight.dim() != 2 or weight.shape[1] % GROUP:
        return weight
    try:
        return quantize(weight, FORMATS[to])
    except ValueError as error:
        raise WeightsError(f"tensor {name!r} cannot be quantised: {error}") from error
