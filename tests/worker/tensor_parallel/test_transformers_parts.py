"""Which rows and columns of a layer's tensors a rank holds."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from octavo.worker.loading.tensor_file import TensorPart
from octavo.worker.models.transformers.check import UnsupportedModel
from octavo.worker.models.transformers.plan import Axis, Split
from octavo.worker.models.transformers.shards import SharedTensor, expert_tensors, linear_tensors
from octavo.worker.tensor_parallel.shards import Shards

SECOND = Shards(1, 2)


def tensors_of(linear: nn.Module, split: Split, shards: Shards = SECOND) -> dict[str, SharedTensor]:
    """In a model of six query heads and two KV heads."""
    return dict(linear_tensors(linear, split, shards.heads(6, 2), shards))


def test_outputs_are_rows_of_a_weight() -> None:
    assert tensors_of(nn.Linear(10, 24), Split(Axis.QUERY_HEADS)) == {
        "weight": SharedTensor((24, 10), TensorPart(0, (range(12, 24),))),
        "bias": SharedTensor((24,), TensorPart(0, (range(12, 24),))),
    }
    assert tensors_of(nn.Linear(10, 8, bias=False), Split(Axis.KV_HEADS)) == {
        "weight": SharedTensor((8, 10), TensorPart(0, (range(4, 8),)))
    }


def test_what_lies_side_by_side_is_taken_of_each() -> None:
    conv: Any = Conv1D
    places = (range(6, 12), range(18, 24), range(30, 36))
    assert tensors_of(conv(36, 10), Split(Axis.QUERY_HEADS, stacked=3)) == {
        "weight": SharedTensor((10, 36), TensorPart(1, places)),
        "bias": SharedTensor((36,), TensorPart(0, places)),
    }


def test_the_first_rank_alone_adds_the_bias_of_a_sum() -> None:
    linear, split = nn.Linear(16, 10), Split(Axis.COLUMNS, reduced=True)
    assert tensors_of(linear, split, Shards(0, 2)) == {"weight": SharedTensor((10, 16), TensorPart(1, (range(8),)))}
    others = tensors_of(linear, split)
    assert others["weight"].part == TensorPart(1, (range(8, 16),))
    assert [name for name, tensor in others.items() if not tensor.is_held] == ["bias"]


def test_layers_that_heads_do_not_divide_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="a layer is 25 wide, no multiple of 6 query heads"):
        tensors_of(nn.Linear(10, 25), Split(Axis.QUERY_HEADS))


class Experts(nn.Module):
    """Four of them, three columns each, in a model two wide."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(4, 6, 2))
        self.down_proj = nn.Parameter(torch.empty(4, 2, 3))


def test_of_every_expert_some_columns_are_held() -> None:
    found = expert_tensors(Experts(), SECOND)
    assert found["gate_up_proj"].all == SharedTensor((4, 6, 2), TensorPart(1, (range(2, 3), range(5, 6))))
    assert found["gate_up_proj"].one == SharedTensor((3, 2), TensorPart(0, (range(2, 3),)))
    assert found["down_proj"].all == SharedTensor((4, 2, 3), TensorPart(2, (range(2, 3),)))
    assert found["down_proj"].one == SharedTensor((2, 3), TensorPart(1, (range(2, 3),)))


def test_experts_of_another_kind_are_refused() -> None:
    experts = Experts()
    experts.register_parameter("down_proj_bias", nn.Parameter(torch.empty(4, 2)))
    with pytest.raises(UnsupportedModel, match="Experts: down_proj, down_proj_bias, gate_up_proj"):
        expert_tensors(experts, SECOND)
