"""Prepacked weights against `F.linear`, and rows that do not depend on how many there are."""

import pytest
import torch
import torch.nn.functional as F

from octavo.worker.linear import Linear, prepacking_available

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


def needs_prepacking(dtype: torch.dtype) -> None:
    if not prepacking_available(dtype):
        pytest.skip(f"this torch or CPU does not prepack {dtype}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 33])
def test_prepacked_equals_plain(dtype: torch.dtype, biased: bool, rows: int) -> None:
    needs_prepacking(dtype)
    weight, inputs = torch.randn(96, 80).to(dtype), torch.randn(rows, 80).to(dtype)
    bias = torch.randn(96).to(dtype) if biased else None
    packed, plain = Linear(weight, bias, prepack=True), Linear(weight, bias, prepack=False)
    assert packed.prepacked
    assert not plain.prepacked
    torch.testing.assert_close(packed(inputs), plain(inputs), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(plain(inputs), F.linear(inputs, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_alone_as_among_others(dtype: torch.dtype) -> None:
    needs_prepacking(dtype)
    # The widest input of the bundled model: there a single row takes another path than several.
    linear = Linear(torch.randn(576, 1536).to(dtype))
    inputs = torch.randn(64, 1536).to(dtype)
    together = linear(inputs)
    for rows in (1, 2, 7):
        assert torch.equal(linear(inputs[:rows]), together[:rows])


def test_a_dtype_that_cannot_be_prepacked_runs_plain() -> None:
    linear = Linear(torch.randn(4, 8, dtype=torch.float64))
    assert not linear.prepacked
    assert linear(torch.randn(3, 8, dtype=torch.float64)).shape == (3, 4)
