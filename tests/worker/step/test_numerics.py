"""Compiled models give a sequence the same choices whatever is computed beside it; where that cannot be kept,
`--numerics exact` is refused."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, GPT2Config, LlamaConfig, Olmo2Config, Phi3Config, Qwen3Config

from octavo.kernels.native.library import VARIANT_VARIABLE, find
from octavo.testbed.models import new_sequences, run_step, write_tiny_model
from octavo.testing.native import VARIANTS, loaded, threads
from octavo.wire.sampling import Logprobs, SamplingParams
from octavo.worker.model_settings import ModelSettings
from octavo.worker.models import linear
from octavo.worker.models.compiled import CompiledLlama
from octavo.worker.step.model_runner import ModelRunner, ModelRunnerError, settings_obstacle

# No size is a multiple of what vectors, panels and threads are cut by, where that can be.
SIZES: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 78,
    "intermediate_size": 90,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
FAMILIES: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "gemma 2, windows and soft caps": Gemma2Config(
        **SIZES, sliding_window=75, attn_logit_softcapping=1.0, final_logit_softcapping=3.0
    ),
    "qwen 3, norms of heads": Qwen3Config(**SIZES),
    "olmo 2, norms of all heads": Olmo2Config(**{**SIZES, "hidden_size": 96}),
    "phi 3, partly rotary": Phi3Config(**{**SIZES, "hidden_size": 96, "partial_rotary_factor": 0.75}),
}
# So large that torch shares out the work on one row among threads.
LARGE = LlamaConfig(**{**SIZES, "vocab_size": 70_001})
SAMPLING = [
    SamplingParams(max_tokens=99, logprobs=5),
    SamplingParams(max_tokens=99, temperature=1.0, seed=1, logprobs=5),
    SamplingParams(max_tokens=99, temperature=0.7, top_p=0.9, seed=2, logprobs=0),
    SamplingParams(max_tokens=99, temperature=1.2, top_k=20, seed=3, repetition_penalty=1.2, logprobs=0),
]
Choice = tuple[int, Logprobs | None]


@pytest.fixture(autouse=True)
def compiled_and_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Also in bfloat16 where the CPU has a matrix unit, which would else be left to oneDNN."""
    loaded()
    monkeypatch.setattr("octavo.worker.models.linear._has_matrix_unit", lambda: False)
    with threads(1):
        yield


@pytest.fixture
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    """The kernels' instruction set, of the whole process."""
    library = loaded()
    if library.functions.octavo_choose(request.param.encode()) is None:
        pytest.skip(f"this CPU does not run {request.param}")
    yield request.param
    library.functions.octavo_choose(library.variant.encode())


EXACT = ModelSettings(num_blocks=8, threads=1, numerics="exact")


def make_runner(directory: Path, **options: Any) -> ModelRunner:
    usual: dict[str, Any] = {"num_blocks": 256, "threads": 1, "numerics": "exact"}
    runner = ModelRunner(directory, ModelSettings(**usual | options))
    assert isinstance(runner.decoder, CompiledLlama)
    return runner


def make_prompts(vocab_size: int, lengths: list[int]) -> list[list[int]]:
    return [random.Random(row).choices(range(vocab_size), k=length) for row, length in enumerate(lengths)]


def choices(
    runner: ModelRunner, prompts: list[list[int]], rows: list[int], counts: list[int], budget: int = 2048
) -> dict[int, list[Choice]]:
    """By row of `prompts`, for the `rows` in their order, computed together: what it chooses for its first `counts`
    tokens. A row is greedy or samples in one of four ways."""
    live = new_sequences(runner, [prompts[row] for row in rows], max(counts))
    names = {sequence.sequence_id: row for sequence, row in zip(live, rows, strict=True)}
    for sequence in live:
        sequence.sampling = SAMPLING[names[sequence.sequence_id] % len(SAMPLING)]
    found: dict[int, list[Choice]] = {row: [] for row in rows}
    while live:
        for sampled in run_step(runner, live, budget).sampled:
            found[names[sampled.sequence_id]].append((sampled.token_id, sampled.logprobs))
        live = [each for each in live if each.num_generated < counts[names[each.sequence_id]]]
    return found


def check(runner: ModelRunner, lengths: list[int], counts: list[int], budgets: tuple[int, ...] = (2048, 64, 7)) -> None:
    """Alone, in two orders, in chunks of several sizes, on three threads: every row chooses alike. Rows end one after
    the other, so that batches of all sizes come up."""
    prompts = make_prompts(runner.model.vocab_size, lengths)
    rows = list(range(len(prompts)))
    alone = {row: choices(runner, prompts, [row], counts)[row] for row in rows}
    assert {row: len(chosen) for row, chosen in alone.items()} == dict(enumerate(counts))
    for budget in budgets:
        assert choices(runner, prompts, rows, counts, budget) == alone, f"chunks of up to {budget}"
    with threads(3):
        assert choices(runner, prompts, random.Random(0).sample(rows, len(rows)), counts, 50) == alone, "three threads"


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize(
    ("dtype", "kept"),
    [
        ("float32", "auto"),
        ("bfloat16", "auto"),
        ("float32", "int8"),
        pytest.param("bfloat16", "int8", marks=pytest.mark.deep),
    ],
)
def test_a_sequence_chooses_alike_in_any_company(tmp_path: Path, config: Any, dtype: str, kept: str) -> None:
    write_tiny_model(tmp_path, config)
    numerics = "exact" if dtype == "float32" else "default"
    runner = make_runner(tmp_path, dtype=dtype, numerics=numerics, kv_cache_dtype=kept)
    # Contexts of up to several of the kernels' chunks of 64 keys.
    check(runner, lengths=[135, 3, 17, 61, 1, 70, 30], counts=[4, 3, 5, 8, 2, 1, 7])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sequence_chooses_alike_among_any_number(tmp_path: Path, dtype: str) -> None:
    write_tiny_model(tmp_path, FAMILIES["llama"])
    runner = make_runner(tmp_path, dtype=dtype, numerics="exact" if dtype == "float32" else "default")
    # Twice as many rows as the kernels take at once, and each number below.
    check(runner, lengths=[1 + 3 * row for row in range(26)], counts=[1 + row for row in range(26)], budgets=(2048, 7))


@pytest.mark.parametrize("variant", VARIANTS, indirect=True)
@pytest.mark.parametrize(
    ("dtype", "kept"),
    [
        ("float32", "auto"),
        ("bfloat16", "auto"),
        ("float32", "int8"),
        pytest.param("float32", "bfloat16", marks=pytest.mark.deep),
    ],
)
def test_every_instruction_set_keeps_rows_apart(tmp_path: Path, variant: str, dtype: str, kept: str) -> None:
    write_tiny_model(tmp_path, FAMILIES["llama"])
    numerics = "exact" if dtype == "float32" else "default"
    runner = make_runner(tmp_path, dtype=dtype, numerics=numerics, kv_cache_dtype=kept)
    check(runner, lengths=[70, 3, 17, 1, 33, 8, 64], counts=[4, 3, 5, 6, 2, 1, 7], budgets=(2048, 7))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_large_vocabulary_is_chosen_from_alike(tmp_path: Path, dtype: str) -> None:
    write_tiny_model(tmp_path, LARGE)
    runner = make_runner(tmp_path, dtype=dtype, numerics="exact" if dtype == "float32" else "default")
    check(runner, lengths=[5, 40, 1, 9, 2], counts=[3, 3, 4, 2, 5], budgets=(2048,))


def test_the_bundled_model_in_bfloat16_chooses_alike_in_any_company(bundled_model: Path) -> None:
    runner = make_runner(bundled_model, dtype="bfloat16", numerics="default")
    check(runner, lengths=[70, 3, 17, 1, 40], counts=[4, 3, 6, 5, 2], budgets=(2048, 13))


def test_exact_computes_in_float32(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, FAMILIES["llama"])
    assert make_runner(tmp_path).model.dtype == "float32"
    assert make_runner(tmp_path, dtype="float32").model.dtype == "float32"
    assert make_runner(tmp_path, numerics="default").model.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"dtype": "bfloat16"}, "computes in float32 on a CPU; leave --dtype bfloat16 out"),
        ({"dtype": "float16"}, "computes in float32 on a CPU; leave --dtype float16 out"),
        ({"block_size": 8}, "needs Octavo's own kernels for the whole model: they want blocks of a multiple of 16"),
        ({"model_impl": "transformers"}, "needs a model that Octavo computes itself; .* Leave it out"),
    ],
)
def test_exact_is_refused_where_it_cannot_be_kept(tmp_path: Path, options: dict[str, Any], why: str) -> None:
    write_tiny_model(tmp_path, FAMILIES["llama"])
    with pytest.raises(ModelRunnerError, match=f"^--numerics exact {why}"):
        ModelRunner(tmp_path, replace(EXACT, **options))


def test_exact_is_refused_for_layers_that_torch_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_model(tmp_path, LlamaConfig(**SIZES))
    monkeypatch.setattr(linear, "_native_takes", lambda weight: False)
    with pytest.raises(ModelRunnerError, match=r"for the whole model: a weight is multiplied by (onednn|plain)"):
        ModelRunner(tmp_path, EXACT)


def test_exact_is_refused_for_other_architectures(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, GPT2Config(vocab_size=300, n_embd=64, n_layer=2, n_head=4, n_positions=64))
    with pytest.raises(ModelRunnerError, match="this one is computed by transformers"):
        ModelRunner(tmp_path, EXACT)


def test_exact_is_refused_without_compiled_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_model(tmp_path, FAMILIES["llama"])
    monkeypatch.setenv(VARIANT_VARIABLE, "none")
    find.cache_clear()
    try:
        with pytest.raises(ModelRunnerError, match="for the whole model: OCTAVO_CPU_KERNELS=none turns them off"):
            ModelRunner(tmp_path, EXACT)
    finally:
        find.cache_clear()


def test_exact_takes_any_dtype_on_a_gpu() -> None:
    assert settings_obstacle("bfloat16", torch.device("cuda")) is None
    assert settings_obstacle("bfloat16", torch.device("cpu")) is not None
