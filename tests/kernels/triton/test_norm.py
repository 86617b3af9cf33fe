"""RMSNorm and the residual addition before it, against torch's operations."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.triton.layers.norm import MAX_SIZE, add_rms_norm, rms_norm

EPS = 1e-5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# About a unit in the last place of what is normed.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
SIZES = [1, 64, 100, 2560]


def random(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def plain_norm(rows: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(rows.float(), weight.shape, weight, EPS).to(rows.dtype)


def assert_alike(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_rows_are_normed(dtype: torch.dtype, size: int, device: torch.device) -> None:
    weight = random(size, device=device, seed=1)
    for tokens in (0, 1, 5):
        hidden = random(tokens, size, device=device, dtype=dtype)
        before = hidden.clone()
        assert_alike(rms_norm(hidden, weight, EPS), plain_norm(hidden, weight))
        assert torch.equal(hidden, before)


def test_a_part_of_each_row_is_normed_in_place(device: torch.device) -> None:
    rows = random(3, 50, device=device)
    before, part, weight = rows.clone(), rows[:, 10:40], random(30, device=device, seed=1)
    assert rms_norm(part, weight, EPS, out=part) is part
    assert_alike(part, plain_norm(before[:, 10:40], weight))
    assert torch.equal(rows[:, :10], before[:, :10])
    assert torch.equal(rows[:, 40:], before[:, 40:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_an_update_is_added_before_the_norm(dtype: torch.dtype, size: int, device: torch.device) -> None:
    residual, update = (random(3, size, device=device, dtype=dtype, seed=seed) for seed in range(2))
    weight = random(size, device=device, seed=2)
    expected = torch.add(residual, update, alpha=0.7)
    normed = add_rms_norm(residual, update, weight, EPS, scale=0.7)
    assert_alike(residual, expected)
    # Of the sum as it was rounded.
    assert_alike(normed, plain_norm(residual, weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_scale_the_sum_is_torchs_to_the_last_bit(dtype: torch.dtype, device: torch.device) -> None:
    residual, update = (random(3, 100, device=device, dtype=dtype, seed=seed) for seed in range(2))
    expected = residual + update
    add_rms_norm(residual, update, torch.ones(100, device=device), EPS)
    assert torch.equal(residual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_update_may_be_normed_too(dtype: torch.dtype, device: torch.device) -> None:
    residual, update = (random(3, 100, device=device, dtype=dtype, seed=seed) for seed in range(2))
    weight, update_weight = (random(100, device=device, seed=seed) for seed in (2, 3))
    expected = residual + plain_norm(update, update_weight)
    normed = add_rms_norm(residual, update, weight, EPS, update_weight=update_weight)
    assert_alike(residual, expected)
    assert_alike(normed, plain_norm(residual, weight))


def test_without_a_norm_the_sum_itself_is_returned(device: torch.device) -> None:
    residual, update = (random(3, 100, device=device, seed=seed) for seed in range(2))
    expected = residual + update
    assert add_rms_norm(residual, update, None, EPS) is residual
    assert torch.equal(residual, expected)


def test_a_row_is_the_same_alone_and_among_others(device: torch.device) -> None:
    hidden, weight = random(9, 200, device=device), random(200, device=device, seed=1)
    together = rms_norm(hidden, weight, EPS)
    for row in range(9):
        assert torch.equal(rms_norm(hidden[row : row + 1], weight, EPS)[0], together[row])


def test_what_is_not_finite_stays_in_its_row(device: torch.device) -> None:
    hidden, weight = random(3, 40, device=device), torch.ones(40, device=device)
    hidden[1, 7] = torch.nan
    normed = rms_norm(hidden, weight, EPS)
    assert normed[1].isnan().all()
    assert normed[[0, 2]].isfinite().all()


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    hidden, weight = random(2, 8, device=device), torch.ones(8, device=device)
    for wrong, message in (
        (hidden[0], r"hidden is \[tokens, 1 to 16384\]"),
        (hidden.double(), "float64"),
        (hidden.t(), "rows without gaps"),
        (random(1, MAX_SIZE + 1, device=device), "16385"),
    ):
        with pytest.raises(ValueError, match=message):
            rms_norm(wrong, weight, EPS)
    for wrong in (weight[:7], weight.bfloat16(), torch.ones(16, device=device)[::2]):
        with pytest.raises(ValueError, match="a norm's weight is"):
            rms_norm(hidden, wrong, EPS)
    for wrong in (random(3, 8, device=device), hidden.bfloat16()):
        with pytest.raises(ValueError, match="update is"):
            add_rms_norm(hidden, wrong, weight, EPS)
        with pytest.raises(ValueError, match="out is"):
            rms_norm(hidden, weight, EPS, out=wrong)
