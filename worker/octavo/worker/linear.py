"""Linear layers: weights prepacked for oneDNN where torch has it, else `F.linear`."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

# The batch size oneDNN lays a weight out for. Measured: good from 1 to 64 rows.
_PREPACK_ROWS = 64


@functools.cache
def prepacking_available(dtype: torch.dtype) -> bool:
    """Whether this torch and this CPU take prepacked weights of `dtype`. The operations are private to torch, so they
    are tried once on real numbers instead of trusted."""
    if dtype not in (torch.bfloat16, torch.float32):
        return False
    inputs, weight = torch.eye(2, 32, dtype=dtype), torch.ones(32, 32, dtype=dtype)
    try:
        return torch.equal(_prepacked_linear(inputs, _prepack(weight), None), F.linear(inputs, weight))
    except (AttributeError, RuntimeError, NotImplementedError):
        return False


class Linear:
    """y = x W^T + b for x of [tokens, in_features].

    Prepacked, a row of the result does not depend on how many rows there are.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, prepack: bool | None = None) -> None:
        """`weight`: [out_features, in_features]; `bias`: [out_features]. `prepack` None: where available."""
        if prepack is None:
            prepack = weight.device.type == "cpu" and prepacking_available(weight.dtype)
        self.prepacked = prepack
        self._weight = _prepack(weight) if prepack else weight
        self._bias = bias

    def __call__(self, inputs: Tensor) -> Tensor:
        if not self.prepacked:
            return F.linear(inputs, self._weight, self._bias)
        if len(inputs) > 1:
            return _prepacked_linear(inputs, self._weight, self._bias)
        # oneDNN multiplies a single row in another order, and so to other last bits, than the same row among others.
        return _prepacked_linear(inputs.expand(2, -1), self._weight, self._bias)[:1]


def _prepack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PREPACK_ROWS)
    return packed


def _prepacked_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    outputs: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
    return outputs
