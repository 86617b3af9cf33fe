"""New keys and values into their slots, against the oracle."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.triton.write import reshape_and_cache

FP8 = torch.float8_e4m3fn


def pool(num_blocks: int, block_size: int, heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values of the middle one of three layers, all zeros."""
    blocks = torch.zeros(num_blocks, 3, 2, heads, block_size, head_dim).to(dtype)
    layer = blocks[:, 1].transpose(2, 3)
    return layer[:, 0], layer[:, 1]


def fused(tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values as they lie in the product of fused weights."""
    generator = torch.Generator().manual_seed(tokens)
    product = torch.randn(tokens, 4 * heads, head_dim, generator=generator).to(dtype)
    return product[:, heads : 2 * heads], product[:, 2 * heads : 3 * heads]


@settings(max_examples=15)
@given(
    tokens=st.integers(0, 20),
    heads=st.sampled_from([1, 3, 8]),
    head_dim=st.sampled_from([8, 64, 80]),
    block_size=st.sampled_from([1, 3, 16]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    padding=st.integers(0, 5),
)
def test_writes_each_token_into_its_slot_and_nowhere_else(
    device: torch.device, tokens: int, heads: int, head_dim: int, block_size: int, dtype: torch.dtype, padding: int
) -> None:
    keys, values = (cache.to(device) for cache in pool(30, block_size, heads, head_dim, dtype))
    expected = pool(30, block_size, heads, head_dim, dtype)
    key, value = fused(tokens, heads, head_dim, dtype)
    slots = torch.randperm(30 * block_size, generator=torch.Generator().manual_seed(1))[:tokens]
    skipped = torch.arange(tokens) % 4 < padding % 4
    reference.reshape_and_cache(key[~skipped], value[~skipped], *expected, slots[~skipped])
    slots[skipped] = -1
    reshape_and_cache(key.to(device), value.to(device), keys, values, slots.to(device))
    assert torch.equal(keys.cpu(), expected[0])
    assert torch.equal(values.cpu(), expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_cache_of_8_bits_gets_the_nearest_number_within_its_range(dtype: torch.dtype, device: torch.device) -> None:
    key = torch.linspace(-1000, 1000, 2 * 4 * 64).view(2, 4, 64).to(dtype)
    value = (key * 1e-5).contiguous()
    keys, values = (cache.to(device) for cache in pool(2, 16, 4, 64, FP8))
    reshape_and_cache(
        key.to(device), value.to(device), keys, values, torch.tensor([17, 3], device=device), key_scale=0.5,
        value_scale=0.25,
    )  # fmt: skip
    for cache, new, scale in ((keys, key, 0.5), (values, value, 0.25)):
        stored = cache.cpu().float()[[1, 0], [1, 3]]
        assert torch.equal(stored, (new.float() / scale).clamp(-448, 448).to(FP8).float())
    assert keys.cpu().float().abs().max() == 448


def test_not_a_number_stays_that_in_8_bits(device: torch.device) -> None:
    key = torch.tensor([torch.nan, torch.inf, -torch.inf, -torch.nan, 1.0, 0.0, 2.0**-9, 2.0**-11]).view(1, 1, 8)
    keys, values = (cache.to(device) for cache in pool(1, 1, 1, 8, FP8))
    reshape_and_cache(key.to(device), key.to(device), keys, values, torch.zeros(1, dtype=torch.int64, device=device))
    stored = keys.cpu().float().flatten()
    assert stored[[0, 3]].isnan().all()
    assert stored[[1, 2, 4, 5, 6, 7]].tolist() == [448.0, -448.0, 1.0, 0.0, 2.0**-9, 0.0]


def test_new_keys_that_do_not_fit_the_cache_are_refused() -> None:
    cache, new, slots = torch.zeros(2, 4, 2, 8), torch.zeros(3, 2, 8), torch.tensor([0, 1, 2])
    with pytest.raises(ValueError, match="value is"):
        reshape_and_cache(new, new.bfloat16(), cache, cache, slots)
    with pytest.raises(ValueError, match="key is"):
        reshape_and_cache(new[:2], new, cache, cache, slots)
    with pytest.raises(ValueError, match="slot_mapping"):
        reshape_and_cache(new, new, cache, cache, slots.int())
    with pytest.raises(ValueError, match=r"a cache of torch\.float32 for torch\.bfloat16"):
        reshape_and_cache(new.bfloat16(), new.bfloat16(), cache, cache, slots)
    with pytest.raises(ValueError, match="only fp8 has some"):
        reshape_and_cache(new, new, cache, cache, slots, value_scale=2.0)


@pytest.mark.gpu
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8])
def test_writes_many_tokens(cache_dtype: torch.dtype, gpu: torch.device) -> None:
    keys, values = (cache.to(gpu) for cache in pool(600, 16, 8, 128, cache_dtype))
    key, value = (new.to(gpu) for new in fused(8192, 8, 128, torch.bfloat16))
    slots = torch.randperm(9600, device=gpu)[:8192]
    reshape_and_cache(key, value, keys, values, slots)
    for cache, new in ((keys, key), (values, value)):
        stored = cache[slots // 16, slots % 16]
        assert torch.equal(stored.float(), new.float().to(cache_dtype).float())
