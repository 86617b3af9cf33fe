"""Linear layers of a model are Octavo's, except those whose weight the model itself reads."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from octavo.worker.models.transformers.linear import LinearModule, pack_linears, replace_linears


class Net(nn.Module):
    """Two ways to a linear layer, one module in two places, and a router that reads a weight."""

    def __init__(self) -> None:
        super().__init__()
        conv: Any = Conv1D
        self.conv = conv(24, 16)
        self.layers = nn.ModuleList([nn.Linear(24, 24), nn.Linear(24, 24, bias=False)])
        self.shared = self.layers[0]
        self.router = nn.Linear(24, 4, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.shared(self.layers[1](self.layers[0](self.conv(inputs))))
        return F.linear(hidden, self.router.weight)


class Odd(nn.Linear):
    """Not plain multiplication."""


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def packed(net: Net) -> Net:
    replace_linears(net)
    with torch.inference_mode():
        net(torch.zeros(1, 16))
    pack_linears(net)
    return net


@pytest.mark.parametrize("shape", [(1, 16), (5, 16), (2, 3, 16), (0, 16)])
def test_results_are_those_of_torch(net: Net, shape: tuple[int, ...]) -> None:
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = net(inputs)
        torch.testing.assert_close(packed(net)(inputs), expected, atol=1e-5, rtol=1e-5)


def test_a_weight_that_the_model_reads_stays_readable(net: Net) -> None:
    weight = net.router.weight.detach().clone()
    packed(net)
    assert torch.equal(net.router.weight, weight)
    with pytest.raises(RuntimeError, match="nobody read"):
        _ = net.shared.weight


def test_a_module_in_two_places_is_replaced_by_one(net: Net) -> None:
    replace_linears(net)
    assert isinstance(net.shared, LinearModule)
    assert net.shared is net.layers[0]


def test_subclasses_are_left_alone() -> None:
    net = nn.Sequential(Odd(8, 8))
    replace_linears(net)
    assert type(net[0]) is Odd
