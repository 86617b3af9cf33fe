"""Computes RMSNorm (Zhang and Sennrich, 2019) and LayerNorm (Ba et al., 2016) with Octavo's own kernel."""

from ctypes import byref

import torch
from torch import Tensor

from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.native.structs import DTYPES, Epilogue, NormOp


def norm_op(
    weight: Tensor, eps: float, *, x_stride: int, y_stride: int, added: float | None = None, exact: bool = False
) -> NormOp:
    """Returns the operation that stores x / rms(x) * weight over rows of len(weight), or y + `added` times that.
    `weight` is fp32 and must outlive the operation. With `exact`, rows of fp32 get the same bits on every instruction
    set. Raises `ValueError` on another weight."""
    if weight.dtype != torch.float32 or not weight.is_contiguous():
        raise ValueError(f"a norm's weight is fp32 without gaps, not {weight.dtype} of strides {weight.stride()}")
    epilogue = Epilogue.STORE if added is None else Epilogue.ADD
    scale = 1.0 if added is None else added
    return NormOp(weight.data_ptr(), None, len(weight), x_stride, y_stride, eps, scale, epilogue, exact, False)


def layer_norm_op(weight: Tensor, bias: Tensor | None, eps: float, *, stride: int) -> NormOp:
    """Returns the operation that stores LayerNorm over rows of len(weight), `stride` elements apart in x and y alike.
    `weight` and `bias` are fp32 and must outlive the operation. Raises `ValueError` on others."""
    for tensor in (weight, bias):
        if tensor is not None and (tensor.dtype != torch.float32 or not tensor.is_contiguous()):
            raise ValueError(f"a norm's weight and bias are fp32 without gaps, not {tensor.dtype}")
    if bias is not None and bias.shape != weight.shape:
        raise ValueError(f"a bias {list(bias.shape)} for a norm over {len(weight)}")
    pointers = weight.data_ptr(), None if bias is None else bias.data_ptr()
    return NormOp(*pointers, len(weight), stride, stride, eps, 1.0, Epilogue.STORE, False, True)


def rms_norm(library: NativeLibrary, inputs: Tensor, weight: Tensor, eps: float, *, exact: bool = False) -> Tensor:
    """Returns the norm of each row of `inputs` ([rows, size], fp32 or bf16), in the inputs' dtype, computed in fp32.
    `weight`: [size] fp32; `exact`: as in `norm_op`. Raises `ValueError` on inputs that do not fit."""
    if inputs.shape[1:] != weight.shape or inputs.dtype not in DTYPES:
        raise ValueError(f"inputs {list(inputs.shape)} {inputs.dtype} for a norm over {len(weight)}")
    inputs = inputs.contiguous()
    outputs = torch.empty_like(inputs)
    op = norm_op(weight, eps, x_stride=len(weight), y_stride=len(weight), exact=exact)
    library.functions.octavo_norm(
        byref(op),
        inputs.data_ptr(),
        outputs.data_ptr(),
        len(inputs),
        DTYPES[inputs.dtype],
        torch.get_num_threads(),
    )
    return outputs
