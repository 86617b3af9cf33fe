"""Products with the weights of experts, against one row after the other."""

import pytest
import torch
from torch import Tensor

from octavo.kernels.triton.devices import shared_limit
from octavo.kernels.triton.layers import grouped
from octavo.kernels.triton.layers.grouped import Routing, choose_tile, fitted, grouped_linear, most_tiles
from octavo.kernels.triton.layers.output_tiles import OutputTile

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def random(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    normal = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return normal.mul_(shape[-1] ** -0.25).to(device, dtype)


def expected(inputs: Tensor, weight: Tensor, bias: Tensor | None, experts: Tensor, copies: int = 1) -> Tensor:
    """In fp64, from weights that are not transposed."""
    rows = []
    for row, expert in enumerate(experts.tolist()):
        if expert >= len(weight):
            rows.append(torch.zeros(weight.shape[1], dtype=torch.float64, device=inputs.device))
            continue
        product = weight[expert].double() @ inputs[row // copies].double()
        rows.append(product if bias is None else product + bias[expert].double())
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("experts", "copies", "num_experts", "inputs", "outputs"),
    [
        ([0], 1, 1, 32, 16),
        ([2, 0, 2, 2], 2, 3, 100, 70),
        ([5, 5, 5, 5, 0, 1], 3, 6, 64, 130),
        ([1] * 19 + [0, 3] * 4 + [1], 1, 4, 40, 8),
    ],
)
def test_each_row_has_its_experts_product(
    experts: list[int],
    copies: int,
    num_experts: int,
    inputs: int,
    outputs: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    sent = torch.tensor(experts, device=device)
    rows = random(len(experts) // copies, inputs, device=device, dtype=dtype)
    weight = random(num_experts, outputs, inputs, device=device, dtype=dtype, seed=1)
    bias = random(num_experts, outputs, device=device, dtype=dtype, seed=2)
    routing = Routing.of(sent, num_experts)
    for given in (None, bias):
        wanted = expected(rows, weight, given, sent, copies)
        for transposed in (False, True):
            laid = weight.mT.contiguous() if transposed else weight
            found = grouped_linear(rows, laid, given, routing, copies=copies, transposed=transposed)
            assert found.dtype == dtype
            torch.testing.assert_close(found.double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_tiles_are_enough_however_rows_are_shared_out(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "_FP32_TILES", (OutputTile(16, 16, 4, 2),))
    weight = random(3, 16, 32, device=device)
    for counts in ((33, 1, 1), (16, 16, 3), (1, 17, 17), (35, 0, 0), (0, 0, 35)):
        sent = torch.repeat_interleave(torch.arange(3, device=device), torch.tensor(counts, device=device))
        sent = sent[torch.randperm(35, generator=torch.Generator().manual_seed(sum(counts[:2]))).to(device)]
        rows = random(35, 32, device=device, seed=counts[0])
        found = grouped_linear(rows, weight, None, Routing.of(sent, 3))
        torch.testing.assert_close(found.double(), expected(rows, weight, None, sent), atol=1e-4, rtol=1e-4)


def test_rows_of_no_expert_are_zeros(device: torch.device) -> None:
    rows, weight = random(4, 32, device=device), random(2, 16, 32, device=device)
    sent = torch.tensor([2, 1, 2, 0], device=device)
    found = grouped_linear(rows, weight, None, Routing.of(sent, 2))
    torch.testing.assert_close(found.double(), expected(rows, weight, None, sent), atol=1e-4, rtol=1e-4)
    assert not found[[0, 2]].any()
    assert grouped_linear(rows[:0], weight, None, Routing.of(sent[:0], 2)).shape == (0, 16)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    rows, weight = random(4, 32, device=device), random(2, 16, 32, device=device)
    routing = Routing.of(torch.tensor([0, 1, 1, 0], device=device), 2)
    for wrong, copies, message in (
        (rows[:, :8], 1, r"inputs \[4, 8\] for weights"),
        (rows.double(), 1, "inputs of torch.float64"),
        (rows.t().contiguous().t(), 1, "rows have gaps"),
        (rows, 2, "4 rows to 2 experts are sent; there are 4 inputs 2 times"),
    ):
        with pytest.raises(ValueError, match=message):
            grouped_linear(wrong, weight, None, routing, copies=copies)
    with pytest.raises(ValueError, match=r"a bias \[2, 32\]"):
        grouped_linear(rows, weight, rows[:2], routing)


def test_tiles_grow_with_the_rows_of_an_expert() -> None:
    bf16 = torch.bfloat16
    # 64 tokens to 8 of 128 experts each; 256 to 4 of 32; prompts of 8k.
    assert choose_tile(512, 128, bf16).tokens == 16
    assert choose_tile(1024, 32, bf16).tokens == 64
    assert choose_tile(65536, 128, bf16).tokens == 128
    assert choose_tile(65536, 128, torch.float32).tokens == 32
    assert [most_tiles(*sizes) for sizes in ((1, 128, 16), (512, 128, 16), (65536, 128, 128))] == [1, 160, 640]
    assert fitted(choose_tile(65536, 128, bf16), bf16, shared_limit(90)).loads == 3
    assert fitted(choose_tile(65536, 128, bf16), bf16, shared_limit(86)).loads == 3
