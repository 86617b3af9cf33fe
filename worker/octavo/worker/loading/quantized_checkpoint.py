"""The weights of a checkpoint that compressed-tensors, GPTQ, AWQ or transformers has quantised, by the names that a
model knows."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from octavo.kernels.quantized import Quantized
from octavo.worker.loading.packed_weights import PARTS, PackedWeight, Parts, weight_shape
from octavo.worker.loading.quantization_config import Packing, Scheme
from octavo.worker.loading.tensor_file import TensorPart
from octavo.worker.loading.weights import WeightsError, WeightSource

_WEIGHT = ".weight"
# The tensors that only a quantised layer has.
_TELLING = frozenset({"weight_packed", "weight_scale", "weight_scale_inv", "qweight"})


class QuantizedCheckpoint:
    """A `WeightSource` of the tensors in `source`, which are quantised by `scheme` where they are stored so: layers
    that the scheme leaves out are stored as plain weights.

    Raises `WeightsError`.
    """

    def __init__(self, source: WeightSource, scheme: Scheme) -> None:
        self._source = source
        stored = source.shapes()
        modules = dict.fromkeys(
            module for module, _, leaf in (name.rpartition(".") for name in stored) if leaf in _TELLING
        )
        self._weights = {
            f"{module}{_WEIGHT}": _packed(module, scheme.packing(module), stored, source) for module in modules
        }
        # Some versions of AutoGPTQ give every layer a bias, of zeros where it has none.
        biases = [
            name
            for weight in self._weights.values()
            if weight.packing.layout == "gptq" and (name := f"{weight.module}.bias") in stored
        ]
        self._biases = {name for name in biases if source.take(name, stored[name]).any()}
        parts = {f"{weight.module}.{name}" for weight in self._weights.values() for name in _parts(weight).names}
        parts.update(set(biases) - self._biases)
        self._shapes = {name: shape for name, shape in stored.items() if name not in parts}
        self._shapes |= {name: weight.shape for name, weight in self._weights.items()}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Returns every tensor's name and shape; quantised weights are [outputs, inputs]."""
        return self._shapes

    def take(self, name: str, shape: tuple[int, ...], part: TensorPart | None = None) -> Tensor:
        """Returns the tensor called `name`, in fp32 if it is quantised. Raises `WeightsError`."""
        weight = self.take_weight(name, shape, part)
        return weight.dequantize() if isinstance(weight, Quantized) else weight

    def take_weight(self, name: str, shape: tuple[int, ...], part: TensorPart | None = None) -> Tensor | Quantized:
        """Returns the weight called `name` as it is stored, or `part` of it. Raises `WeightsError`."""
        packed = self._weights.get(name)
        if packed is None:
            tensor = self._source.take(name, shape, part)
            self._biases.discard(name)
            if not tensor.is_floating_point() or tensor.itemsize == 1:
                raise WeightsError(f"tensor {name!r} is {_name(tensor.dtype)}, and no scales are stored beside it")
            return tensor
        if packed.shape != shape:
            raise WeightsError(f"tensor {name!r} is {list(packed.shape)}; config.json makes it {list(shape)}")
        weight = packed.read()
        self._drop_parts(packed)
        return weight if part is None else cut(weight, part, name)

    def drop(self, name: str) -> None:
        """Declares that `name`, if present, is rightly not used."""
        packed = self._weights.get(name)
        if packed is None:
            self._biases.discard(name)
            self._source.drop(name)
        else:
            self._drop_parts(packed)

    def finish(self) -> None:
        """Raises `WeightsError` if a tensor was neither taken nor dropped."""
        self._source.finish()
        if self._biases:
            names = ", ".join(sorted(self._biases)[:5])
            raise WeightsError(f"{len(self._biases)} layers have a bias that config.json has no place for: {names}")

    def _drop_parts(self, packed: PackedWeight) -> None:
        for part in _parts(packed).names:
            self._source.drop(f"{packed.module}.{part}")


def _parts(packed: PackedWeight) -> Parts:
    return PARTS[packed.packing.layout]


def _packed(module: str, packing: Packing, stored: Mapping[str, tuple[int, ...]], source: WeightSource) -> PackedWeight:
    if packing.layout == "float-quantized" and f"{module}.weight_scale_inv" in stored:
        # What transformers writes where scales are for no blocks.
        packing = replace(packing, layout="fp8")
    name = f"{module}.{PARTS[packing.layout].codes}"
    codes = stored.get(name)
    if codes is None or len(codes) != 2:
        raise WeightsError(
            f"{module} is quantised, and tensor {name!r} is {'not there' if codes is None else list(codes)};"
            f" quantization_config in config.json calls for a matrix ({packing.layout})"
        )
    return PackedWeight(module, packing, weight_shape(packing, codes), stored, source.take)


def cut(weight: Quantized, part: TensorPart, name: str) -> Quantized:
    """Returns `part` of `weight`, whose name is `name`. Raises `WeightsError` where it cannot be cut so."""
    if part.dim == 0:
        return weight.rows(torch.cat([torch.arange(each.start, each.stop) for each in part.ranges]))
    (inputs,) = part.ranges
    try:
        return weight.columns(inputs)
    except ValueError as error:
        raise WeightsError(f"{name} cannot be shared by so many ranks: {error}; give another --tp") from error


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
