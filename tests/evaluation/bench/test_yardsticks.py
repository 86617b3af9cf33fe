"""The yardsticks of this machine, and the arithmetic of floors: from what was measured at some numbers of rows to the
seconds of a whole case."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from octavo.bench.figures import LinearShapes, StepRows, Yardsticks, grid, interpolated
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


SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}


@pytest.mark.parametrize(("rows", "seconds"), [(1, 1.0), (3, 2.0), (5, 3.0), (6, 13.0), (7, 23.0)])
def test_what_was_not_measured_lies_on_the_line_between_its_neighbours(rows: int, seconds: float) -> None:
    assert interpolated({1: 1.0, 5: 3.0, 7: 23.0}, rows) == pytest.approx(seconds)


@pytest.mark.parametrize("rows", [0, 9])
def test_nothing_is_said_beyond_what_was_measured(rows: int) -> None:
    with pytest.raises(ValueError, match="1 to 8"):
        interpolated({1: 1.0, 8: 2.0}, rows)


@pytest.mark.parametrize(("rows", "expected"), [([7, 2], [1, 2, 4, 7]), ([8], [1, 2, 4, 8]), ([], [1])])
def test_the_grid_reaches_as_far_as_needed(rows: list[int], expected: list[int]) -> None:
    assert grid(rows) == expected


def test_a_case_takes_the_sum_of_its_steps_products() -> None:
    yardsticks = Yardsticks(1.0, {1: 1.0, 9: 5.0}, {1: 0.25, 3: 0.75})
    steps = [StepRows(9, 0), StepRows(1, 1), StepRows(3, 2)]
    assert yardsticks.gemm_s(steps) == pytest.approx(5.0 + (1.0 + 0.25) + (2.0 + 0.5))


def test_the_best_is_that_of_each_measurement() -> None:
    first, second = Yardsticks(2.0, {1: 1.0, 2: 4.0}, {1: 3.0}), Yardsticks(3.0, {1: 2.0, 2: 3.0}, {1: 4.0})
    assert Yardsticks.best([first, second]) == Yardsticks(3.0, {1: 1.0, 2: 3.0}, {1: 3.0})


def test_yardsticks_survive_json() -> None:
    yardsticks = Yardsticks(2.0, {1: 1.0, 16: 4.0}, {1: 3.0})
    assert Yardsticks.from_json(json.loads(json.dumps(yardsticks.to_json()))) == yardsticks


def test_the_shapes_are_those_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    shapes = LinearShapes.read(tmp_path)
    assert shapes.layer == [(960, 576), (576, 576), (3072, 576), (576, 1536)]
    assert (shapes.num_layers, shapes.head) == (30, (49152, 576))
    # All of the model's 134,515,008 parameters but its 61 norms.
    assert shapes.num_weights == 134_515_008 - 61 * 576


def test_heads_may_be_of_another_size_than_the_hidden_states_have_room_for(tmp_path: Path) -> None:
    config = {**SMOLLM2, "head_dim": 128, "num_key_value_heads": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert LinearShapes.read(tmp_path).layer[:2] == [(27 * 128, 576), (576, 9 * 128)]
