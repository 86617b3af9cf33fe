"""Linear layers whose rows do not depend on each other, against `F.linear`."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.triton.devices import shared_limit
from octavo.kernels.triton.layers import matmul
from octavo.kernels.triton.layers.matmul import Tile, choose_tile, fitted, linear

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def random(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    # Sums of products near one.
    normal = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return normal.mul_(shape[-1] ** -0.25).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "inputs", "outputs"), [(0, 8, 8), (1, 1, 1), (1, 128, 96), (3, 100, 70), (70, 40, 130)]
)
def test_inputs_are_multiplied(
    tokens: int, inputs: int, outputs: int, dtype: torch.dtype, device: torch.device
) -> None:
    rows, weight = (random(count, inputs, device=device, dtype=dtype, seed=count) for count in (tokens, outputs))
    bias = random(outputs, device=device, dtype=dtype)
    for given in (None, bias):
        exact = F.linear(rows.double(), weight.double(), None if given is None else given.double())
        for out_float in (False, True):
            found = linear(rows, weight, given, out_float=out_float)
            assert found.dtype == (torch.float32 if out_float else dtype)
            tolerance = TOLERANCE[found.dtype]
            torch.testing.assert_close(found.double(), exact, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_alone_and_among_others(dtype: torch.dtype, device: torch.device) -> None:
    rows, weight = (random(count, 100, device=device, dtype=dtype, seed=count) for count in (130, 40))
    alone = torch.cat([linear(rows[row : row + 1], weight, out_float=True) for row in (0, 1, 64, 129)])
    for tokens in (2, 65, 130):
        together = linear(rows[:tokens], weight, out_float=True)
        assert torch.equal(together[:2], alone[:2])
        assert torch.equal(linear(rows[-tokens:], weight, out_float=True)[-1], alone[3])
    assert torch.equal(together[64], alone[2])


def test_tiles_do_not_change_the_order_of_a_sum(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    dtype = torch.bfloat16
    rows, weight = (random(count, 100, device=device, dtype=dtype, seed=count) for count in (129, 260))
    found, chosen = [], set()
    for enough in (1, 5, 7, 10, 100):
        monkeypatch.setattr(matmul, "_ENOUGH_PROGRAMS", enough)
        for tokens in (20, 129):
            chosen.add(choose_tile(tokens, 260, dtype))
            found.append(linear(rows[:tokens], weight, out_float=True)[:20])
    assert len(chosen) == 5
    assert all(torch.equal(other, found[0]) for other in found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares the GPU's matrix instructions")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 6144), (12288, 4096), (4096, 24576), (1000, 49152)])
def test_every_tile_gives_the_same_bits(inputs: int, outputs: int, dtype: torch.dtype, device: torch.device) -> None:
    rows, weight = (random(count, inputs, device=device, dtype=dtype, seed=count) for count in (2048, outputs))
    everything = linear(rows, weight, out_float=True)
    for tokens in (1, 2, 16, 33, 64, 65, 128, 200, 512, 1024):
        assert torch.equal(linear(rows[:tokens], weight, out_float=True), everything[:tokens])


def test_tiles_grow_with_the_work() -> None:
    bf16 = torch.bfloat16
    assert choose_tile(1, 4096, bf16) == choose_tile(32, 4096, bf16) == Tile(64, 32, 4, 8)
    assert choose_tile(33, 4096, bf16) == choose_tile(64, 6144, bf16) == Tile(64, 64, 4, 6)
    assert choose_tile(1, 24576, bf16) == choose_tile(64, 24576, bf16) == Tile(64, 128, 4, 4)
    assert choose_tile(512, 4096, bf16) == Tile(128, 128, 4, 3)
    assert choose_tile(1024, 4096, bf16) == choose_tile(65, 151936, bf16) == Tile(128, 256, 8, 4)
    # Fewer rows than half of a tile would leave one warp group with nothing.
    assert choose_tile(64, 151936, bf16) == Tile(64, 128, 4, 4)
    assert choose_tile(1, 151936, torch.float32) == choose_tile(4096, 4096, torch.float32)


def test_tiles_take_the_shared_memory_that_there_is() -> None:
    largest = Tile(128, 256, 8, 4)
    assert fitted(largest, torch.bfloat16, shared_limit(90)) == largest
    assert fitted(largest, torch.bfloat16, shared_limit(80)) == Tile(128, 256, 8, 3)
    assert fitted(largest, torch.bfloat16, shared_limit(86)) == Tile(128, 256, 8, 2)
    assert fitted(Tile(64, 32, 4, 8), torch.bfloat16, shared_limit(86)) == Tile(64, 32, 4, 8)


def test_what_is_not_finite_stays_in_its_row(device: torch.device) -> None:
    rows, weight = random(3, 70, device=device), random(8, 70, device=device)
    rows[1, 69] = torch.nan
    found = linear(rows, weight)
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()


def test_rows_may_stand_in_wider_ones(device: torch.device) -> None:
    rows, weight = random(3, 64, device=device), random(8, 64, device=device)
    assert torch.equal(linear(rows[:, 8:40], weight[:, 8:40]), linear(rows[:, 8:40].clone(), weight[:, 8:40].clone()))


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    rows, weight = random(2, 8, device=device), random(4, 8, device=device)
    for wrong, message in (
        (rows[0], "inputs .8. for a weight"),
        (rows[:, :7], r"inputs \[2, 7\] for a weight \[4, 8\]"),
        (rows.bfloat16(), "inputs of torch.bfloat16 and a weight of torch.float32"),
        (rows.t().contiguous().t(), "rows have gaps"),
    ):
        with pytest.raises(ValueError, match=message):
            linear(wrong, weight)
    for wrong in (random(3, device=device), random(4, device=device).half()):
        with pytest.raises(ValueError, match="a bias"):
            linear(rows, weight, wrong)
