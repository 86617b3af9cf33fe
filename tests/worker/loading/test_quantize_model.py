"""A model is written with quantised weights once, and loads as if it were quantised at every start."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors import safe_open
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

from octavo.kernels.quantized import Quantized
from octavo.testing.small.architecture_trial import write_random_model
from octavo.testing.small.packed import KINDS, configure
from octavo.worker.cli.prepare import quantize
from octavo.worker.loading import quantize_model
from octavo.worker.loading.load_format import open_weights
from octavo.worker.loading.weights import WeightSource

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "intermediate_size": 96,
}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    write_random_model(tmp_path / "llama", LlamaConfig(**SIZES), LlamaForCausalLM)
    (tmp_path / "llama" / "tokenizer.json").write_text("{}")
    return tmp_path / "llama"


def quantized(source: Path, to: str = "q4_0") -> Path:
    new = source.with_name("new")
    result = run(source, "--to", to, "--output", new)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(new)
    return new


def run(*arguments: object) -> Result:
    return CliRunner().invoke(quantize, [str(each) for each in arguments])


def assert_same(one: WeightSource, other: WeightSource, *plain: str) -> None:
    assert one.shapes().keys() == other.shapes().keys()
    for name, shape in one.shapes().items():
        expected, found = one.take_weight(name, shape), other.take_weight(name, shape)
        if name in plain or not isinstance(expected, Quantized):
            assert torch.equal(one.take(name, shape), other.take(name, shape)), name
        else:
            assert isinstance(found, Quantized), name
            assert found.format is expected.format, name
            for part, tensor in expected.tensors().items():
                assert torch.equal(found.tensors()[part], tensor), name
    other.finish()


@pytest.mark.parametrize("to", ["q4_0", "q8_0"])
def test_the_directory_holds_what_is_quantised_at_every_start(llama: Path, to: str) -> None:
    new = quantized(llama, to)
    assert_same(open_weights(llama, "auto", quantization=to), open_weights(new, "auto"))
    assert (new / "tokenizer.json").read_text() == "{}"
    assert (new / "config.json").stat().st_mode & 0o444 == 0o444


def test_tied_embeddings_are_written_once(tmp_path: Path) -> None:
    write_random_model(tmp_path / "tied", LlamaConfig(**SIZES, tie_word_embeddings=True), LlamaForCausalLM)
    new = quantized(tmp_path / "tied")
    assert_same(open_weights(tmp_path / "tied", "auto", quantization="q4_0"), open_weights(new, "auto"))
    assert "lm_head.weight" not in open_weights(new, "auto").shapes()
    # Others, who do not read an embedding that is quantised, do not know the method.
    assert json.loads((new / "config.json").read_text())["quantization_config"]["quant_method"] == "octavo"


def test_a_model_of_transformers_keeps_its_embedding(tmp_path: Path) -> None:
    config = GPTNeoXConfig(**SIZES, bos_token_id=1, eos_token_id=2)
    write_random_model(tmp_path / "neox", config, GPTNeoXForCausalLM)
    new = quantized(tmp_path / "neox")
    stored, plain = open_weights(new, "auto"), open_weights(tmp_path / "neox", "auto")
    name = "gpt_neox.embed_in.weight"
    assert torch.equal(stored.take(name, (300, 64)), plain.take(name, (300, 64)))
    head = stored.take_weight("embed_out.weight", (300, 64))
    layer = stored.take_weight("gpt_neox.layers.0.mlp.dense_h_to_4h.weight", (96, 64))
    assert isinstance(head, Quantized)
    assert isinstance(layer, Quantized)
    assert (head.format.name, layer.format.name) == ("q8_0", "q4_0")
    assert json.loads((new / "config.json").read_text())["quantization_config"]["quant_method"] == "compressed-tensors"


def test_layers_whose_inputs_fill_no_group_stay_and_are_named(tmp_path: Path) -> None:
    write_random_model(tmp_path / "odd", LlamaConfig(**{**SIZES, "intermediate_size": 80}), LlamaForCausalLM)
    new = quantized(tmp_path / "odd")
    assert_same(open_weights(tmp_path / "odd", "auto", quantization="q4_0"), open_weights(new, "auto"))
    ignored = json.loads((new / "config.json").read_text())["quantization_config"]["ignore"]
    assert ignored == [f"model.layers.{layer}.mlp.down_proj" for layer in range(2)]


def test_large_models_fill_several_files(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_model, "_FILE_BYTES", 20_000)
    (llama / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    new = quantized(llama)
    files = sorted(path.name for path in new.glob("*.safetensors"))
    assert len(files) > 2
    index = json.loads((new / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum((new / name).stat().st_size for name in files)
    for name, file in index["weight_map"].items():
        with safe_open(new / file, "pt") as tensors:
            assert name in tensors.keys()  # noqa: SIM118 (no container)
    assert_same(open_weights(llama, "auto", quantization="q4_0"), open_weights(new, "auto"))


def refusal(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 1
    (line,) = result.stderr.strip().splitlines()
    return line


def test_nothing_is_overwritten(llama: Path) -> None:
    before = sorted(llama.iterdir())
    assert f"{llama} exists, and nothing is overwritten" in refusal(llama, "--to", "q8_0", "--output", llama)
    assert sorted(llama.iterdir()) == before


def test_what_is_quantised_already_is_refused(llama: Path) -> None:
    new = quantized(llama)
    assert "is quantised already; name the model" in refusal(new, "--to", "q8_0", "--output", llama.with_name("third"))
    configure(llama, quantization_config=KINDS["awq"].config)
    assert "is quantised already" in refusal(llama, "--to", "q8_0", "--output", llama.with_name("third"))
    assert not llama.with_name("third").exists()


def test_values_that_cannot_be_quantised_leave_nothing_behind(tmp_path: Path) -> None:
    model = write_random_model(tmp_path / "bad", LlamaConfig(**SIZES), LlamaForCausalLM)
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = float("inf")
    model.save_pretrained(tmp_path / "bad")
    said = refusal(tmp_path / "bad", "--to", "q4_0", "--output", tmp_path / "new")
    assert "'model.layers.0.mlp.up_proj.weight' cannot be quantised" in said
    assert not (tmp_path / "new").exists()


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    assert "no model directory" in refusal(tmp_path, "--to", "q4_0", "--output", tmp_path / "new")
