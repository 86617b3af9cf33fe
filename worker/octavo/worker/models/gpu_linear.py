"""Linear layers on a GPU by weights that stay quantised there, and what keeps weights from it."""

import importlib.util
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.kernels.quantized import BlockFormat, Quantized


def on_gpu(device: torch.device) -> bool:
    """Tells whether a GPU's kernels multiply by what lies on `device`."""
    return device.type != "cpu"


def obstacle(device: torch.device, form: BlockFormat | None = None) -> str | None:
    """Returns why weights, or those of `form`, cannot stay quantised on the GPU `device`; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "there is no Triton; install it with pip install '.[gpu]' in Octavo's source tree"
    # Triton takes seconds to import, and a CPU has no use for it.
    from octavo.kernels.triton.devices import takes_fp8
    from octavo.kernels.triton.layers import packed

    if form is None:
        return None
    if not form.floats:
        return packed.obstacle(form)
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    if not takes_fp8(10 * major + minor):
        return f"{device} has compute capability {major}.{minor}, and 8-bit floats are multiplied from 8.9 on"
    return None


class QuantizedProduct:
    """Computes x W^T + b for x of [tokens, inputs] on a GPU, and waits for nothing: a step may be captured.

    W is [outputs, inputs], in parts whose outputs stand side by side; b is [outputs], or None.
    """

    def __init__(self, weights: Sequence[Quantized], bias: Tensor | None) -> None:
        """Raises `ValueError` on weights that `obstacle` names a reason against."""
        from octavo.kernels.triton.layers.float8 import Float8Weight, float8_linear
        from octavo.kernels.triton.layers.packed import FourBitWeight, packed_linear

        ends = list(itertools.accumulate(part.shape[0] for part in weights))
        self.outputs, self.inputs = ends[-1], weights[0].shape[1]
        biases = [None] * len(ends) if bias is None else [part.contiguous() for part in bias.tensor_split(ends[:-1])]
        self._packed_linear, self._float8_linear = packed_linear, float8_linear
        self._parts = [
            (Float8Weight.of(part) if part.format.floats else FourBitWeight.of(part), some)
            for part, some in zip(weights, biases, strict=True)
        ]
        self._float8 = Float8Weight

    def __call__(self, inputs: Tensor) -> Tensor:
        found = [
            self._float8_linear(inputs, weight, bias)
            if isinstance(weight, self._float8)
            else self._packed_linear(inputs, weight, bias)
            for weight, bias in self._parts
        ]
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    def dequantize(self) -> Tensor:
        """Returns W as numbers, [outputs, inputs] fp32, made anew."""
        return torch.cat([weight.dequantize() for weight, _ in self._parts])
