"""How layers are grouped, and what a token and a block take."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.worker.step.kv_cache import KVLayout, LayerGroup, group_layers, kv_bytes_per_token


def test_a_token_of_opt_13b_takes_800_kib() -> None:
    # The paper's example (§3): 2 (key and value) * 5120 (hidden) * 40 (layers) * 2 bytes.
    assert kv_bytes_per_token(40, 40, 128, torch.float16.itemsize) == 819_200


@pytest.mark.parametrize(
    ("windows", "groups"),
    [
        ([0, 0, 0], [(0, (0, 1, 2))]),
        ([8, 8], [(8, (0, 1))]),
        ([0, 8], [(0, (0,)), (8, (1,))]),
        ([8, 8, 0, 8, 8, 0], [(8, (0, 1)), (8, (3, 4)), (0, (2, 5))]),
        ([0, 0, 8, 0, 8], [(0, (0, 1)), (0, (3,)), (8, (2, 4))]),
    ],
)
def test_layers_of_one_window_make_groups_as_large_as_the_rarest_window_has_layers(
    windows: list[int], groups: list[tuple[int, tuple[int, ...]]]
) -> None:
    assert group_layers(windows) == [LayerGroup(*group) for group in groups]


@given(st.lists(st.sampled_from([0, 4, 16]), min_size=1, max_size=40))
def test_every_layer_is_in_one_group_of_its_window(windows: list[int]) -> None:
    groups = group_layers(windows)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    assert all(windows[layer] == group.window for group in groups for layer in group.layers)


@pytest.mark.parametrize(("head_dim", "scales"), [(16, 4), (64, 4), (80, 8), (96, 8), (128, 8), (256, 16)])
def test_a_token_of_8_bits_takes_its_scales_too(head_dim: int, scales: int) -> None:
    layout = KVLayout(group_layers([0, 0]), 16, num_kv_heads=3, head_dim=head_dim, dtype=torch.int8)
    assert layout.bytes_per_token == 2 * 2 * 3 * (head_dim + scales)
    assert layout.bytes_per_block == 16 * layout.bytes_per_token
    assert layout.shapes(7) == [(7, 2, 2, 16, 3, head_dim + scales)]


def test_the_room_that_a_group_does_not_fill_is_counted() -> None:
    layout = KVLayout(group_layers([0, 0, 8, 0, 8]), 16, num_kv_heads=2, head_dim=4, dtype=torch.float32)
    assert layout.layers_per_group == 2
    assert layout.bytes_per_token == kv_bytes_per_token(6, 2, 4, 4)
    assert layout.bytes_per_block == 16 * kv_bytes_per_token(2, 2, 4, 4)
    assert layout.shapes(7) == [(7, 2, 2, 16, 2, 4)]
    assert layout.shapes(7, heads_first=True) == [(7, 2, 2, 2, 16, 4)]


@pytest.mark.parametrize(("together", "layers"), [(0, [5]), (1, [1] * 5), (2, [2, 2, 1]), (5, [5]), (9, [5])])
def test_so_many_layers_share_a_pool_and_a_block_is_the_same_bytes(together: int, layers: list[int]) -> None:
    whole = KVLayout(group_layers([0] * 5), 16, num_kv_heads=2, head_dim=4, dtype=torch.float32)
    layout = replace(whole, layers_together=together)
    assert [shape[:2] for shape in layout.shapes(7)] == [(7, count) for count in layers]
    assert sum(map(math.prod, layout.shapes(7))) == math.prod(whole.shapes(7)[0])
    assert (layout.bytes_per_block, layout.shape) == (whole.bytes_per_block, whole.shape)
