"""What a plan may ask of a step besides tokens: moves of blocks, several choosers of one row, a prompt's logprobs.

Tiny random models, one with full attention and one in which layers with windows alternate with others.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from octavo.testbed.models import (
    GREEDY,
    NO_MOVES,
    drop_passed_blocks,
    finish,
    fp32_runner,
    generate,
    new_sequences,
    next_item,
    run_items,
    run_step,
    write_tiny_model,
)
from octavo.testing.depth import deep
from octavo.testing.native import loaded
from octavo.wire.base import NULL_BLOCK
from octavo.wire.sampling import BeamSearch, EarlyStopping, SamplingParams
from octavo.wire.steps import BlockMove, BlockMoves
from octavo.worker.sequences import WorkerSequence
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
CONFIGS = {
    "full": LlamaConfig(**SIZES),
    "windows": Qwen3Config(
        **SIZES,
        use_sliding_window=True,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
}
# Block sizes and types of the cache: the first is torch's to attend over, the others are for Octavo's own kernels where
# they are compiled.
CACHES = [(4, "auto"), (16, "auto"), (16, "int8"), *deep((32, "int8"), (16, "bfloat16"))]
# What logprobs may be off by, by the type of the cache.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-2, torch.int8: 5e-2}
PROMPTS = [list(range(50, 80)), [3, 1, 4, 1, 5, 9, 2, 6], [7]]
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=64)


@pytest.fixture(scope="module", params=CONFIGS, name="tiny")
def tiny_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A directory and the transformers model that is saved there."""
    directory = tmp_path_factory.mktemp("model")
    return directory, write_tiny_model(directory, CONFIGS[request.param])


@pytest.fixture(name="runner", params=CACHES)
def tiny_runner(tiny: tuple[Path, Any], request: pytest.FixtureRequest) -> ModelRunner:
    block_size, kv_cache_dtype = request.param
    if kv_cache_dtype != "auto":
        loaded()
    options: dict[str, Any] = {"num_blocks": 128, "num_cpu_blocks": 64, "threads": 1, "block_size": block_size}
    return fp32_runner(tiny[0], kv_cache_dtype=kv_cache_dtype, **options)


def tolerance(runner: ModelRunner) -> float:
    return TOLERANCE[runner._layout.dtype]


def spoil(runner: ModelRunner, block_ids: list[int]) -> None:
    """Fills blocks with what nobody may read."""
    with torch.inference_mode():
        for layer in runner._kv_cache.layers:
            for tensor in (layer.keys, layer.values):
                # Of 8 bits, scales that are no numbers.
                tensor[block_ids] = torch.nan if tensor.is_floating_point() else -1


def change_blocks(sequence: WorkerSequence, changed: dict[int, int]) -> None:
    sequence.block_tables = [[changed.get(block_id, block_id) for block_id in table] for table in sequence.block_tables]


def held_blocks(*sequences: WorkerSequence) -> list[int]:
    tables = [table for sequence in sequences for table in sequence.block_tables]
    return [block_id for table in tables for block_id in table if block_id != NULL_BLOCK]


def free_blocks(runner: ModelRunner, *sequences: WorkerSequence) -> list[int]:
    return sorted(set(range(runner.num_blocks)) - set(held_blocks(*sequences)))


def inverted(changed: dict[int, int]) -> dict[int, int]:
    return {new: old for old, new in changed.items()}


def as_moves(changed: dict[int, int]) -> list[BlockMove]:
    return [BlockMove(*pair) for pair in changed.items()]


def fork(sequence: WorkerSequence, index: int) -> WorkerSequence:
    return replace(
        sequence,
        sequence_id=100 + index,
        sequence_index=index,
        token_ids=list(sequence.token_ids),
        block_tables=[list(table) for table in sequence.block_tables],
    )


def test_a_sequence_that_was_swapped_out_and_in_goes_on_as_if_it_had_not(runner: ModelRunner) -> None:
    expected = generate(runner, PROMPTS, 20)
    sequences = new_sequences(runner, PROMPTS, 20)
    for _ in range(6):
        run_step(runner, sequences, 2048)
    first, *others = sequences
    held, free = held_blocks(first), free_blocks(runner, *sequences)
    out = {block_id: runner.num_cpu_blocks - 1 - index for index, block_id in enumerate(held)}
    # The others go on in the very step of the swap, and so does the first one when it comes back, to other blocks.
    run_items(runner, [next_item(sequence, 1) for sequence in others], BlockMoves(swap_out=as_moves(out)))
    spoil(runner, held)
    run_step(runner, others, 2048)
    change_blocks(first, out)
    back = {cpu_block: free[index] for index, cpu_block in enumerate(out.values())}
    change_blocks(first, back)
    run_items(runner, [next_item(sequence, 1) for sequence in sequences], BlockMoves(swap_in=as_moves(back)))
    assert finish(runner, sequences, 20) == expected


def test_a_plan_of_moves_alone_moves(runner: ModelRunner) -> None:
    expected = generate(runner, PROMPTS[:1], 9)
    [sequence] = new_sequences(runner, PROMPTS[:1], 9)
    run_step(runner, [sequence], 2048)
    out = {block_id: index for index, block_id in enumerate(held_blocks(sequence))}
    output = runner.execute(BlockMoves(swap_out=as_moves(out)), [])
    assert (output.sampled, output.candidates, output.prompt_logprobs) == ([], [], [])
    spoil(runner, held_blocks(sequence))
    runner.execute(BlockMoves(swap_in=as_moves(inverted(out))), [])
    assert finish(runner, [sequence], 9) == expected


def test_a_block_that_is_swapped_out_may_be_filled_in_the_same_step(runner: ModelRunner) -> None:
    expected = [generate(runner, [prompt], 8) for prompt in PROMPTS[:2]]
    first, second = (new_sequences(runner, [prompt], 8)[0] for prompt in PROMPTS[:2])
    run_step(runner, [first], 2048)
    held = held_blocks(first)
    out = {block_id: index for index, block_id in enumerate(held)}
    change_blocks(second, dict(zip(held_blocks(second), held, strict=False)))
    run_items(runner, [next_item(second, len(PROMPTS[1]))], BlockMoves(swap_out=as_moves(out)))
    assert finish(runner, [second], 8) == expected[1]
    runner.execute(BlockMoves(swap_in=as_moves(inverted(out))), [])
    assert finish(runner, [first], 8) == expected[0]


def test_sequences_that_share_a_partial_block_part_by_copying_it(runner: ModelRunner) -> None:
    prompt, endings = PROMPTS[0], [[11, 12, 13], [21, 22, 23]]
    expected = [generate(runner, [prompt + ending], 8)[0] for ending in endings]
    [parent] = new_sequences(runner, [prompt], 12)
    runner.execute(NO_MOVES, [next_item(parent, len(prompt))])
    parent.num_computed = len(prompt)
    drop_passed_blocks(runner, parent)
    child = fork(parent, 1)
    partial, offset = divmod(len(prompt), runner.block_size)
    assert offset
    # The child keeps what is full, and gets its own copy of the last block and its own ones after it.
    own = iter(free_blocks(runner, parent))
    for table in child.block_tables:
        table[partial:] = [next(own) for _ in table[partial:]]
    copies = {old[partial]: new[partial] for old, new in zip(parent.block_tables, child.block_tables, strict=True)}
    for sequence, ending in zip((parent, child), endings, strict=True):
        sequence.token_ids += ending
        sequence.prompt_length += len(ending)
    items = [next_item(sequence, len(endings[0])) for sequence in (parent, child)]
    run_items(runner, items, BlockMoves(copy=as_moves(copies)))
    assert finish(runner, [parent, child], 8) == expected


def test_followers_sample_what_they_would_alone(runner: ModelRunner) -> None:
    [leader, other] = new_sequences(runner, PROMPTS[:2], 4, SAMPLED)
    followers = [fork(leader, index) for index in (1, 2, 3)]
    alone = []
    for sequence in (leader, *followers, other):
        [token] = runner.execute(NO_MOVES, [next_item(sequence, len(sequence.token_ids))]).sampled
        alone.append(token)
    items = [next_item(leader, len(leader.token_ids), *followers), next_item(other, len(other.token_ids))]
    assert runner.execute(NO_MOVES, items).sampled == alone
    assert len({token.token_id for token in alone[:4]}) > 1


def test_beams_get_the_likeliest_tokens(runner: ModelRunner, tiny: tuple[Path, Any]) -> None:
    beam = SamplingParams(beam=BeamSearch(3, 1.0, EarlyStopping.OFF), stop_token_ids=[7], max_tokens=9)
    [sequence] = new_sequences(runner, PROMPTS[:1], 4, beam)
    output = runner.execute(NO_MOVES, [next_item(sequence, len(sequence.token_ids))])
    with torch.inference_mode():
        logprobs = tiny[1](torch.tensor([PROMPTS[0]])).logits[0, -1].log_softmax(dim=-1)
    [candidates] = output.candidates
    assert output.sampled == []
    assert candidates.logprobs == pytest.approx(logprobs.topk(6).values.tolist(), abs=tolerance(runner))
    assert candidates.logprobs == pytest.approx(logprobs[candidates.token_ids].tolist(), abs=tolerance(runner))


@pytest.mark.parametrize("budget", [2048, 7])
@pytest.mark.parametrize("rows", [256, 3])
def test_prompt_logprobs_are_those_of_transformers(
    runner: ModelRunner, tiny: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, budget: int, rows: int
) -> None:
    monkeypatch.setattr("octavo.worker.sampling.logprobs.PROMPT_ROWS", rows)
    sampling = msgspec.structs.replace(GREEDY, prompt_logprobs=2)
    sequences = new_sequences(runner, PROMPTS, 3, sampling)
    sequences[1].sampling = GREEDY
    found: dict[int, Any] = {}
    while any(sequence.num_generated < 3 for sequence in sequences):
        for entry in run_step(runner, sequences, budget).prompt_logprobs:
            assert entry.sequence_id == 0
            found |= {entry.start + index: logprobs for index, logprobs in enumerate(entry.logprobs)}
    prompt = PROMPTS[0]
    with torch.inference_mode():
        expected = tiny[1](torch.tensor([prompt])).logits[0].log_softmax(dim=-1)
    assert sorted(found) == list(range(1, len(prompt)))
    for position, logprobs in found.items():
        row = expected[position - 1]
        assert logprobs.logprob == pytest.approx(float(row[prompt[position]]), abs=tolerance(runner))
        # Some are as good as equal.
        margin = tolerance(runner) / 10 if runner._layout.dtype == torch.float32 else 2 * tolerance(runner)
        least, most = (int((row > row[prompt[position]] + by).sum()) for by in (margin, -margin))
        assert least < logprobs.rank <= most
        top = row[logprobs.top_token_ids].tolist()
        assert top == pytest.approx(row.topk(2).values.tolist(), abs=margin)


def test_prompt_logprobs_do_not_change_what_is_generated(runner: ModelRunner) -> None:
    sampling = msgspec.structs.replace(GREEDY, prompt_logprobs=0)
    assert generate(runner, PROMPTS, 6, budget=11, sampling=sampling) == generate(runner, PROMPTS, 6)


@pytest.mark.parametrize(
    ("options", "num_cpu_blocks"),
    [
        ({}, 10),
        ({"num_cpu_blocks": 0}, 0),
        ({"num_cpu_blocks": 40}, 40),
        ({"swap_memory": 0}, 0),
        ({"swap_memory": 40_000, "num_cpu_blocks": 3}, 3),
    ],
)
def test_the_cpu_pool_is_as_large_as_it_is_asked_to_be(
    tiny: tuple[Path, Any], options: dict[str, Any], num_cpu_blocks: int
) -> None:
    assert fp32_runner(tiny[0], num_blocks=40, threads=1, **options).num_cpu_blocks == num_cpu_blocks


def test_a_swap_budget_is_in_bytes(tiny: tuple[Path, Any]) -> None:
    runner = fp32_runner(tiny[0], num_blocks=40, threads=1, swap_memory=100_000)
    assert runner.num_cpu_blocks == 100_000 // _block_bytes(runner) > 0


def _block_bytes(runner: ModelRunner) -> int:
    return runner.kv_bytes_per_token * runner.block_size // len(runner.kv_groups)


@pytest.mark.parametrize("options", [{"num_cpu_blocks": 41}, {"swap_memory": 1 << 23}])
def test_a_cpu_pool_may_be_larger_than_the_devices(tiny: tuple[Path, Any], options: dict[str, Any]) -> None:
    memory = 40 * _block_bytes(fp32_runner(tiny[0], num_blocks=1))
    runner = fp32_runner(tiny[0], num_blocks=None, kv_cache_memory=memory, threads=1, **options)
    assert runner.num_blocks == 40 < runner.num_cpu_blocks
