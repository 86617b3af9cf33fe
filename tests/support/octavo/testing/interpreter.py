"""Triton's interpreter, quicker, and with a matrix product whose bits follow from its operands' rows and columns alone.

The interpreter's own is numpy's, so that of whichever BLAS is there: it orders a sum by the shape of the product and by
the CPU. A GPU's matrix instruction does neither, and what is exact there must be seen to be exact here.
"""

import inspect
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import triton
from triton.runtime import interpreter

Matrix = npt.NDArray[np.floating[Any]]


def patch_language_once(patch: pytest.MonkeyPatch) -> None:
    """Has the interpreter put its own operations into Triton's language once for a kernel.

    It does so again for each call of a function in the kernel, which is a third of all its time, and changes nothing.
    """
    patch_language = interpreter._patch_lang
    patched = set[str]()

    def patch_once(function: Any) -> Any:
        names = {
            value.__name__
            for value in function.__globals__.values()
            if inspect.ismodule(value) and value in (triton.language, triton.language.core)
        }
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

    patch.setattr(interpreter, "_patch_lang", patch_once)


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
