"""How large the cache is, and what a cleared block holds."""

from dataclasses import replace

import pytest
import torch

from octavo.worker.kv_cache import KVCache, KVCacheError, available_memory, kv_bytes_per_token, num_blocks_in
from octavo.worker.models.config import DecoderConfig, RotaryConfig

CPU = torch.device("cpu")
TINY = DecoderConfig(
    vocab_size=10,
    hidden_size=16,
    intermediate_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    rms_norm_eps=1e-6,
    max_model_len=64,
    tie_word_embeddings=True,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    rotary=RotaryConfig(10000.0),
)


def test_a_token_of_opt_13b_takes_800_kib() -> None:
    # The paper's example (§3): 2 (key and value) * 5120 (hidden) * 40 (layers) * 2 bytes.
    opt_13b = replace(TINY, num_layers=40, num_heads=40, num_kv_heads=40, head_dim=128)
    assert kv_bytes_per_token(opt_13b, torch.float16) == 819_200


def test_the_tensors_take_what_is_counted() -> None:
    cache = KVCache(TINY, num_blocks=3, block_size=8, dtype=torch.bfloat16, device=CPU)
    assert [key.shape for key, _ in cache.layers] == [(3, 8, 2, 4)] * 2
    held = sum(tensor.nbytes for layer in cache.layers for tensor in layer)
    assert held == 3 * 8 * kv_bytes_per_token(TINY, torch.bfloat16)


def test_clearing_touches_the_named_blocks_in_every_layer_and_no_other() -> None:
    cache = KVCache(TINY, num_blocks=4, block_size=2, dtype=torch.float32, device=CPU)
    for layer in cache.layers:
        for tensor in layer:
            tensor.fill_(torch.nan)
    cache.clear(torch.tensor([2, 0]))
    for layer in cache.layers:
        for tensor in layer:
            assert not tensor[[0, 2]].any()
            assert tensor[[1, 3]].isnan().all()


def test_a_budget_is_rounded_down_to_whole_blocks() -> None:
    assert num_blocks_in(1000, 4, 25, CPU) == 10
    assert num_blocks_in(1099, 4, 25, CPU) == 10


def test_a_budget_below_one_block_is_refused_with_the_least_that_works() -> None:
    with pytest.raises(KVCacheError, match="give at least 100 with --kv-cache-memory"):
        num_blocks_in(99, 4, 25, CPU)


def test_without_a_budget_a_share_of_what_is_free_is_taken() -> None:
    taken = num_blocks_in(None, 16, 1024, CPU) * 16 * 1024
    assert 0 < taken <= min(4 << 30, available_memory() // 4)


def test_a_cache_without_blocks_is_refused() -> None:
    with pytest.raises(KVCacheError, match="0 KV blocks"):
        KVCache(TINY, num_blocks=0, block_size=16, dtype=torch.float32, device=CPU)


def test_a_cache_that_no_machine_has_is_refused() -> None:
    with pytest.raises(KVCacheError, match="--kv-cache-memory"):
        KVCache(TINY, num_blocks=1 << 50, block_size=16, dtype=torch.float32, device=CPU)
