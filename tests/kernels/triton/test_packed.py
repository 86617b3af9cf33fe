"""Linear layers whose weights stay in 4 bits, against the numbers that the weights stand for."""

import pytest
import torch
from torch import Tensor

from octavo.kernels.quantized import FORMATS, Quantized
from octavo.kernels.triton.devices import shared_limit
from octavo.kernels.triton.layers import packed
from octavo.kernels.triton.layers.output_tiles import OutputTile, smallest
from octavo.kernels.triton.layers.packed import FourBitWeight, choose_splits, fitted, packed_linear

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weight_of(form: str, outputs: int, inputs: int, group: int = 32, device: torch.device | None = None) -> Quantized:
    """Of random codes, scales and mins."""
    chance = torch.Generator().manual_seed(outputs)
    codes = torch.randint(16, (outputs, inputs), generator=chance, dtype=torch.uint8)
    wanted = FORMATS[form]
    groups = inputs // group
    dtype = torch.float32 if wanted.group == 0 else torch.float16
    scales = (torch.rand(outputs, groups, generator=chance) * inputs**-0.5 / 4).to(dtype)
    mins = (-scales * torch.randint(1, 17, scales.shape, generator=chance)).to(dtype) if wanted.mins else None
    return Quantized(wanted, codes.to(device), scales.to(device), None if mins is None else mins.to(device))


KINDS = [("q4_0", 32), ("q4_1", 32), ("int4", 32), ("int4", 64), ("int4", 96), ("int4", 128), ("int4", 192)]


@pytest.mark.parametrize(("form", "group"), KINDS)
def test_packing_loses_nothing(form: str, group: int) -> None:
    weight = weight_of(form, 130, 384, group)
    found = FourBitWeight.of(weight)
    assert found.codes.numel() == 256 * 384 // 2
    torch.testing.assert_close(found.dequantize(), weight.dequantize(), atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("form", "group", "tokens", "inputs", "outputs"),
    [
        ("q4_0", 32, 1, 64, 8),
        ("q4_1", 32, 3, 96, 130),
        ("int4", 64, 17, 192, 65),
        ("int4", 96, 2, 96, 64),
        ("int4", 128, 5, 256, 72),
        ("int4", 160, 1, 160, 16),
        ("int4", 128, 70, 128, 129),
    ],
)
def test_inputs_are_multiplied_by_the_weights_numbers(
    form: str, group: int, tokens: int, inputs: int, outputs: int, dtype: torch.dtype, device: torch.device
) -> None:
    weight = weight_of(form, outputs, inputs, group, device)
    rows, bias = random(tokens, inputs).to(device, dtype), random(outputs, seed=1).to(device, dtype)
    exact = rows.double() @ weight.dequantize().double().T
    for given in (None, bias):
        found = packed_linear(rows, FourBitWeight.of(weight), given)
        assert found.dtype == dtype
        wanted = exact if given is None else exact + given
        torch.testing.assert_close(found.double(), wanted.double(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("biased", [False, True])
def test_inputs_that_are_split_give_the_same(biased: bool, device: torch.device) -> None:
    weight = weight_of("int4", 40, 128 * 13, 128, device)
    rows = random(3, 128 * 13).to(device, torch.bfloat16)
    bias = random(40, seed=1).to(device, torch.bfloat16) if biased else None
    exact = rows.double() @ weight.dequantize().double().T
    # One program would read all of it.
    assert choose_splits(1, 13, 132) == (3, 5)
    found = packed_linear(rows, FourBitWeight.of(weight), bias)
    wanted = exact if bias is None else exact + bias
    torch.testing.assert_close(found.double(), wanted.double(), atol=8e-3, rtol=8e-3)


def test_tokens_beyond_the_largest_tile_have_programs_of_their_own(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "_FP32_TILES", (OutputTile(64, 16, 4, 2),))
    weight = weight_of("q4_0", 70, 64, 32, device)
    rows = random(35, 64).to(device)
    found = packed_linear(rows, FourBitWeight.of(weight))
    torch.testing.assert_close(found, rows @ weight.dequantize().T, atol=1e-5, rtol=1e-5)


def test_groups_that_were_cut_for_a_cpu_are_joined_again() -> None:
    codes, scales = torch.zeros(4, 512, dtype=torch.uint8), torch.rand(4, 4).half()
    found = FourBitWeight.of(Quantized(FORMATS["q4_0"], codes, scales.repeat_interleave(4, dim=1)))
    assert found.group == 128
    assert torch.equal(found.scales[:, :4].t(), scales)
    # Without zero points nothing else is kept.
    assert found.shifts is None
    assert found.nbytes == 128 * 512 // 2 + 4 * 128 * 2


def test_what_is_not_finite_stays_in_its_row(device: torch.device) -> None:
    weight, rows = FourBitWeight.of(weight_of("q4_1", 8, 96, 32, device)), random(3, 96).to(device)
    rows[1, 95] = torch.nan
    found = packed_linear(rows, weight)
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()


def test_rows_may_stand_in_wider_ones_and_may_be_none(device: torch.device) -> None:
    weight, rows = FourBitWeight.of(weight_of("q4_0", 8, 64, 32, device)), random(3, 100).to(device)
    assert torch.equal(packed_linear(rows[:, 8:72], weight), packed_linear(rows[:, 8:72].clone(), weight))
    assert packed_linear(rows[:0, :64], weight).shape == (0, 8)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    weight, rows = FourBitWeight.of(weight_of("q4_0", 8, 64, 32, device)), random(3, 64).to(device)
    for wrong, message in (
        (rows[:, :32], r"inputs \[3, 32\] .* for a weight of 64 inputs"),
        (rows.double(), "torch.float64 for a weight"),
        (rows.t().contiguous().t(), "rows have gaps"),
    ):
        with pytest.raises(ValueError, match=message):
            packed_linear(wrong, weight)
    with pytest.raises(ValueError, match=r"a bias \[7\]"):
        packed_linear(rows, weight, rows[0, :7])
    with pytest.raises(ValueError, match="a GPU multiplies by q4_0, q4_1, int4 as they are, not by q8_0"):
        FourBitWeight.of(Quantized(FORMATS["q8_0"], torch.zeros(4, 32, dtype=torch.uint8), torch.ones(4, 1).half()))


def test_a_device_is_kept_busy_and_no_program_has_next_to_nothing() -> None:
    # The query, key and value weights of an 8B model: 96 programs for 132 processors, of 32 pieces.
    assert choose_splits(96, 32, 132) == (5, 7)
    assert choose_splits(448, 32, 132) == (1, 32)
    assert choose_splits(1, 3, 132) == (1, 3)
    assert choose_splits(64, 112, 132) == (8, 14)
    tiles = packed._tiles(torch.bfloat16)
    assert [smallest(tiles, tokens).tokens for tokens in (1, 16, 17, 64, 65, 8192)] == [16, 16, 32, 64, 128, 128]
    assert smallest(packed._tiles(torch.float32), 8192).tokens == 32


def test_tiles_take_the_shared_memory_that_there_is() -> None:
    largest = packed._TILES[-1]
    assert fitted(largest, 64, torch.bfloat16, shared_limit(90)) == largest
    assert fitted(largest, 64, torch.bfloat16, shared_limit(86)).loads == 1
