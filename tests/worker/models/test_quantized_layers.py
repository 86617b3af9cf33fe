"""Models with quantised weights: layers in torch around them and the native program give the same, close to the numbers
that the weights stand for."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, LlamaConfig

from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.quantized import FORMATS, GROUP, Quantized
from octavo.testbed.models import generate, last_logits, new_sequences, next_item, paged_step, write_tiny_model
from octavo.testing.native import kernels, library, loaded, threads
from octavo.worker.model_settings import ModelSettings
from octavo.worker.models import llama
from octavo.worker.models.compiled import Buffer, CompiledLlama
from octavo.worker.models.linear import GatedLinear, Linear, LinearKind, Weight, obstacle_to_quantized
from octavo.worker.models.llama import LlamaModel
from octavo.worker.step.model_runner import ModelRunner

__all__ = ["kernels", "library"]

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
CONFIGS = {
    "biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "four norms, GELU": Gemma2Config(**SIZES, sliding_window=20),
}
PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6], list(range(100, 180))]


def quantized(weight: Tensor, name: str) -> Quantized:
    """Rounds a weight to symmetric integers."""
    form = FORMATS[name]
    groups = weight.view(len(weight), -1, GROUP)
    scales = (groups.abs().amax(dim=2) / (form.offset - 1)).half()
    codes = torch.round(groups / scales.float().clamp(min=1e-8).unsqueeze(2)) + form.offset
    return Quantized(form, codes.clamp(0, 2 * form.offset - 1).to(torch.uint8).view_as(weight), scales)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parts(weight: Tensor, *names: str) -> list[Weight]:
    """Cuts a weight into as many parts as there are names, each in its format."""
    return [quantized(part, name) for part, name in zip(weight.chunk(len(names)), names, strict=True)]


@pytest.mark.parametrize("formats", [("q8_0",), ("q4_0", "q8_0"), ("q4_0", "q8_0", "q5_0", "q5_0")])
def test_a_layer_may_have_parts_of_several_formats(library: NativeLibrary, formats: tuple[str, ...]) -> None:
    weights, bias, rows = parts(random(80, 64), *formats), random(80, seed=1), random(11, 64, seed=2)
    layer = Linear(weights, bias)
    assert layer.kind is LinearKind.QUANTIZED
    assert len(layer.native) == len(set(formats))
    apart = [Linear(part)(rows) for part in weights]
    assert torch.equal(layer(rows), torch.cat(apart, dim=1) + bias)
    room = torch.empty(11, 80)
    assert layer.to_float(rows, out=room) is room
    assert torch.equal(room, layer(rows))
    whole = torch.cat([part.dequantize() for part in weights if isinstance(part, Quantized)])
    torch.testing.assert_close(layer(rows), rows @ whole.T + bias, atol=0.3, rtol=0.0)


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_a_gate_and_its_up_may_differ_in_format(library: NativeLibrary, activation: str) -> None:
    fused, bias, rows = random(80, 64), random(80, seed=1), random(11, 64, seed=2)
    gate, up = parts(fused, "q4_0", "q8_0")
    layer = GatedLinear([gate, up], bias, activation)
    assert len(layer.native) == 2
    # Two weights of one format are one: what it gives is what each gives for its own half.
    alike = [
        GatedLinear([each, each], torch.cat((part, part)), activation)
        for each, part in zip((gate, up), bias.chunk(2), strict=True)
    ]
    assert all(len(each.native) == 1 for each in alike)
    gated = Linear(up, bias[40:])(rows)
    torch.testing.assert_close(
        layer(rows), alike[0](rows) / Linear(gate, bias[:40])(rows) * gated, atol=1e-4, rtol=1e-4
    )


def test_what_cannot_stay_quantized_is_dequantized(kernels: str) -> None:
    weight, rows = quantized(random(40, 64), "q8_0"), random(3, 64, seed=1)
    wanted = rows @ weight.dequantize().T
    if kernels == "torch":
        assert obstacle_to_quantized() == "OCTAVO_CPU_KERNELS=none turns them off"
        assert Linear(weight).kind is not LinearKind.QUANTIZED
        torch.testing.assert_close(Linear(weight)(rows), wanted, atol=1e-4, rtol=1e-4)
        with pytest.raises(ValueError, match="rows are read from a quantised weight"):
            Linear(weight).rows(torch.tensor([1]))
        return
    loaded()
    assert obstacle_to_quantized() is None
    # Beside a weight that is none, and behind an activation that the kernels do not know.
    mixed = Linear([weight, random(8, 64)])
    assert mixed.kind is not LinearKind.QUANTIZED
    torch.testing.assert_close(mixed(rows)[:, :40], wanted, atol=1e-4, rtol=1e-4)
    assert GatedLinear(weight, None, "relu").kind is not LinearKind.QUANTIZED
    assert Linear(weight, kind=LinearKind.PLAIN).plain is not None
    with pytest.raises(ValueError, match="not multiplied as quantised"):
        Linear(random(4, 64), kind=LinearKind.QUANTIZED)


def test_rows_of_an_embedding_are_those_of_the_numbers() -> None:
    loaded()
    weight, which = quantized(random(50, 64), "q8_0"), torch.tensor([49, 3, 3, 0])
    assert torch.equal(Linear(weight).rows(which), weight.dequantize()[which])
    with pytest.raises(ValueError, match="a quantised weight of one format"):
        Linear(parts(random(50, 64), "q8_0", "q4_0")).rows(which)


@pytest.fixture(params=CONFIGS)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write_tiny_model(tmp_path, CONFIGS[request.param])
    return tmp_path


def whole(weight: Weight | Sequence[Weight]) -> Tensor:
    """The weight that a model hands on, as one tensor."""
    parts = [weight] if isinstance(weight, Tensor | Quantized) else weight
    return torch.cat([part for part in parts if isinstance(part, Tensor)])


def linear(weight: Weight | Sequence[Weight], bias: Tensor | None = None, *, numbers: bool) -> Linear:
    """The layer with its weight quantised, that of queries, keys and values in two formats; or with the `numbers` that
    these stand for."""
    weight = whole(weight)
    several = parts(weight, "q4_0", "q8_0") if len(weight) == 128 else [quantized(weight, "q5_0")]
    return Linear(several, bias, kind=LinearKind.PLAIN if numbers else None)


def gated(weight: Weight | Sequence[Weight], bias: Tensor | None, activation: str, *, numbers: bool) -> GatedLinear:
    return GatedLinear(
        parts(whole(weight), "q8_0", "q4_0"), bias, activation, kind=LinearKind.PLAIN if numbers else None
    )


@contextmanager
def quantized_layers(*, numbers: bool) -> Iterator[None]:
    """Lets models that are loaded meanwhile have linear layers that are quantised, or of the numbers that these stand
    for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama, "Linear", functools.partial(linear, numbers=numbers))
        patch.setattr(llama, "GatedLinear", functools.partial(gated, numbers=numbers))
        yield


def runner_of(directory: Path, *, numbers: bool) -> ModelRunner:
    """One whose linear layers are quantised, or of the numbers that these stand for."""
    with quantized_layers(numbers=numbers):
        return ModelRunner(directory, ModelSettings(dtype="float32", num_blocks=64, num_cpu_blocks=0, threads=1))


@torch.inference_mode()
def logits_of(runner: ModelRunner, prompts: list[list[int]]) -> Tensor:
    """[prompts, vocab_size]: those after each of `prompts`, in one step."""
    items = [next_item(sequence, len(sequence.token_ids)) for sequence in new_sequences(runner, prompts, 0)]
    return runner.decoder.logits(runner.decoder.forward(paged_step(runner, items)))


def test_a_program_computes_with_quantized_weights(library: NativeLibrary, directory: Path) -> None:
    numbers = runner_of(directory, numbers=True)
    assert isinstance(numbers.decoder, LlamaModel)
    wanted = torch.stack([last_logits(numbers, prompt) for prompt in PROMPTS])
    runner = runner_of(directory, numbers=False)
    assert isinstance(runner.decoder, CompiledLlama)
    found = logits_of(runner, PROMPTS)
    torch.testing.assert_close(found, wanted, atol=0.05 * wanted.abs().max().item(), rtol=0.0)
    # Alone, and with rows that each thread quantises for itself.
    assert torch.equal(logits_of(runner, PROMPTS[:1])[0], found[0])
    assert torch.equal(logits_of(runner, PROMPTS[1:2])[0], found[1])


def test_threads_and_chunks_do_not_show(directory: Path) -> None:
    loaded()
    runner = runner_of(directory, numbers=False)
    alone = logits_of(runner, PROMPTS[2:])
    for count in (2, 5):
        with threads(count):
            assert torch.equal(logits_of(runner, PROMPTS)[2:], alone)
    assert generate(runner, PROMPTS, 8, budget=7) == generate(runner, PROMPTS, 8)


def test_rows_are_quantized_once_for_all_parts_of_a_layer(directory: Path) -> None:
    loaded()
    decoder = runner_of(directory, numbers=False).decoder
    assert isinstance(decoder, CompiledLlama)
    program = decoder._program
    before = [program.labels[index - 1] for index, label in enumerate(program.labels) if label == "qkv"]
    assert before == ["quantize", "qkv"] * 2
    assert program.widths[Buffer.QUANTIZED] == 96
