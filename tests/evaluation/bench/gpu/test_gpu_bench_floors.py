"""Bytes and operations of what is measured on a GPU, and the least time that they take."""

import json

import pytest

from octavo.bench.gpu.floors import (
    NOMINAL,
    Ceilings,
    DeviceWork,
    block_copies,
    cache_write,
    decode_attention,
    decode_step,
    floor_s,
    prefill,
    prefill_attention,
    rotations,
    serving,
    visible_pairs,
)
from octavo.bench.gpu.shapes import MODELS, AttentionShape, DecoderShape

SHAPE = AttentionShape(query_heads=32, kv_heads=8, head_dim=128)
QWEN_8B, QWEN_SMALL, LLAMA_8B = map(DecoderShape.read, ("qwen3-8b", "qwen3-0.6b", "llama-3.1-8b"))


def test_work_takes_as_long_as_what_takes_longest_of_it() -> None:
    ceilings = Ceilings(copy_bytes_per_s=100, gemm_flops_per_s=10, to_device_bytes_per_s=5, to_host_bytes_per_s=2)
    assert DeviceWork(bytes=100, flops=20).seconds(ceilings) == 2
    assert DeviceWork(bytes=100, flops=5, to_device=15).seconds(ceilings) == 3
    assert DeviceWork(to_host=20).seconds(ceilings) == 10
    assert floor_s([DeviceWork(bytes=100, flops=20), DeviceWork(to_host=2)], ceilings) == 3


def test_a_decode_reads_keys_and_values_once_whatever_the_number_of_query_heads() -> None:
    work = decode_attention([1000, 24], SHAPE)
    assert work.bytes == 1024 * (2 * 8 * 128 * 2) + 2 * 2 * (32 * 128 * 2)
    assert work.flops == 4 * 1024 * 32 * 128
    more_heads = decode_attention([1000, 24], AttentionShape(64, 8, 128))
    assert more_heads.bytes - work.bytes == 2 * 2 * (32 * 128 * 2)


@pytest.mark.parametrize(("num_tokens", "history"), [(1, 0), (5, 0), (4, 7)])
def test_a_query_sees_itself_and_what_is_before_it(num_tokens: int, history: int) -> None:
    assert visible_pairs(num_tokens, history) == sum(history + token + 1 for token in range(num_tokens))


def test_a_chunk_multiplies_visible_pairs_twice() -> None:
    assert prefill_attention(3, 2, SHAPE).flops == 2 * 2 * (3 + 4 + 5) * 32 * 128


def test_copies_count_bytes_read_and_written() -> None:
    assert block_copies(1000).bytes == 2000
    assert cache_write(10, SHAPE).bytes == 2 * 10 * SHAPE.kv_bytes_per_token


@pytest.mark.parametrize(
    ("model", "weights_gb", "kv_kib", "steps_ms"),
    [
        (QWEN_SMALL, 1.19, 112, {1: 0.30, 64: 2.03, 256: 7.4}),
        (LLAMA_8B, 15.0, 128, {1: 3.5, 64: 5.5, 256: 12.9}),
        (QWEN_8B, 15.1, 144, {1: 3.6, 64: 5.8, 256: 13.9}),
    ],
    ids=lambda value: value.name if isinstance(value, DecoderShape) else None,
)
def test_a_decode_step_reads_the_weights_and_all_keys_and_values(
    model: DecoderShape, weights_gb: float, kv_kib: int, steps_ms: dict[int, float]
) -> None:
    assert model.weight_bytes / 1e9 == pytest.approx(weights_gb, rel=0.01)
    assert model.kv_bytes_per_token == kv_kib << 10
    found = {batch: 1000 * floor_s(decode_step([1024] * batch, model), NOMINAL) for batch in steps_ms}
    assert found == pytest.approx(steps_ms, rel=0.02)


def test_prompts_go_through_the_lm_head_once_each() -> None:
    dense, attention = prefill([3, 5], QWEN_SMALL)
    assert dense.flops == 2 * (8 * QWEN_SMALL.layer_weights + 2 * QWEN_SMALL.head_weights)
    assert attention.flops == 4 * (6 + 15) * 16 * 128 * 28


def test_a_load_is_its_prompts_and_then_steps_of_all_that_still_run() -> None:
    lengths = [(10, 1), (20, 3)]
    steps = serving(lengths, QWEN_SMALL)
    assert steps == [*prefill([10, 20], QWEN_SMALL), *decode_step([21], QWEN_SMALL), *decode_step([22], QWEN_SMALL)]


def test_inputs_rotate_over_more_than_a_cache_holds() -> None:
    assert rotations(1 << 20) == 240
    assert rotations(100 << 20) == 3
    assert rotations(1 << 30) == 2


def test_every_model_is_read_as_its_config_has_it() -> None:
    assert {path.name for path in MODELS.iterdir()} >= {"qwen3-8b", "qwen3-0.6b", "llama-3.1-8b"}
    for directory in MODELS.iterdir():
        config = json.loads((directory / "config.json").read_bytes())
        model = DecoderShape.read(directory.name)
        assert model.attention.group * model.attention.kv_heads == config["num_attention_heads"]
        assert model.vocab_size == config["vocab_size"]
        assert model.kv_bytes_per_block == 16 * model.kv_bytes_per_token
