"""The tensors of a decoder without those of an LM head, by the names that they have in a model with one."""

from collections.abc import Mapping

from torch import Tensor

from octavo.kernels.quantized import Quantized
from octavo.worker.loading.tensor_file import TensorPart
from octavo.worker.loading.weights import WeightSource

_PREFIX = "model."
_HEADS = ("lm_head.weight", "score.weight")


class HeadlessWeights:
    """A `WeightSource` of the layers in `source`.

    Checkpoints that were written without any head lack the prefix that all names of layers have beside one.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        names = source.shapes()
        # A source that makes up what is taken knows no names.
        self._lacks_prefix = bool(names) and not any(name.startswith(_PREFIX) for name in names)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Returns the source's names, with the prefix, and shapes, but for those of heads."""
        prefix = _PREFIX if self._lacks_prefix else ""
        return {f"{prefix}{name}": shape for name, shape in self._source.shapes().items() if name not in _HEADS}

    def take(self, name: str, shape: tuple[int, ...], part: TensorPart | None = None) -> Tensor:
        """Returns the source's tensor. Raises `WeightsError`."""
        return self._source.take(self._stored(name), shape, part)

    def take_weight(self, name: str, shape: tuple[int, ...], part: TensorPart | None = None) -> Tensor | Quantized:
        """Returns the source's weight. Raises `WeightsError`."""
        return self._source.take_weight(self._stored(name), shape, part)

    def drop(self, name: str) -> None:
        """Drops the tensor in the source."""
        self._source.drop(self._stored(name))

    def finish(self) -> None:
        """Raises `WeightsError` if a tensor, but for heads, was neither taken nor dropped."""
        for name in _HEADS:
            self._source.drop(name)
        self._source.finish()

    def _stored(self, name: str) -> str:
        return name.removeprefix(_PREFIX) if self._lacks_prefix else name
