"""What is measured of the machine: that it is what it says, not how much."""

import pytest
import torch
import torch.nn.functional as F

from octavo.bench.figures import LinearShapes
from octavo.bench.yardsticks import Products, best_s, product, read_rate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_that_is_timed_is_right(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, inputs = torch.randn(24, 32).to(dtype), torch.randn(5, 32).to(dtype)
    with torch.inference_mode():
        torch.testing.assert_close(product(weight)(inputs), F.linear(inputs, weight))


def test_a_product_that_onednn_does_not_have_is_timed_without_it() -> None:
    weight, inputs = torch.randn(6, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    torch.testing.assert_close(product(weight)(inputs), inputs @ weight.T)


@torch.inference_mode()
def test_every_layer_is_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    multiplied = list[tuple[int, ...]]()

    def note(weight: torch.Tensor, inputs: torch.Tensor) -> None:
        multiplied.append((*weight.shape, len(inputs)))

    monkeypatch.setattr("octavo.bench.yardsticks.product", lambda weight: lambda inputs: note(weight, inputs))
    monkeypatch.setattr("octavo.bench.yardsticks.best_s", lambda call: call() or 1.0)
    products = Products(LinearShapes(2, [(6, 4), (4, 5)], (9, 4)), torch.float32)
    assert (products.layers_s(3), products.head_s(1)) == (1.0, 1.0)
    assert multiplied == [(6, 4, 3), (4, 5, 3), (6, 4, 3), (4, 5, 3), (9, 4, 1)]


def test_times_and_rates_are_positive() -> None:
    calls = list[int]()
    assert best_s(lambda: calls.append(1)) > 0
    assert len(calls) > 3
    assert read_rate(1 << 16) > 0
