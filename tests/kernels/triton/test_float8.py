"""Linear layers in e4m3, against the numbers that their rounded inputs and weights stand for."""

from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels.quantized import FORMATS, Quantized
from octavo.kernels.triton.devices import shared_limit
from octavo.kernels.triton.layers import float8
from octavo.kernels.triton.layers.float8 import Float8Weight, fitted, float8_linear, round_rows
from octavo.kernels.triton.layers.output_tiles import OutputTile, smallest

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weight_of(outputs: int, inputs: int, group: int, device: torch.device) -> Quantized:
    values = random(outputs, inputs, seed=1).mul_(8).to(torch.float8_e4m3fn)
    scales = random(outputs, inputs // group, seed=2).abs_().add_(0.1).mul_(inputs**-0.5 / 16)
    return Quantized(FORMATS["fp8"], values.view(torch.uint8).to(device), scales.to(device))


def rounded(rows: Tensor, group: int) -> Tensor:
    """What rows are in e4m3, in fp64."""
    groups = rows.float().view(len(rows), -1, group)
    scales = groups.abs().amax(dim=2, keepdim=True).clamp(min=1e-12) / 448
    values: Tensor = ((groups / scales).to(torch.float8_e4m3fn).double() * scales.double()).flatten(1)
    return values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "group"), [(96, 96), (256, 128), (1100, 1100), (64, 32)])
def test_rows_are_rounded_by_the_largest_of_a_group(
    inputs: int, group: int, dtype: torch.dtype, device: torch.device
) -> None:
    rows = random(3, inputs).to(device, dtype)
    rows[1] = 0
    values, scales = round_rows(rows, group)
    assert values.dtype == torch.float8_e4m3fn
    found = values.double() * scales.double().repeat_interleave(group, dim=1)
    assert torch.equal(found, rounded(rows, group))
    # Three bits of mantissa.
    torch.testing.assert_close(found, rows.double(), atol=float(scales.max()) * 2**-10, rtol=2**-4)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "inputs", "outputs", "group"),
    [(1, 64, 16, 64), (3, 160, 48, 160), (17, 256, 130, 128), (2, 192, 65, 64), (70, 128, 16, 128)],
)
def test_rounded_inputs_are_multiplied_by_the_weights_numbers(
    tokens: int,
    inputs: int,
    outputs: int,
    group: int,
    dtype: torch.dtype,
    scaled: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if scaled and not float8.scaled_products_available(device):
        pytest.skip("this torch does not multiply rows of e4m3 here")
    monkeypatch.setattr(float8, "scaled_products_available", lambda device: scaled)
    weight = weight_of(outputs, inputs, group, device)
    rows, bias = random(tokens, inputs).to(device, dtype), random(outputs, seed=3).to(device, dtype)
    exact = rounded(rows, group) @ weight.dequantize().double().T
    for given in (None, bias):
        found = float8_linear(rows, Float8Weight.of(weight), given)
        assert found.dtype == dtype
        wanted = exact if given is None else exact + given
        torch.testing.assert_close(found.double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_torch_multiplies_what_it_takes(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if not float8.scaled_products_available(device):
        pytest.skip("this torch does not multiply rows of e4m3 here")
    calls, by_kernel = list[object](), float8._by_kernel

    def counted(*given: Any) -> Tensor:
        calls.append(given)
        return by_kernel(*given)

    monkeypatch.setattr(float8, "_by_kernel", counted)
    rows = random(2, 128).to(device)
    for outputs, group, dtype, by_torch in (
        (32, 128, torch.bfloat16, True),
        (40, 128, torch.bfloat16, False),
        (32, 64, torch.bfloat16, False),
        (32, 128, torch.float16, False),
    ):
        calls.clear()
        float8_linear(rows.to(dtype), Float8Weight.of(weight_of(outputs, 128, group, device)))
        assert bool(calls) != by_torch


@pytest.mark.parametrize("group", [128, 256])
def test_what_is_not_finite_stays_in_its_row(group: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "scaled_products_available", lambda device: False)
    weight, rows = Float8Weight.of(weight_of(8, 256, group, device)), random(4, 256).to(device)
    rows[1, 255], rows[2, 3] = torch.nan, torch.inf
    found = float8_linear(rows, weight)
    assert found[[1, 2]].isnan().all()
    assert found[[0, 3]].isfinite().all()


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    weight, rows = Float8Weight.of(weight_of(8, 64, 64, device)), random(3, 64).to(device)
    assert torch.equal(weight.dequantize(), weight_of(8, 64, 64, device).dequantize())
    assert float8_linear(rows[:0], weight).shape == (0, 8)
    for wrong, message in (
        (rows[:, :32], r"inputs \[3, 32\] .* for a weight of 64 inputs"),
        (rows.double(), "torch.float64 for a weight"),
        (rows.t().contiguous().t(), "rows have gaps"),
    ):
        with pytest.raises(ValueError, match=message):
            float8_linear(wrong, weight)
    with pytest.raises(ValueError, match=r"a bias \[7\]"):
        float8_linear(rows, weight, rows[0, :7])
    with pytest.raises(ValueError, match="a weight of q8_0 is not one of e4m3"):
        Float8Weight.of(Quantized(FORMATS["q8_0"], torch.zeros(4, 32, dtype=torch.uint8), torch.ones(4, 1).half()))


def test_tiles_grow_with_the_work_and_take_the_shared_memory_that_there_is() -> None:
    tiles = float8._TILES
    assert [smallest(tiles, tokens).tokens for tokens in (1, 16, 17, 65, 8192)] == [16, 16, 64, 128, 128]
    assert fitted(tiles[-1], shared_limit(90)) == tiles[-1]
    assert fitted(OutputTile(128, 128, 8, 4), shared_limit(89)).loads == 3
