"""The product that stands in for a GPU's in the interpreter: right, and in one order whatever stands beside a row."""

import numpy as np
import pytest
import torch
import triton
from triton.runtime import interpreter

from octavo.testing.interpreter import Matrix, ordered_product


def normal(*shape: int, seed: int) -> Matrix:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("inputs", [1, 2, 16, 128])
def test_a_product_is_right(inputs: int) -> None:
    left, right, added = normal(16, inputs, seed=1), normal(inputs, 32, seed=2), normal(16, 32, seed=3)
    found = ordered_product(left, right, added)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, left.astype(np.float64) @ right + added, rtol=0, atol=1e-4)


def test_the_bits_of_an_element_are_those_of_its_row_and_column() -> None:
    """However large the product is around it, and however it lies in memory."""
    left, right, added = normal(64, 64, seed=1), normal(64, 128, seed=2), normal(64, 128, seed=3)
    whole = ordered_product(left, right, added)
    for rows in (1, 2, 16, 33):
        for columns in (1, 8, 31):
            part = ordered_product(left[:rows], np.asfortranarray(right[:, :columns]), added[:rows, :columns])
            assert np.array_equal(part, whole[:rows, :columns])


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU, not in the interpreter")
def test_kernels_in_the_interpreter_use_it() -> None:
    """In whichever version of Triton there is."""
    assert triton.knobs.runtime.interpret
    assert interpreter.InterpreterBuilder.create_dot.__module__ == ordered_product.__module__
