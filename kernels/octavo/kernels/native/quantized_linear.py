"""Multiplies by quantised weights that were packed once, without a loss: y = x W^T + b, or activation(gate) * up.

Rows are quantised too, in groups of 32, some of these twice; `docs/quantization.md` has the arithmetic, which gives the
same bits on every instruction set.
"""

from ctypes import byref, c_int8

import torch
from torch import Tensor

from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.native.memory import Arena
from octavo.kernels.native.structs import (
    DTYPES,
    Activation,
    Epilogue,
    LinearOp,
    QuantizedLinearOp,
    QuantizedTensors,
    QuantizeOp,
    Scales,
    WeightFormat,
)
from octavo.kernels.quantized import BLOCK, GROUP, BlockFormat, Quantized

_ARENA = Arena()
# Groups of a row are rounded twice whose scale is more than so many times the mean of the row's. Measured, as
# docs/quantization.md has it: with less, many rows take longer; with more, more is lost.
TWICE_ABOVE = 3.0
# Outputs that lie side by side in a packed weight, and those of a register.
_PANEL, _LANES = 32, 16


class NativeQuantizedLinear:
    """Holds a quantised weight [outputs, inputs] packed for the CPU, as small as it came, and its `bias` ([outputs] or
    None).

    With an `activation` the rows of `weight` are gates, then as many ups, and the outputs are activation(gate) * up. A
    row's result depends neither on the rows beside it nor on the instruction set; a row with an infinity or a NaN
    gives NaNs.
    """

    def __init__(
        self,
        library: NativeLibrary,
        weight: Quantized,
        bias: Tensor | None,
        activation: Activation | None = None,
        *,
        twice_above: float = TWICE_ABOVE,
    ) -> None:
        """Rounds those groups of a row twice, to 16 bits instead of 8, whose scale is more than `twice_above` times the
        mean of the row's. Raises `ValueError` on a format without kernels, on scales that are infinite or NaNs, and on
        a bias that does not fit the weight."""
        self._library = library
        self._twice_above = twice_above
        self.format = weight.format
        self.rows, self.inputs = weight.shape
        self.group = weight.group
        _check(weight, bias, activation)
        self._index = library.functions.octavo_quantized_format(byref(_layout(weight.format)))
        if self._index < 0 or weight.format.floats:
            raise ValueError(f"there are no kernels for {weight.format.name}")
        self.gated = activation is not None
        self.outputs = self.rows // 2 if self.gated else self.rows
        self._order = _gates_and_ups(self.outputs) if self.gated else torch.arange(self.rows)
        self._order = torch.nn.functional.pad(self._order, (0, -len(self._order) % _PANEL), value=-1)
        self._packed = self._pack(weight)
        self._bias = None if bias is None else _ordered(bias.float(), self._order)
        self._activation = activation or Activation.SILU

    @property
    def weight_bytes(self) -> int:
        """Returns how much memory the weight takes."""
        return self._packed.numel()

    def quantize_op(self, *, x_stride: int) -> QuantizeOp:
        """Returns the operation that quantises rows of as many inputs, `x_stride` elements apart."""
        return QuantizeOp(self.inputs, x_stride, self._twice_above)

    def op(
        self, *, added: float | None = None, multiplied: Activation | None = None, y_stride: int | None = None
    ) -> QuantizedLinearOp:
        """Returns the operation on quantised rows: it stores the outputs, or y + `added` times the outputs, or, of
        gates, y times their activation `multiplied`. Rows of outputs are `y_stride` elements apart; None: without gaps.
        The operation holds only as long as this object."""
        epilogue = Epilogue.GATE if self.gated else Epilogue.STORE
        if added is not None:
            epilogue = Epilogue.ADD
        if multiplied is not None:
            epilogue = Epilogue.MULTIPLY
        return self._op(epilogue, 1.0 if added is None else added, multiplied, y_stride)

    def _op(
        self,
        epilogue: Epilogue,
        scale: float = 1.0,
        activation: Activation | None = None,
        y_stride: int | None = None,
    ) -> QuantizedLinearOp:
        if self.gated and epilogue is not Epilogue.GATE:
            raise ValueError("a gated product is stored as it is")
        linear = LinearOp(
            self._packed.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            self.inputs,
            self.rows,
            self.inputs,
            self.outputs if y_stride is None else y_stride,
            epilogue,
            self._activation if activation is None else activation,
            scale,
        )
        return QuantizedLinearOp(linear, self.group, self._index, (c_int8 * 16)(*(self.format.values or ())))

    def __call__(self, inputs: Tensor) -> Tensor:
        """Returns the outputs, [tokens, outputs], of `inputs` ([tokens, inputs], fp32 or bf16), in their dtype."""
        return self._apply(self.op(), inputs, torch.empty(len(inputs), self.outputs, dtype=inputs.dtype))

    def to_float(self, inputs: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Returns the outputs in fp32, whatever the inputs' dtype; writes them to `out` if that is given."""
        if self.gated:
            raise ValueError("a gated product is not given in fp32")
        outputs = torch.empty(len(inputs), self.outputs) if out is None else out
        return self._apply(self._op(Epilogue.STORE_FLOAT), inputs, outputs, torch.float32)

    def gate(self, inputs: Tensor, activation: Activation, values: Tensor) -> Tensor:
        """Returns `values` ([tokens, outputs] in the inputs' dtype), multiplied in place by the outputs' activation."""
        return self._apply(self.op(multiplied=activation), inputs, values)

    def _apply(
        self, op: QuantizedLinearOp, inputs: Tensor, outputs: Tensor, dtype: torch.dtype | None = None
    ) -> Tensor:
        if inputs.dim() != 2 or inputs.shape[1] != self.inputs or inputs.dtype not in DTYPES:
            raise ValueError(
                f"inputs {list(inputs.shape)} {inputs.dtype} for a weight of {self.inputs} inputs in fp32 or bf16"
            )
        shape, dtype = (len(inputs), self.outputs), dtype or inputs.dtype
        if outputs.shape != shape or outputs.dtype != dtype or not outputs.is_contiguous():
            raise ValueError(f"outputs {list(outputs.shape)} {outputs.dtype} for {list(shape)} {dtype} without gaps")
        inputs = inputs.contiguous()
        self._library.functions.octavo_quantized_linear(
            byref(op),
            byref(self.quantize_op(x_stride=self.inputs)),
            inputs.data_ptr(),
            outputs.data_ptr(),
            len(inputs),
            DTYPES[inputs.dtype],
            torch.get_num_threads(),
        )
        return outputs

    def unpacked(self, which: Tensor) -> Quantized:
        """Returns the rows `which` ([count] int64) of the weight as it came. Raises `IndexError` on one that there is
        not."""
        if len(which) and not 0 <= int(which.min()) <= int(which.max()) < self.rows:
            raise IndexError(f"rows {int(which.min())} to {int(which.max())} of {self.rows}")
        result = _empty(self.format, len(which), self.inputs, self.group)
        places = self._places()[which] if self.gated else which.contiguous()
        tensors = _pointers(result)
        self._library.functions.octavo_unpack_quantized(
            self._index, byref(tensors), places.data_ptr(), self._packed.data_ptr(), len(which)
        )
        return result

    def _places(self) -> Tensor:
        """Returns where each row of the weight is packed."""
        places = torch.empty(self.rows, dtype=torch.int64)
        places[self._order[self._order >= 0]] = torch.nonzero(self._order >= 0).flatten()
        return places

    def _pack(self, weight: Quantized) -> Tensor:
        panels = len(self._order) // _PANEL
        panel_bytes = self._library.functions.octavo_quantized_panel_bytes(self._index, self.inputs, self.group)
        packed = _ARENA.empty(panels * panel_bytes, torch.uint8)
        whole = weight.contiguous()
        tensors = _pointers(whole)
        self._library.functions.octavo_pack_quantized(
            self._index, byref(tensors), self._order.data_ptr(), packed.data_ptr(), panels
        )
        return packed


def quantized_rows(library: NativeLibrary, rows: int, inputs: int) -> Tensor:
    """Returns room for so many quantised rows, [bytes]."""
    return torch.empty(library.functions.octavo_quantized_rows_bytes(rows, inputs), dtype=torch.uint8)


def _check(weight: Quantized, bias: Tensor | None, activation: Activation | None) -> None:
    if activation is not None and weight.shape[0] % 2:
        raise ValueError(f"a weight of {weight.shape[0]} rows does not hold gates and as many ups")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"a bias {list(bias.shape)} for a weight {list(weight.shape)}")
    for name, tensor in weight.tensors().items():
        if tensor.device.type != "cpu":
            raise ValueError(f"{name} on {tensor.device}: the weight must be in the CPU's memory")
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ValueError(f"{name} of a weight in {weight.format.name} are not all finite; the file is broken")
    if int(weight.codes.max()) >= 1 << weight.format.bits:
        raise ValueError(f"codes up to {int(weight.codes.max())} for {weight.format.bits} bits")


def _layout(form: BlockFormat) -> WeightFormat:
    scales = Scales.HALF
    if form.group == 0:
        scales = Scales.FLOAT
    elif form.blocks:
        scales = Scales.GROUP if form.group == GROUP else Scales.SIXTEEN
    return WeightFormat(form.bits, form.offset, scales, form.mins, form.values is not None)


def _gates_and_ups(outputs: int) -> Tensor:
    """Returns the order in which gates, then ups, are packed: 16 gates beside their 16 ups; -1 fills up the last."""
    gates = torch.nn.functional.pad(torch.arange(outputs), (0, -outputs % _LANES), value=-1).view(-1, 1, _LANES)
    return torch.cat((gates, torch.where(gates < 0, -1, gates + outputs)), dim=1).flatten()


def _ordered(bias: Tensor, order: Tensor) -> Tensor:
    return torch.where(order < 0, 0.0, bias[order.clamp(min=0)]).contiguous()


def _empty(form: BlockFormat, outputs: int, inputs: int, group: int) -> Quantized:
    """Returns a weight of zeros."""
    groups, blocks = inputs // group, inputs // BLOCK
    small = torch.int8 if form.group < GROUP else torch.uint8
    dtype = torch.float32 if form.group == 0 else small if form.blocks else torch.float16
    scales = torch.zeros(outputs, groups, dtype=dtype)
    wide = torch.zeros(outputs, blocks, dtype=torch.float16) if form.blocks else None
    return Quantized(
        form,
        torch.zeros(outputs, inputs, dtype=torch.uint8),
        scales,
        scales.clone() if form.mins else None,
        wide,
        wide.clone() if wide is not None and form.mins else None,
    )


def _pointers(weight: Quantized) -> QuantizedTensors:
    tensors = weight.tensors()
    names = ("codes", "scales", "mins", "block_scales", "block_mins")
    return QuantizedTensors(
        *(tensors[name].data_ptr() if name in tensors else None for name in names), weight.shape[1], weight.group
    )
