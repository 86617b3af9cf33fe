"""Layers compiled into one native program, against the same weights in torch."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, GraniteConfig, LlamaConfig, Olmo2Config, Qwen3Config, SmolLM3Config

from octavo.kernels.native.library import VARIANT_VARIABLE, NativeLibrary, NativeUnavailable, find, load
from octavo.testbed.models import generate, last_logits, new_sequences, next_item, paged_step, write_tiny_model
from octavo.testing.native import library, loaded, threads
from octavo.worker.model_settings import ModelSettings
from octavo.worker.models import linear
from octavo.worker.models.compiled import CompiledLlama, compile_layers, compiled
from octavo.worker.models.decoder import PagedStep
from octavo.worker.models.linear import LinearKind
from octavo.worker.models.llama import LlamaModel
from octavo.worker.step.model_runner import ModelRunner

__all__ = ["library"]

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 80,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
# Between them they have all that a program can hold.
CONFIGS = {
    "biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "norms of heads": Qwen3Config(**SIZES),
    "norms of all heads, and after": Olmo2Config(**SIZES),
    "windows, soft caps, GELU, four norms": Gemma2Config(**SIZES, sliding_window=20),
    "scaled residuals": GraniteConfig(**SIZES, residual_multiplier=0.7, embedding_multiplier=1.7),
    "layers without positions": SmolLM3Config(**SIZES, no_rope_layers=[1, 0, 1]),
}
PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6], list(range(100, 180))]
LABELS = {"norm", "qkv", "rope_write", "attention", "output", "gate_up", "down"}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By the names of `CONFIGS`."""
    paths = {name: tmp_path_factory.mktemp("model") for name in CONFIGS}
    for name, path in paths.items():
        write_tiny_model(path, CONFIGS[name])
    return paths


@pytest.fixture
def llama(directories: dict[str, Path]) -> Path:
    return directories["biases"]


def runner_of(directory: Path, dtype: str = "float32") -> ModelRunner:
    return ModelRunner(directory, ModelSettings(dtype=dtype, num_blocks=64, num_cpu_blocks=0, threads=1))


def torch_runner(directory: Path, dtype: str = "float32") -> ModelRunner:
    """One that Octavo's own kernels have no part in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIANT_VARIABLE, "none")
        find.cache_clear()
        runner = runner_of(directory, dtype)
    find.cache_clear()
    # Now, so that it takes back no choice of a variant later.
    with suppress(NativeUnavailable):
        load()
    assert isinstance(runner.decoder, LlamaModel)
    return runner


@pytest.fixture(scope="module")
def expected(directories: dict[str, Path]) -> Callable[[str, str], Tensor]:
    """The logits of torch's own operations after each of `PROMPTS`, [prompts, vocab_size], by configuration and
    dtype."""
    found: dict[tuple[str, str], Tensor] = {}

    def logits(name: str, dtype: str) -> Tensor:
        if (name, dtype) not in found:
            runner = torch_runner(directories[name], dtype)
            found[name, dtype] = torch.stack([last_logits(runner, prompt) for prompt in PROMPTS])
        return found[name, dtype]

    return logits


def step_of(runner: ModelRunner, prompts: list[list[int]]) -> PagedStep:
    items = [next_item(sequence, len(sequence.token_ids)) for sequence in new_sequences(runner, prompts, 0)]
    return paged_step(runner, items)


@torch.inference_mode()
def logits_of(runner: ModelRunner, prompts: list[list[int]]) -> Tensor:
    """[prompts, vocab_size]: those after each of `prompts`, in one step."""
    return runner.decoder.logits(runner.decoder.forward(step_of(runner, prompts)))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_the_same_model_in_torch(
    library: NativeLibrary, directories: dict[str, Path], expected: Callable[[str, str], Tensor], name: str
) -> None:
    wanted = expected(name, "float32")
    library.functions.octavo_choose(library.variant.encode())
    runner = runner_of(directories[name])
    assert isinstance(runner.decoder, CompiledLlama)
    torch.testing.assert_close(logits_of(runner, PROMPTS), wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_bfloat16_strays_no_further_than_torchs(
    library: NativeLibrary,
    directories: dict[str, Path],
    expected: Callable[[str, str], Tensor],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    truth, theirs = (expected(name, dtype) for dtype in ("float32", "bfloat16"))
    # A CPU that has a unit for matrices would leave bf16 to oneDNN.
    monkeypatch.setattr(linear, "_has_matrix_unit", lambda: False)
    library.functions.octavo_choose(library.variant.encode())
    runner = runner_of(directories[name], "bfloat16")
    assert isinstance(runner.decoder, CompiledLlama)
    ours = logits_of(runner, PROMPTS)
    assert (ours - truth).abs().mean() < 1.3 * (theirs - truth).abs().mean()


@pytest.fixture
def runner(llama: Path) -> ModelRunner:
    loaded()
    return runner_of(llama)


def test_steps_of_all_sizes_may_follow_each_other(runner: ModelRunner) -> None:
    prompts = [PROMPTS[1], PROMPTS[2], [9], list(range(20, 250)), PROMPTS[1]]
    logits = [logits_of(runner, [prompt]) for prompt in prompts]
    for prompt, found in zip(prompts, logits, strict=True):
        assert torch.equal(logits_of(runner, [prompt]), found)
    assert torch.equal(logits[0], logits[-1])


def test_room_is_kept_for_the_largest_step(runner: ModelRunner) -> None:
    assert isinstance(runner.decoder, CompiledLlama)
    rooms = []
    for size in (10, 30, 5, 30, 31):
        logits_of(runner, [list(range(size))])
        rooms.append(runner.decoder._workspace[0].data_ptr())
    assert [len(room) for room in runner.decoder._workspace] == [31] * 4 + [0]
    assert rooms[1] == rooms[2] == rooms[3]


def test_only_the_rows_that_are_wanted_come_back(runner: ModelRunner) -> None:
    step = step_of(runner, [PROMPTS[2]])
    with torch.inference_mode():
        every = runner.decoder.forward(replace(step, rows=torch.arange(80)))
        some = runner.decoder.forward(replace(step, rows=torch.tensor([79, 3, 3])))
        none = runner.decoder.forward(replace(step, rows=torch.tensor([], dtype=torch.int64)))
        assert runner.decoder.logits(none).shape == (0, 300)
    assert torch.equal(some, every[[79, 3, 3]])


def test_the_number_of_threads_does_not_show(library: NativeLibrary, directories: dict[str, Path]) -> None:
    for name in CONFIGS:
        runner = runner_of(directories[name], "bfloat16")
        alone = logits_of(runner, PROMPTS)
        for count in (2, 3):
            with threads(count):
                assert torch.equal(logits_of(runner, PROMPTS), alone)


def test_a_profile_names_every_kind_of_operation(runner: ModelRunner) -> None:
    decoder = runner.decoder
    assert isinstance(decoder, CompiledLlama)
    logits_of(runner, PROMPTS)
    assert not decoder.op_times
    decoder.profiling = True
    logits_of(runner, PROMPTS)
    assert set(decoder.op_times) == LABELS
    assert min(decoder.op_times.values()) > 0
    before = dict(decoder.op_times)
    decoder.profiling = False
    logits_of(runner, PROMPTS)
    assert decoder.op_times == before


def test_a_position_that_the_model_does_not_have_is_refused(runner: ModelRunner) -> None:
    step = step_of(runner, [[1, 2, 3]])
    for positions, message in (
        ([0, 1, 256], "0 to 256"),
        ([0, 1 << 40, 2], f"0 to {1 << 40}"),
        ([0, -1, 2], "-1 to 2"),
    ):
        with pytest.raises(ValueError, match=f"positions {message} for a model of 256"):
            runner.decoder.forward(replace(step, positions=torch.tensor(positions)))


def test_a_block_that_the_cache_does_not_have_is_refused(runner: ModelRunner) -> None:
    for wrong, message in ((64, "block 64 is named; the cache has 64"), (-1, "no block where a query looks")):
        [sequence] = new_sequences(runner, [PROMPTS[2]], 0)
        sequence.block_tables[0][2] = wrong
        with pytest.raises(ValueError, match=message):
            runner.decoder.forward(paged_step(runner, [next_item(sequence, 80)]))


def test_a_step_of_another_number_of_tokens_is_refused(runner: ModelRunner) -> None:
    step = step_of(runner, [[1, 2, 3]])
    for ids, positions in ((2, 2), (4, 4), (3, 4), (4, 3)):
        other = replace(step, input_ids=torch.zeros(ids).long(), positions=torch.zeros(positions).long())
        with pytest.raises(ValueError, match=f"{ids} tokens, {positions} positions and 3 slots"):
            runner.decoder.forward(other)


def test_what_the_kernels_cannot_compute_is_left_as_it_is(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded()
    native, torchs = runner_of(llama), torch_runner(llama)
    assert compiled(torchs.decoder, torchs.attention) is torchs.decoder
    assert compiled(torchs.decoder, native.attention) is torchs.decoder
    assert isinstance(torchs.decoder, LlamaModel)
    with pytest.raises(ValueError, match=r"a weight is multiplied by (onednn|plain)"):
        compile_layers(torchs.decoder)
    with monkeypatch.context() as patch:
        patch.setattr(linear, "_native_takes", lambda weight: False)
        assert isinstance(runner_of(llama).decoder, LlamaModel)
    blocks_of_8 = ModelRunner(llama, ModelSettings(dtype="float32", num_blocks=64, num_cpu_blocks=0, block_size=8))
    assert isinstance(blocks_of_8.decoder, LlamaModel)


@pytest.mark.parametrize("kind", [LinearKind.ONEDNN, LinearKind.PLAIN])
def test_tokens_are_the_same_without_the_kernels(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch, kind: LinearKind
) -> None:
    loaded()
    if kind is LinearKind.PLAIN:
        monkeypatch.setattr(linear, "prepacking_available", lambda dtype: False)
    for name in ("norms of heads", "windows, soft caps, GELU, four norms"):
        native, torchs = runner_of(directories[name]), torch_runner(directories[name])
        assert isinstance(native.decoder, CompiledLlama)
        assert isinstance(torchs.decoder, LlamaModel)
        if kind is LinearKind.PLAIN or linear.prepacking_available(torch.float32):
            assert torchs.decoder.layers[0].mlp.down.kind is kind
        tokens = generate(native, PROMPTS, 12, budget=23)
        assert generate(torchs, PROMPTS, 12, budget=23) == tokens
        assert generate(torchs, PROMPTS, 12) == tokens
