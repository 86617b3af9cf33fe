"""Every variant of the native RMSNorm against torch."""

from ctypes import byref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.native.norm import norm_op, rms_norm
from octavo.kernels.native.structs import DTYPES as CODES
from octavo.testing.native import library, threads

__all__ = ["library"]

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
EPS = 1e-5


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 15, 16, 17, 64, 100])
def test_equals_torch(library: NativeLibrary, size: int, dtype: torch.dtype) -> None:
    weight = random(size)
    inputs = torch.cat((random(5, size, seed=1), 1e-4 * random(1, size), 1e4 * random(1, size), torch.zeros(1, size)))
    inputs = inputs.to(dtype)
    expected = F.rms_norm(inputs.float(), (size,), weight, EPS)
    normed = rms_norm(library, inputs, weight, EPS)
    assert normed.dtype == dtype
    torch.testing.assert_close(normed.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [17, 64])
def test_can_be_added_in_a_share_to_what_is_there(library: NativeLibrary, size: int, dtype: torch.dtype) -> None:
    inputs, weight = random(6, size, dtype=dtype), random(size, seed=1)
    # Both lie in wider rows.
    wide, sums = torch.full((6, size + 3), 7.0, dtype=dtype), random(6, size + 5, dtype=dtype, seed=2)
    wide[:, :size] = inputs
    before = sums.clone()
    op = norm_op(weight, EPS, x_stride=size + 3, y_stride=size + 5, added=0.5)
    library.functions.octavo_norm(byref(op), wide.data_ptr(), sums.data_ptr(), 6, CODES[dtype], 1)
    expected = before[:, :size].float() + 0.5 * F.rms_norm(inputs.float(), (size,), weight, EPS)
    torch.testing.assert_close(sums[:, :size].float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(sums[:, size:], before[:, size:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_whatever_is_beside_it(library: NativeLibrary, dtype: torch.dtype) -> None:
    inputs, weight = random(9, 100, dtype=dtype), random(100, seed=1)
    expected = torch.cat([rms_norm(library, row, weight, EPS) for row in torch.split(inputs, 1)])
    for count in (1, 2, 4):
        with threads(count):
            assert torch.equal(rms_norm(library, inputs, weight, EPS), expected)
    inputs[3, 99] = torch.nan
    normed = rms_norm(library, inputs, weight, EPS)
    assert normed[3].isnan().all()
    assert not normed[[0, 1, 2, 4, 5, 6, 7, 8]].isnan().any()


@pytest.mark.parametrize(
    ("inputs", "weight", "message"),
    [
        (torch.zeros(2, 9), torch.zeros(8), "for a norm over 8"),
        (torch.zeros(8), torch.zeros(8), "for a norm over 8"),
        (torch.zeros(2, 8, dtype=torch.float16), torch.zeros(8), "for a norm over 8"),
        (torch.zeros(2, 8), torch.zeros(8, dtype=torch.bfloat16), "a norm's weight is fp32"),
        (torch.zeros(2, 8), torch.zeros(16)[::2], "a norm's weight is fp32"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    library: NativeLibrary, inputs: Tensor, weight: Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        rms_norm(library, inputs, weight, EPS)
