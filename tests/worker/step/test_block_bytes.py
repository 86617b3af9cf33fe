"""Blocks that leave a runner as bytes come back to it, or to another of the same kind, bit by bit, and only sound ones
leave."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from octavo.testbed.models import fp32_runner, new_sequences, next_item, run_items, write_tiny_model
from octavo.testbed.tiny_model import VOCAB_SIZE, write_byte_model
from octavo.testing.native import loaded
from octavo.wire.steps import BlockMove, BlockMoves
from octavo.worker.kv_store.loan import Payload
from octavo.worker.kv_store.store import KVStore
from octavo.worker.model_settings import ModelSettings
from octavo.worker.step.model_runner import ModelRunner

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
FULL = LlamaConfig(**SIZES)
WINDOWS = Qwen3Config(
    **SIZES, use_sliding_window=True, sliding_window=40, layer_types=["sliding_attention", "full_attention"] * 2
)
PROMPT = [(7 * place) % 250 for place in range(50)]
CACHES = ["float32", "bfloat16", "int8"]


@pytest.fixture(scope="module", params=["full", "windows"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory, FULL if request.param == "full" else WINDOWS)
    return directory


def runner_of(directory: Path, cache: str = "float32", draft: Path | None = None, kv_layout: int = 0) -> ModelRunner:
    loaded()
    options: dict[str, Any] = {"num_blocks": 64, "num_cpu_blocks": 32, "threads": 1, "block_size": 16}
    options["kv_layout"] = kv_layout
    if draft is None:
        return fp32_runner(directory, kv_cache_dtype=cache, **options)
    return ModelRunner(directory, ModelSettings(dtype="float32", **options), draft_directory=draft)


def payloads(runner: ModelRunner, block_ids: Sequence[int]) -> list[bytes | None]:
    contents = runner.read_blocks(block_ids)
    assert contents.here
    return [b"".join(parts) if contents.is_sound(parts) else None for parts in contents.blocks()]


def logprobs_of_next(
    runner: ModelRunner, num_cached: int = 0, kept: dict[tuple[int, int], Payload] | None = None
) -> Any:
    """Computes the prompt, after `num_cached` tokens whose blocks are `kept` by group and place; returns what it
    says, and the sequence."""
    [sequence] = new_sequences(runner, [PROMPT], 8)
    sequence.sampling = type(sequence.sampling)(max_tokens=8, logprobs=20)
    swaps = []
    for cpu_block, ((group, place), payload) in enumerate((kept or {}).items()):
        runner.fill_cpu_block(cpu_block, payload)
        swaps.append(BlockMove(cpu_block, sequence.block_tables[group][place]))
    sequence.num_computed = num_cached
    run_items(runner, [], BlockMoves(swap_in=swaps))
    if num_cached == 0:
        run_items(runner, [next_item(sequence, 32)])
    output = run_items(runner, [next_item(sequence, len(PROMPT) - 32)])
    return output.sampled, sequence


@pytest.mark.parametrize(
    ("cache", "layouts"),
    [("float32", (0, 0)), ("float32", (0, 1)), ("float32", (3, 0)), ("bfloat16", (0, 0)), ("int8", (1, 0))],
)
def test_a_new_runner_goes_on_from_blocks_that_another_left_on_a_disk_with_the_same_bits(
    directory: Path, tmp_path: Path, cache: str, layouts: tuple[int, int]
) -> None:
    """Whatever layers lie together in the memory of either."""
    first = runner_of(directory, cache, kv_layout=layouts[0])
    wanted, sequence = logprobs_of_next(first)
    names = {}
    with KVStore(tmp_path / "kv", 1 << 30, first.kv_identity) as store:
        for group, table in enumerate(sequence.block_tables):
            for place, payload in zip(range(2), payloads(first, table[:2]), strict=True):
                assert payload is not None
                names[group, place] = bytes([group, place]) * 16
                assert store.write(names[group, place], payload)
        assert store.flush(60)
    second = runner_of(directory, cache, kv_layout=layouts[1])
    assert second.kv_identity == first.kv_identity
    with KVStore(tmp_path / "kv", 1 << 30, second.kv_identity) as store:
        buffers = [bytearray(second.kv_identity.block_bytes) for _ in names]
        ticket = store.read(list(names.values()), buffers)
        while not store.poll():
            pass
        assert all(ticket.found)
    found, resumed = logprobs_of_next(second, 32, dict(zip(names, buffers, strict=True)))
    assert found == wanted
    for group, table in enumerate(sequence.block_tables):
        assert payloads(second, resumed.block_tables[group][:3]) == payloads(first, table[:3])


def test_other_blocks_would_give_other_bits(directory: Path) -> None:
    runner = runner_of(directory)
    wanted, sequence = logprobs_of_next(runner)
    swapped: dict[tuple[int, int], Payload] = {}
    for group, table in enumerate(sequence.block_tables):
        first, second = payloads(runner, table[:2])
        assert first is not None
        assert second is not None
        swapped |= {(group, 0): bytearray(second), (group, 1): bytearray(first)}
    assert logprobs_of_next(runner, 32, swapped)[0] != wanted


@pytest.mark.parametrize("cache", CACHES)
def test_layers_that_lie_apart_give_the_same_tokens_blocks_swaps_and_copies(directory: Path, cache: str) -> None:
    whole, apart = (runner_of(directory, cache, kv_layout=kv_layout) for kv_layout in (0, 1))
    outputs = []
    for runner in (whole, apart):
        sampled, sequence = logprobs_of_next(runner)
        tables = sequence.block_tables
        first, second, third = sorted(set(range(runner.num_blocks)) - {block for table in tables for block in table})[
            :3
        ]
        out = [BlockMove(block, place) for place, block in enumerate(tables[0][:2])]
        run_items(runner, [], BlockMoves(swap_out=out, copy=[BlockMove(tables[-1][2], first)]))
        run_items(runner, [], BlockMoves(swap_in=[BlockMove(0, third), BlockMove(1, second)]))
        in_cpu, copies = (
            runner.peek_blocks([0, 1], in_cpu=True),
            runner.peek_blocks([first, second, third], in_cpu=False),
        )
        assert in_cpu is not None
        assert copies is not None
        assert [bytes(each) for each in copies] == payloads(runner, [tables[-1][2], tables[0][1], tables[0][0]])
        outputs.append((sampled, tables, [bytes(each) for each in in_cpu], payloads(runner, [first, second, third])))
    assert outputs[0] == outputs[1]
    assert None not in outputs[0][-1]
    kept: dict[tuple[int, int], Payload] = {
        (group, place): bytearray(payload or b"")
        for group, table in enumerate(outputs[0][1])
        for place, payload in enumerate(payloads(whole, table[:2]))
    }
    # Another worker's blocks, moved here.
    assert logprobs_of_next(apart, 32, kept)[0] == outputs[0][0]


@pytest.mark.parametrize("kv_layout", [0, 2])
def test_a_draft_models_keys_and_values_are_in_the_block(tmp_path: Path, kv_layout: int) -> None:
    for name, num_layers in (("main", 4), ("draft", 1)):
        write_byte_model(tmp_path / name, 256)
        write_tiny_model(
            tmp_path / name, LlamaConfig(**SIZES | {"vocab_size": VOCAB_SIZE, "num_hidden_layers": num_layers})
        )
    plain = runner_of(tmp_path / "main")
    runner = runner_of(tmp_path / "main", draft=tmp_path / "draft", kv_layout=kv_layout)
    # And how many tokens of a block the draft model has followed.
    assert runner.kv_identity.block_bytes == plain.kv_identity.block_bytes * 5 // 4 + 2
    assert runner.kv_identity.model != plain.kv_identity.model
    _, sequence = logprobs_of_next(runner)
    run_items(runner, [replace(next_item(sequence, 1), num_proposed=1)])
    [payload] = payloads(runner, sequence.block_tables[0][:1])
    assert payload is not None
    runner.fill_cpu_block(3, bytearray(payload))
    run_items(runner, [], BlockMoves(swap_in=[BlockMove(3, 63)]))
    assert payloads(runner, [63]) == [payload]
    # Both parts are of use.
    assert any(payload[: plain.kv_identity.block_bytes])
    assert any(payload[plain.kv_identity.block_bytes : -2])
    assert payload[-2:] == bytes([16, 0])


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("part", ["keys", "values"])
def test_a_block_that_is_not_finite_does_not_leave(directory: Path, cache: str, bad: float, part: str) -> None:
    # What is bad lies in the last of several pools, or in the only one.
    runner = runner_of(directory, cache, kv_layout=1 if part == "keys" else 0)
    _, sequence = logprobs_of_next(runner)
    good, spoiled = sequence.block_tables[-1][:2]
    assert None not in payloads(runner, [good, spoiled])
    block = runner._kv_cache._blocks[-1][spoiled, -1, 0 if part == "keys" else 1]
    with torch.inference_mode():
        if cache == "int8":
            # The last token's scale of the last head.
            head = block.view(2, -1)[1]
            scales = head[16 * runner._kv_cache.layout.head_dim :][: 2 * 16 if part == "keys" else 4 * 16]
            scales.view(torch.bfloat16 if part == "keys" else torch.float32)[-1] = bad
        else:
            block.view(-1)[-1] = bad
    found = payloads(runner, [good, spoiled])
    assert found[0] is not None
    assert found[1] is None


def test_whatever_decides_the_last_bits_is_in_the_identity(directory: Path) -> None:
    loaded()
    base = ModelSettings(dtype="float32", num_blocks=8, num_cpu_blocks=2, threads=1)
    others = [
        base,
        replace(base, dtype="bfloat16"),
        replace(base, kv_cache_dtype="int8"),
        replace(base, block_size=32),
        replace(base, numerics="exact"),
        replace(base, max_model_len=128),
    ]
    identities = [ModelRunner(directory, settings).kv_identity for settings in others]
    assert len(set(identities)) == len(others)
    assert ModelRunner(directory, base).kv_identity == identities[0]
