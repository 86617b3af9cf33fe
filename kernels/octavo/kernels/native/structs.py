"""Mirrors the structs of src/types.h, field by field, and its constants."""

from ctypes import POINTER, Structure, Union, c_float, c_int8, c_int32, c_int64, c_void_p
from enum import IntEnum

import torch

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
# Those of keys and values.
CACHE_DTYPES = {**DTYPES, torch.int8: 2}


class Epilogue(IntEnum):
    """Says where a product goes: stored, added to the output, gate and up multiplied, stored as fp32, as a gate
    multiplied with the output, or stored after an activation function."""

    STORE = 0
    ADD = 1
    GATE = 2
    STORE_FLOAT = 3
    MULTIPLY = 4
    ACTIVATE = 5


class Activation(IntEnum):
    """Names an activation function."""

    SILU = 0
    GELU_TANH = 1
    GELU = 2


class Scales(IntEnum):
    """Says what the scales of a quantised weight are, as src/quantized_layout.h does."""

    HALF = 0
    GROUP = 1
    SIXTEEN = 2
    FLOAT = 3


class OpKind(IntEnum):
    """Tells which member of an `Op` holds."""

    LINEAR = 0
    NORM = 1
    ROPE_WRITE = 2
    ATTENTION = 3
    QUANTIZE = 4
    QUANTIZED_LINEAR = 5


class LinearOp(Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("x_stride", c_int64),
        ("y_stride", c_int64),
        ("epilogue", c_int32),
        ("activation", c_int32),
        ("scale", c_float),
    )


class QuantizedLinearOp(Structure):
    _fields_ = (("linear", LinearOp), ("group", c_int64), ("format", c_int32), ("values", c_int8 * 16))


class QuantizeOp(Structure):
    _fields_ = (("size", c_int64), ("x_stride", c_int64), ("twice_above", c_float))


class QuantizedTensors(Structure):
    _fields_ = (
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("mins", c_void_p),
        ("block_scales", c_void_p),
        ("block_mins", c_void_p),
        ("inputs", c_int64),
        ("group", c_int64),
    )


class WeightFormat(Structure):
    """Mirrors the struct of src/quantized_layout.h."""

    _fields_ = tuple((name, c_int32) for name in ("bits", "offset", "scales", "mins", "table"))


class NormOp(Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("size", c_int64),
        ("x_stride", c_int64),
        ("y_stride", c_int64),
        ("eps", c_float),
        ("scale", c_float),
        ("epilogue", c_int32),
        ("exact", c_int32),
        ("centred", c_int32),
    )


class RopeWriteOp(Structure):
    _fields_ = (
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("rotary_dim", c_int64),
        ("query_heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("x_stride", c_int64),
        ("eps", c_float),
        ("exact", c_int32),
    )


class AttentionOp(Structure):
    _fields_ = (
        ("sinks", c_void_p),
        ("query_heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("x_stride", c_int64),
        ("y_stride", c_int64),
        ("scale", c_float),
        ("softcap", c_float),
        ("exact", c_int32),
        ("two_sided", c_int32),
    )


class LayerCachePointers(Structure):
    _fields_ = (("keys", c_void_p), ("values", c_void_p), ("block_stride", c_int64), ("dtype", c_int32))


class GroupStep(Structure):
    _fields_ = (
        ("slots", c_void_p),
        ("block_tables", c_void_p),
        ("contexts", c_void_p),
        ("first_tokens", c_void_p),
        ("units", c_void_p),
        ("num_units", c_int64),
        ("table_stride", c_int64),
        ("block_size", c_int64),
        ("window", c_int64),
    )


class BufferAt(Structure):
    _fields_ = (("buffer", c_int64), ("offset", c_int64))


class _AnyOp(Union):
    _fields_ = (
        ("linear", LinearOp),
        ("norm", NormOp),
        ("rope_write", RopeWriteOp),
        ("attention", AttentionOp),
        ("quantize", QuantizeOp),
        ("quantized_linear", QuantizedLinearOp),
    )


class Op(Structure):
    _anonymous_ = ("any",)
    _fields_ = (("kind", c_int32), ("layer", c_int32), ("input", BufferAt), ("output", BufferAt), ("any", _AnyOp))


class Layer(Structure):
    _fields_ = (("cache", LayerCachePointers), ("group", c_int64))


class Run(Structure):
    _fields_ = (
        ("ops", POINTER(Op)),
        ("num_ops", c_int64),
        ("buffers", POINTER(c_void_p)),
        ("positions", c_void_p),
        ("groups", POINTER(GroupStep)),
        ("layers", POINTER(Layer)),
        ("nanoseconds", c_void_p),
        ("tokens", c_int64),
        ("dtype", c_int32),
        ("threads", c_int32),
    )
