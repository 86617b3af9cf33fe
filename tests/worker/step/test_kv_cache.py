"""How large the cache is, what a cleared block holds, and where moved ones go."""

import pytest
import torch

from octavo.wire.steps import BlockMove, BlockMoves
from octavo.worker.gpu.swap import PinningError
from octavo.worker.step import kv_cache
from octavo.worker.step.kv_cache import (
    KVCache,
    KVCacheError,
    KVLayout,
    available_memory,
    group_layers,
    memory_for_cache,
    num_blocks_in,
)

CPU = torch.device("cpu")
# Stands for a GPU: tensors that have a layout and no content.
META = torch.device("meta")


# All layers of a block as one piece of memory, or each apart.
LAYOUTS = pytest.mark.parametrize("together", [0, 1], ids=["whole", "apart"])


def layout(windows: list[int], block_size: int = 2, dtype: torch.dtype = torch.float32, together: int = 0) -> KVLayout:
    return KVLayout(group_layers(windows), block_size, 2, head_dim=4, dtype=dtype, layers_together=together)


def numbered_cache(num_blocks: int, num_cpu_blocks: int, together: int = 0) -> KVCache:
    """A cache of two layers in which every block on the device holds its own number."""
    shape = layout([0, 0], together=together)
    cache = KVCache(shape, num_blocks=num_blocks, num_cpu_blocks=num_cpu_blocks, device=CPU)
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values):
            tensor.copy_(torch.arange(num_blocks)[:, None, None, None])
    return cache


def numbers(cache: KVCache) -> list[int]:
    """What `numbered_cache` wrote, as it lies now; equal in both layers, keys and values and all slots."""
    content = torch.stack([tensor for layer in cache.layers for tensor in (layer.keys, layer.values)])
    by_block = content.transpose(0, 1).flatten(1)
    assert (by_block == by_block[:, :1]).all()
    return [int(number) for number in by_block[:, 0]]


def moves(*pairs: tuple[int, int]) -> list[BlockMove]:
    return [BlockMove(*pair) for pair in pairs]


def test_the_tensors_of_one_kv_group_take_what_is_counted() -> None:
    shape = layout([0, 0], block_size=8, dtype=torch.bfloat16)
    cache = KVCache(shape, num_blocks=3, num_cpu_blocks=0, device=CPU)
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    assert [tensor.shape for tensor in tensors] == [(3, 8, 2, 4)] * 4
    assert sum(tensor.nbytes for tensor in tensors) == 3 * 8 * shape.bytes_per_token == 3 * shape.bytes_per_block


def test_a_block_is_one_piece_of_memory_over_all_layers() -> None:
    cache = KVCache(layout([0, 0, 0]), num_blocks=4, num_cpu_blocks=0, device=CPU)
    bytes_per_block = layout([0, 0, 0]).bytes_per_block
    for block in range(4):
        places = sorted(tensor[block].data_ptr() for layer in cache.layers for tensor in (layer.keys, layer.values))
        assert [place - places[0] for place in places] == list(range(0, bytes_per_block, bytes_per_block // 6))
        assert places[0] == cache.layers[0].keys.data_ptr() + block * bytes_per_block


def test_layers_that_lie_apart_are_pieces_of_their_own_pools_in_every_group() -> None:
    shape = layout([8, 0, 8, 0, 8, 0], together=2)
    cache = KVCache(shape, num_blocks=4, num_cpu_blocks=0, device=CPU)
    layer_bytes = shape.bytes_per_block // 3
    assert [pool.bytes_per_block for pool in cache.pools] == [2 * layer_bytes, layer_bytes]
    first, *_, last = cache.layers
    assert [layer.group for layer in cache.layers] == [0, 1] * 3
    assert [layer.keys.stride(0) * 4 for layer in cache.layers] == [2 * layer_bytes] * 4 + [layer_bytes] * 2
    assert cache.layers[2].keys.data_ptr() == first.keys.data_ptr() + layer_bytes
    assert not 0 <= last.keys.data_ptr() - first.keys.data_ptr() < 4 * 2 * layer_bytes


def test_layers_have_the_scales_that_are_given() -> None:
    windows = [8, 0, 8, 0]
    plain = KVCache(layout(windows), num_blocks=1, num_cpu_blocks=0, device=CPU).layers
    assert {(layer.key_scale, layer.value_scale) for layer in plain} == {(1.0, 1.0)}
    scales = [(1.0, 2.0), (3.0, 4.0), (5.0, 6.0), (7.0, 8.0)]
    scaled = KVCache(layout(windows), num_blocks=1, num_cpu_blocks=0, device=CPU, scales=scales).layers
    assert [(layer.key_scale, layer.value_scale) for layer in scaled] == scales


def test_a_narrow_cache_takes_a_byte_per_element() -> None:
    shape = layout([0], dtype=torch.float8_e4m3fn)
    assert shape.bytes_per_block == layout([0]).bytes_per_block // 4
    cache = KVCache(shape, num_blocks=2, num_cpu_blocks=2, device=CPU)
    cache.layers[0].keys[1] = 3.0
    cache.move(BlockMoves(swap_out=moves((1, 0))))
    cache.move(BlockMoves(swap_in=moves((0, 0))))
    assert (cache.layers[0].keys.float() == 3.0).all()


def test_layers_of_different_groups_use_the_same_pool_and_those_of_one_group_lie_apart() -> None:
    cache = KVCache(layout([8, 0, 8, 0]), num_blocks=2, num_cpu_blocks=0, device=CPU)
    assert [layer.group for layer in cache.layers] == [0, 1, 0, 1]
    places = [layer.keys.data_ptr() for layer in cache.layers]
    assert places[0] == places[1] != places[2] == places[3]


@LAYOUTS
def test_clearing_touches_the_named_blocks_in_every_layer_and_no_other(together: int) -> None:
    cache = numbered_cache(4, 0, together)
    cache.clear(torch.tensor([2, 1]))
    assert numbers(cache) == [0, 0, 0, 3]


@LAYOUTS
def test_a_swap_brings_back_what_it_took_whatever_has_happened_to_the_block(together: int) -> None:
    cache = numbered_cache(4, 2, together)
    cache.move(BlockMoves(swap_out=moves((1, 1), (3, 0))))
    cache.clear(torch.tensor([1, 3]))
    assert numbers(cache) == [0, 0, 2, 0]
    cache.move(BlockMoves(swap_in=moves((0, 1), (1, 0))))
    assert numbers(cache) == [1, 3, 2, 0]


@LAYOUTS
def test_moves_go_out_then_in_then_across(together: int) -> None:
    cache = numbered_cache(5, 2, together)
    # Block 1 leaves for the CPU and is filled again by a copy; what came in is copied on.
    cache.move(BlockMoves(swap_out=moves((1, 0)), swap_in=moves((0, 2)), copy=moves((2, 4), (3, 1))))
    assert numbers(cache) == [0, 3, 1, 3, 1]


def test_a_block_out_of_range_cannot_move() -> None:
    with pytest.raises(ValueError, match="block 1 of 2 cannot move to block 1 of 1"):
        numbered_cache(2, 1).move(BlockMoves(swap_out=moves((1, 1))))


def test_a_plan_of_which_one_move_cannot_be_moves_nothing() -> None:
    cache = numbered_cache(3, 1)
    with pytest.raises(ValueError, match="target of two moves"):
        cache.move(BlockMoves(swap_out=moves((1, 0)), copy=moves((0, 2), (1, 2))))
    assert numbers(cache) == [0, 1, 2]


def test_a_step_may_write_any_block_once_it_is_announced() -> None:
    cache = numbered_cache(3, 3)
    cache.move(BlockMoves(swap_out=moves((0, 0), (1, 1))))
    cache.before_writing([-1, 0, 2])
    cache.clear(torch.tensor([0]))
    cache.move(BlockMoves(swap_in=moves((0, 2))))
    assert numbers(cache) == [0, 1, 0]


def test_off_the_cpu_the_tokens_of_a_head_lie_side_by_side() -> None:
    cache = KVCache(layout([0, 0], block_size=3), num_blocks=5, num_cpu_blocks=0, device=META)
    for place, layer in enumerate(cache.layers):
        for part, tensor in enumerate((layer.keys, layer.values)):
            assert tensor.shape == (5, 3, 2, 4)
            assert tensor.stride() == (2 * 2 * 24, 4, 12, 1)
            assert tensor.storage_offset() == (2 * place + part) * 24


@LAYOUTS
def test_a_host_that_pins_nothing_leaves_a_gpu_without_blocks_to_swap_to(
    together: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise PinningError("CUDA does not pin it")

    monkeypatch.setattr(kv_cache, "pinned_zeros", refuse)
    cache = KVCache(layout([0, 0], together=together), num_blocks=3, num_cpu_blocks=2, device=META)
    assert (cache.num_cpu_blocks, len(cache.layers[0].keys)) == (0, 3)
    assert "no blocks to swap to: CUDA does not pin it" in caplog.text
    with pytest.raises(ValueError, match="block"):
        cache.move(BlockMoves(swap_out=moves((0, 0))))


def test_more_swap_space_than_there_is_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "available_memory", lambda: 2 * 128 - 1)
    with pytest.raises(KVCacheError, match=r"2 KV blocks .* which cpu does not have; give fewer with --swap-memory"):
        KVCache(layout([0]), num_blocks=1, num_cpu_blocks=2, device=META)


def test_without_a_driver_there_are_no_blocks_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(KVCacheError, match="no driver for one, to hold KV blocks on cuda"):
        KVCache(layout([0]), num_blocks=1, num_cpu_blocks=0, device=torch.device("cuda"))


@pytest.mark.parametrize("memory", [8 * 128, 9 * 128 - 1])
def test_a_budget_is_rounded_down_to_whole_blocks(memory: int) -> None:
    assert layout([0]).bytes_per_block == 128
    assert num_blocks_in(memory, layout([0]).bytes_per_block, 2) == 8


def test_a_block_is_as_large_as_one_group_needs() -> None:
    assert layout([0, 0, 8, 0]).bytes_per_block == layout([0]).bytes_per_block


def test_a_budget_below_one_block_is_refused_with_the_least_that_works() -> None:
    with pytest.raises(KVCacheError, match="give at least 128 with --kv-cache-memory"):
        num_blocks_in(127, 128, 2)


def test_without_a_budget_a_share_of_what_is_free_is_taken() -> None:
    assert 0 < memory_for_cache() <= min(4 << 30, available_memory() // 4)


@pytest.mark.parametrize(
    ("num_blocks", "num_cpu_blocks", "message"),
    [(0, 0, "0 KV blocks"), (1 << 50, 0, "--kv-cache-memory"), (1, 1 << 50, "--swap-memory")],
)
def test_a_cache_that_cannot_be_is_refused(num_blocks: int, num_cpu_blocks: int, message: str) -> None:
    with pytest.raises(KVCacheError, match=message):
        KVCache(layout([0]), num_blocks=num_blocks, num_cpu_blocks=num_cpu_blocks, device=CPU)
