"""Triton's interpreter, quicker, and with a matrix product whose bits follow from its operands' rows and columns alone.

The interpreter's own is numpy's, so that of whichever BLAS is there: it orders a sum by the shape of the product and by
the CPU. A GPU's matrix instruction does neither, and what is exact there must be seen to be exact here.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import triton
from triton.language import core
from triton.runtime import interpreter

Dtype = np.dtype[Any]
Matrix = npt.NDArray[np.floating[Any]]


def spare_repetition(patch: pytest.MonkeyPatch) -> None:
    """Has the interpreter do once what it does again at each operation, which is most of all its time and changes
    nothing: it puts its own operations into Triton's language, makes a table of dtypes to look one up, and makes the
    same few shapes. What it computes of overflows, it throws away: that is left out."""
    patch.setattr(interpreter, "_patch_lang", _patched_once(interpreter._patch_lang))
    patch.setattr(interpreter, "_get_np_dtype", _looked_up_once(interpreter._get_np_dtype))
    patch.setattr(core.tensor, "__init__", _init_tensor)
    patch.setattr(core.block_type, "__init__", _init_block_type)
    semantic = interpreter.interpreter_semantic
    patch.setattr(semantic, "broadcast_impl_value", _broadcast_if_unlike(semantic.broadcast_impl_value))
    options = semantic.builder.options
    assert not options.debug, "its assertions would be heard"
    patch.setattr(semantic.builder, "options", dataclasses.replace(options, sanitize_overflow=False))


@functools.cache
def _block_shape(sizes: tuple[int, ...]) -> tuple[Any, int, str]:
    """Returns the shape as a type of blocks has it, which nothing changes, its number of elements, and its name."""
    shape = core.tuple(list(sizes))
    return shape, core.validate_block_shape(sizes), str(shape)


@functools.cache
def _tensor_shape(shape: tuple[int, ...]) -> tuple[Any, Any]:
    return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))


def _init_block_type(block_type: Any, element_ty: Any, shape: Any) -> None:
    given = shape.value if isinstance(shape, core.constexpr) else shape
    sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in given])
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    block_type.element_ty = element_ty
    block_type.shape, block_type.numel, name = _block_shape(sizes)
    block_type.name = f"<{name}, {element_ty}>"


def _init_tensor(tensor: Any, handle: Any, kind: Any) -> None:
    tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
    tensor.shape, tensor.numel = _tensor_shape(tuple(kind.shape) if kind.is_block() else ())


def _broadcast_if_unlike(broadcast: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def broadcast_if_unlike(left: Any, right: Any) -> Any:
        if left.type.is_block() and right.type.is_block() and left.type.shape is right.type.shape:
            return left, right
        return broadcast(left, right)

    return broadcast_if_unlike


def _looked_up_once(dtype_of: Callable[[Any], Dtype]) -> Callable[[Any], Dtype]:
    found: dict[str, Dtype] = {}

    def look_up(triton_dtype: Any) -> Dtype:
        # Of a block, that of its elements. Not every dtype has a hash.
        scalar = triton_dtype.scalar
        if scalar.name not in found:
            found[scalar.name] = dtype_of(scalar)
        return found[scalar.name]

    return look_up


def _patched_once(patch_language: Callable[[Any], Any]) -> Callable[[Any], Any]:
    patched = set[str]()

    @functools.cache
    def names_in(function: Any) -> frozenset[str]:
        return frozenset(
            value.__name__
            for value in function.__globals__.values()
            if inspect.ismodule(value) and value in (triton.language, triton.language.core)
        )

    def patch_once(function: Any) -> Any:
        names = names_in(function)
        if names and names <= patched:
            return interpreter._LangPatchScope()
        scope = patch_language(function)
        patched.update(names)
        restore = scope.restore

        def restore_these() -> None:
            patched.difference_update(names)
            restore()

        scope.restore = restore_these
        return scope

    return patch_once


def ordered_product(left: Matrix, right: Matrix, added: Matrix) -> Matrix:
    """`added` + `left` @ `right` in `added`'s dtype: products are summed by halves, which only their number decides.
    That is a power of two."""
    products = left.T[:, :, None].astype(added.dtype) * right[:, None, :].astype(added.dtype)
    while len(products) > 1:
        half = len(products) // 2
        products = np.add(products[:half], products[half:], out=products[:half])
    total: Matrix = products[0] + added
    return total


def order_dots(patch: pytest.MonkeyPatch) -> None:
    """Has the interpreter multiply so, where there is no GPU."""
    if triton.knobs.runtime.interpret:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", _create_dot)


def _create_dot(builder: object, left: Any, right: Any, added: Any, *_: object) -> Any:
    return interpreter.TensorHandle(ordered_product(left.data, right.data, added.data), added.dtype.scalar)
