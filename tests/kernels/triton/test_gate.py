"""The gate of a gated MLP, against torch's activations."""

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.triton.layers.gate import ACTIVATIONS, gated

IN_TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": functools.partial(F.gelu, approximate="tanh"),
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_activated_gate_multiplies(activation: str, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    for tokens, size in ((0, 4), (1, 1), (1, 1025), (3, 96), (5, 33)):
        gate_up = (3 * torch.randn((tokens, 2 * size), generator=generator)).to(device, dtype)
        gate, up = gate_up.float().chunk(2, dim=1)
        found = gated(gate_up, activation)
        assert found.dtype == dtype
        expected = (IN_TORCH[activation](gate) * up).to(dtype)
        torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_largest_gates_neither_overflow_nor_hide_what_is_broken(activation: str, device: torch.device) -> None:
    gates = torch.tensor([1e38, -1e38, 100.0, -100.0, 0.0, torch.nan], device=device)
    found = gated(torch.cat((gates, torch.ones_like(gates)))[None], activation)[0]
    torch.testing.assert_close(found, IN_TORCH[activation](gates), equal_nan=True, atol=1e-30, rtol=1e-6)


def test_a_row_may_stand_in_a_wider_one(device: torch.device) -> None:
    rows = torch.randn((3, 20), generator=torch.Generator().manual_seed(0)).to(device)
    assert torch.equal(gated(rows[:, 3:15], "silu"), gated(rows[:, 3:15].contiguous(), "silu"))


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="'relu' is none of the activations silu, gelu, gelu_pytorch_tanh"):
        gated(torch.zeros((1, 2), device=device), "relu")
    for wrong in (torch.zeros(4), torch.zeros((1, 3)), torch.zeros((1, 2)).double(), torch.zeros((4, 4)).t()[:, ::2]):
        with pytest.raises(ValueError, match=r"gate and up are \[tokens, 2 \* n\]"):
            gated(wrong.to(device), "silu")
