"""Random weights that every process draws alike."""

import pytest
import torch

from octavo.worker.loading.load_format import DummyWeights
from octavo.worker.loading.tensor_file import TensorPart


def test_a_tensor_depends_on_its_name_and_shape_alone() -> None:
    one, other = DummyWeights(), DummyWeights()
    other.take("b", (3,))
    first = one.take("a", (40, 50))
    assert torch.equal(first, other.take("a", (40, 50)))
    assert not torch.equal(first, one.take("b", (40, 50)))


def test_matrices_are_small_and_norms_are_ones() -> None:
    matrix = DummyWeights().take("model.layers.0.mlp.down_proj.weight", (200, 300))
    assert abs(float(matrix.mean())) < 1e-3
    assert abs(float(matrix.std()) - 0.02) < 1e-3
    assert torch.equal(DummyWeights().take("model.norm.weight", (8,)), torch.ones(8))
    assert float(DummyWeights().take("q_proj.bias", (1000,)).abs().max()) < 0.2


def test_nothing_is_stored_or_left_over() -> None:
    weights = DummyWeights()
    weights.drop("lm_head.weight")
    weights.finish()
    assert weights.shapes() == {}


def test_no_two_rows_of_a_large_matrix_are_alike() -> None:
    matrix = DummyWeights().take("lm_head.weight", (4096, 1024))
    assert len({row.tobytes() for row in matrix.numpy()}) == 4096
    assert abs(float(matrix.std()) - 0.02) < 1e-3


@pytest.mark.parametrize("part", [TensorPart(0, (range(700, 1100), range(5))), TensorPart(1, (range(1020, 1100),))])
def test_a_part_is_that_of_the_whole(part: TensorPart) -> None:
    # More numbers than are drawn.
    whole = DummyWeights().take("lm_head.weight", (1200, 1100))
    places = torch.tensor([place for each in part.ranges for place in each])
    expected = whole.index_select(part.dim, places)
    assert torch.equal(DummyWeights().take("lm_head.weight", (1200, 1100), part), expected)
    assert torch.equal(DummyWeights().take("norm.weight", (9,), TensorPart(0, (range(2, 4),))), torch.ones(2))
