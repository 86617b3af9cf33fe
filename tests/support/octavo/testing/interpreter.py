"""Triton's interpreter, quicker, and with a matrix product whose bits follow from its operands' rows and columns alone.

The interpreter's own is numpy's, so that of whichever BLAS is there: it orders a sum by the shape of the product and by
the CPU. A GPU's matrix instruction does neither, and what is exact there must be seen to be exact here.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import triton
from triton.runtime import interpreter

Dtype = np.dtype[Any]
Matrix = npt.NDArray[np.floating[Any]]


def spare_repetition(patch: pytest.MonkeyPatch) -> None:
    """Has the interpreter do once what it does again at each operation, which is two fifths of all its time and changes
    nothing: it puts its own operations into Triton's language, and makes a table of dtypes to look one up."""
    patch.setattr(interpreter, "_patch_lang", _patched_once(interpreter._patch_lang))
    patch.setattr(interpreter, "_get_np_dtype", _looked_up_once(interpreter._get_np_dtype))


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
