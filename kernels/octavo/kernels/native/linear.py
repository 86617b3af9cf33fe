"""Multiplies by weights that were packed once: y = x W^T + b, or activation(gate) * up of fused gates and ups."""

from ctypes import byref

import torch
from torch import Tensor

from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.native.memory import Arena
from octavo.kernels.native.structs import DTYPES, Activation, Epilogue, LinearOp

# Weights are read from end to end at every step: huge pages spare the CPU most of its look-ups.
_ARENA = Arena()
# Outputs that lie side by side in a packed weight, and those of a register.
_PANEL, _LANES = 32, 16


class NativeLinear:
    """Holds a weight [outputs, inputs] packed for the CPU, fp32 or bf16, and its `bias` ([outputs] or None).

    With an `activation` the rows of `weight` are gates, then as many ups, and the outputs are activation(gate) * up; or
    activation(outputs), if it is not `gated`. A row's result does not depend on the rows beside it.
    """

    def __init__(
        self,
        library: NativeLibrary,
        weight: Tensor,
        bias: Tensor | None,
        activation: Activation | None = None,
        *,
        gated: bool = True,
    ) -> None:
        """Raises `ValueError` on a weight that cannot be packed and on a bias that does not fit it."""
        self.gated = activation is not None and gated
        _check(weight, bias, gated=self.gated)
        self._library = library
        self.dtype = weight.dtype
        self.rows, self.inputs = weight.shape
        self.outputs = self.rows // 2 if self.gated else self.rows
        ordered = _interleaved(weight) if self.gated else weight
        self._packed = _pack(library, ordered.contiguous())
        self._bias = None if bias is None else _padded(_interleaved(bias) if self.gated else bias)
        self._activation = Activation.SILU if activation is None else activation
        self._activates = activation is not None and not gated
        self._stored = self.op()
        self._as_float = self._op(Epilogue.STORE_FLOAT)

    def op(self, *, added: float | None = None, y_stride: int | None = None) -> LinearOp:
        """Returns the operation for rows of x without gaps: it stores the outputs, or y + `added` times the outputs.

        Rows of y are `y_stride` elements apart; None: without gaps. The operation holds only as long as this object.
        """
        if added is None:
            plain = Epilogue.ACTIVATE if self._activates else Epilogue.STORE
            return self._op(Epilogue.GATE if self.gated else plain, y_stride=y_stride)
        return self._op(Epilogue.ADD, scale=added, y_stride=y_stride)

    def _op(self, epilogue: Epilogue, *, scale: float = 1.0, y_stride: int | None = None) -> LinearOp:
        bias = None if self._bias is None else self._bias.data_ptr()
        sizes = self.inputs, self.rows, self.inputs, self.outputs if y_stride is None else y_stride
        return LinearOp(self._packed.data_ptr(), bias, *sizes, epilogue, self._activation, scale)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Returns the outputs, [tokens, outputs], of `inputs` ([tokens, inputs]), in the inputs' dtype."""
        return self._apply(self._stored, inputs, self.dtype)

    def to_float(self, inputs: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Returns the outputs in fp32, without rounding to the weight's dtype first; writes them to `out` if that is
        given."""
        if self.gated or self._activates:
            raise ValueError("what is gated or activated is not given in fp32")
        return self._apply(self._as_float, inputs, torch.float32, out)

    def _apply(self, op: LinearOp, inputs: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        if inputs.shape[1:] != (self.inputs,) or inputs.dtype != self.dtype:
            raise ValueError(
                f"inputs {list(inputs.shape)} {inputs.dtype} for a weight of {self.inputs} inputs in {self.dtype}"
            )
        inputs = inputs.contiguous()
        shape = len(inputs), self.outputs
        outputs = torch.empty(shape, dtype=dtype) if out is None else out
        if outputs.shape != shape or outputs.dtype != dtype or not outputs.is_contiguous():
            raise ValueError(f"outputs {list(outputs.shape)} {outputs.dtype} for {list(shape)} {dtype} without gaps")
        self._library.functions.octavo_linear(
            byref(op),
            inputs.data_ptr(),
            outputs.data_ptr(),
            len(inputs),
            DTYPES[self.dtype],
            torch.get_num_threads(),
        )
        return outputs


def _check(weight: Tensor, bias: Tensor | None, *, gated: bool) -> None:
    if weight.dim() != 2 or weight.dtype not in DTYPES or weight.shape[1] % 2:
        raise ValueError(f"a weight {list(weight.shape)} {weight.dtype} cannot be packed: fp32 or bf16, even inputs")
    if gated and len(weight) % 2:
        raise ValueError(f"a weight of {len(weight)} rows does not hold gates and as many ups")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"a bias {list(bias.shape)} for a weight {list(weight.shape)}")


def _pack(library: NativeLibrary, weight: Tensor) -> Tensor:
    outputs, inputs = weight.shape
    packed = _ARENA.empty(-(-outputs // _PANEL) * _PANEL * inputs, weight.dtype)
    library.functions.octavo_pack_weight(weight.data_ptr(), packed.data_ptr(), outputs, inputs, DTYPES[weight.dtype])
    return packed


def _interleaved(fused: Tensor) -> Tensor:
    """Returns `fused` (all gates, then all ups) as groups of 16 gates beside their 16 ups; the last group is filled up
    with zeros."""
    gates_and_ups = fused.view(2, -1, *fused.shape[1:])
    missing = -gates_and_ups.shape[1] % _LANES
    padding = [0] * (2 * (fused.dim() - 1)) + [0, missing]
    padded = torch.nn.functional.pad(gates_and_ups, padding)
    return padded.view(2, -1, _LANES, *fused.shape[1:]).transpose(0, 1).reshape(-1, *fused.shape[1:])


def _padded(bias: Tensor) -> Tensor:
    """Returns `bias` as fp32, padded with zeros to whole panels."""
    return torch.nn.functional.pad(bias.float(), (0, -len(bias) % _PANEL)).contiguous()
