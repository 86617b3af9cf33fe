"""Architectures of transformers with their attention paged, against transformers' own logits and tokens."""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from octavo.kernels.triton.layers import grouped
from octavo.testbed.models import fp32_runner, generate, last_logits, transformers_greedy
from octavo.testing.depth import deep
from octavo.testing.interpreter import order_dots
from octavo.testing.native import loaded
from octavo.testing.small.architecture_trial import TOLERANCE, max_logit_error, write_random_model
from octavo.testing.small.tiny_configs import causal_class, tiny_config
from octavo.worker.model_settings import ModelSettings
from octavo.worker.models.transformers.experts import OWN, choose_experts, use_experts
from octavo.worker.models.transformers.model import TransformersModel
from octavo.worker.step.model_runner import ModelRunner

# The windows of each one's KV groups. Tiny configurations slide over 20 tokens wherever they slide at all.
ARCHITECTURES = {
    "cohere": [0],
    "gemma": [0],
    "gemma2": [20, 0],
    "gemma3_text": [20, 0],
    "glm4": [0],
    "gpt2": [0],
    "gpt_neox": [0],
    "gpt_oss": [20, 0],
    "granite": [0],
    "mixtral": [20],
    "olmo2": [0],
    "opt": [0],
    "phi": [0],
    "phi3": [20],
    "qwen2_moe": [0],
    "qwen3_moe": [0],
    "starcoder2": [20],
}
PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6], list(range(100, 145))]


def write_tiny(directory: Path, model_type: str) -> torch.nn.Module:
    architecture = causal_class(model_type)
    model: torch.nn.Module = write_random_model(
        directory, tiny_config(model_type, architecture.config_class), architecture
    )
    return model


def transformers_runner(directory: Path) -> ModelRunner:
    return fp32_runner(directory, num_blocks=128, threads=1, model_impl="transformers")


@pytest.mark.parametrize(("model_type", "windows"), ARCHITECTURES.items(), ids=ARCHITECTURES)
def test_logits_and_tokens_are_those_of_transformers(model_type: str, windows: list[int], tmp_path: Path) -> None:
    model = write_tiny(tmp_path, model_type)
    runner = transformers_runner(tmp_path)
    assert isinstance(runner._model, TransformersModel)
    assert sorted({group.window for group in runner.kv_groups}) == sorted(windows)
    assert max_logit_error(runner, model) <= TOLERANCE
    tokens = [transformers_greedy(model, prompt, 10) for prompt in PROMPTS]
    assert generate(runner, PROMPTS, 10, budget=13) == tokens
    assert generate(runner, PROMPTS, 10) == tokens


@pytest.mark.parametrize("model_type", ["gemma2", "gpt_oss"])
def test_a_cache_of_8_bits_serves_transformers_models_too(model_type: str, tmp_path: Path) -> None:
    """With windows, soft caps and sinks."""
    loaded()
    model = write_tiny(tmp_path, model_type)
    runner = fp32_runner(tmp_path, num_blocks=128, threads=1, model_impl="transformers", kv_cache_dtype="int8")
    assert runner._layout.dtype == torch.int8
    assert 0 < max_logit_error(runner, model) <= 0.1
    assert generate(runner, PROMPTS, 10, budget=13) == generate(runner, PROMPTS, 10)


def without_softcap(attention: Any) -> None:
    attention.attn_logit_softcapping = None


def without_sinks(attention: Any) -> None:
    attention.sinks.fill_(-1e4)


@pytest.mark.parametrize(("model_type", "change"), [("gemma2", without_softcap), ("gpt_oss", without_sinks)])
def test_soft_caps_and_sinks_make_a_difference(model_type: str, change: Callable[[Any], None], tmp_path: Path) -> None:
    """Or the comparison above would not notice if they were forgotten."""
    write_tiny(tmp_path, model_type)
    runner = transformers_runner(tmp_path)
    expected = last_logits(runner, PROMPTS[1])
    assert isinstance(runner._model, TransformersModel)
    with torch.inference_mode():
        for layer in runner._model._model.model.model.layers:
            change(layer.self_attn)
    assert (last_logits(runner, PROMPTS[1]) - expected).abs().max() > 100 * TOLERANCE * expected.abs().max()


def test_only_wanted_rows_reach_the_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny(tmp_path, "gemma2")
    runner = transformers_runner(tmp_path)
    rows = []
    logits = runner._model.logits

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return logits(hidden)

    monkeypatch.setattr(runner._model, "logits", counted)
    generate(runner, PROMPTS, 2)
    assert set(rows) == {len(PROMPTS)}


@pytest.mark.parametrize("way", ["grouped_mm", *deep(OWN)])
@pytest.mark.parametrize("model_type", ["gpt_oss", "mixtral", "qwen3_moe"])
def test_experts_grouped_as_on_a_gpu_compute_the_same(
    model_type: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_tiny(tmp_path, model_type)
    monkeypatch.setattr("octavo.worker.models.transformers.model.choose_experts", lambda model, device: way)
    order_dots(monkeypatch)
    runner = transformers_runner(tmp_path)
    assert runner._model._model.model.config._experts_implementation == way  # type: ignore[attr-defined]
    assert max_logit_error(runner, model) <= TOLERANCE
    assert generate(runner, PROMPTS, 5, budget=13) == [transformers_greedy(model, prompt, 5) for prompt in PROMPTS]


@pytest.mark.parametrize("model_type", ["gpt_oss", *deep("mixtral", "qwen3_moe")])
def test_octavos_experts_compute_what_transformers_does(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture = causal_class(model_type)
    config = tiny_config(model_type, architecture.config_class)
    torch.manual_seed(0)
    model = architecture._from_config(config, dtype=torch.float32)
    block = next(module for name, module in model.named_modules() if name.endswith(("mlp", "block_sparse_moe")))
    tokens = torch.randn(1, 5, config.hidden_size)
    order_dots(monkeypatch)
    with torch.inference_mode():
        model.set_experts_implementation("eager")
        expected = block(tokens)
        use_experts(model, OWN)
        found = block(tokens)
    if isinstance(expected, tuple):
        expected, found = expected[0], found[0]
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(found, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-4)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_experts_grouped_look_at_nothing_that_only_the_device_knows(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or no step of theirs could be captured. Tensors without values show it: where one is asked for, torch raises."""
    architecture = causal_class(model_type)
    config = tiny_config(model_type, architecture.config_class)
    with FakeTensorMode():
        model = architecture._from_config(config, dtype=torch.bfloat16)
        block = next(module for name, module in model.named_modules() if name.endswith(("mlp", "block_sparse_moe")))
        tokens = torch.randn(1, 5, config.hidden_size, dtype=torch.bfloat16)
        model.set_experts_implementation("eager")
        with pytest.raises(DynamicOutputShapeException):
            block(tokens)
        model.set_experts_implementation("grouped_mm")
        block(tokens)
        # Octavo's own but for the kernel, of which no argument is read either.
        monkeypatch.setattr(grouped, "_grouped_kernel", defaultdict(lambda: lambda *given, **constants: None))
        use_experts(model, OWN)
        block(tokens)


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "hidden", "way"),
    [
        ("cuda", (9, 0), torch.bfloat16, 64, "grouped_mm"),
        ("cuda", (10, 0), torch.bfloat16, 64, "grouped_mm"),
        # Elsewhere torch reads on the host where the rows of each expert end.
        ("cuda", (8, 0), torch.bfloat16, 64, OWN),
        ("cuda", (12, 0), torch.bfloat16, 64, OWN),
        ("cuda", (9, 0), torch.float32, 64, OWN),
        ("cuda", (9, 0), torch.bfloat16, 60, OWN),
        ("cpu", None, torch.bfloat16, 64, "eager"),
    ],
)
def test_experts_are_grouped_where_steps_can_be_captured(
    device: str,
    capability: tuple[int, int] | None,
    dtype: torch.dtype,
    hidden: int,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    architecture = causal_class("qwen3_moe")
    config = tiny_config("qwen3_moe", architecture.config_class)
    config.hidden_size = hidden
    with torch.device("meta"):
        model = architecture(config).to(dtype)
    assert choose_experts(model, torch.device(device)) == way


@pytest.mark.parametrize("model_type", ["opt", "qwen3_moe"])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_bfloat16_and_random_weights_are_served(model_type: str, load_format: str, tmp_path: Path) -> None:
    write_tiny(tmp_path, model_type)
    runner = ModelRunner(
        tmp_path,
        ModelSettings(dtype="bfloat16", num_blocks=64, threads=1, load_format=load_format, model_impl="transformers"),
    )
    together = generate(runner, PROMPTS, 4)
    assert [len(tokens) for tokens in together] == [4, 4, 4]
    assert together == generate(runner, PROMPTS, 4, budget=13)
