"""What a worker says at its start of the kernels that compute."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from transformers import GPT2Config, LlamaConfig

from octavo.kernels.native import library
from octavo.testbed.models import fp32_runner, write_tiny_model
from octavo.testing.native import kernels, loaded
from octavo.worker.cli import worker as cli
from octavo.worker.models import linear

__all__ = ["kernels"]

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory, LlamaConfig(**SIZES))
    return directory


def paths(directory: Path, **options: Any) -> str:
    return fp32_runner(directory, num_blocks=8, num_cpu_blocks=0, threads=1, **options).kernels


def test_a_llama_runs_wholly_on_octavos_own_kernels_where_they_are_compiled(tiny: Path) -> None:
    assert paths(tiny) == f"native {loaded().variant}"


def test_without_them_it_is_said_why_and_what_to_do(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernels: str
) -> None:
    if kernels == "torch":
        why = "OCTAVO_CPU_KERNELS=none turns them off"
    else:
        monkeypatch.setattr(library, "LIBRARY", tmp_path / "nowhere.so")
        why = "they were not compiled when Octavo was installed; run `python -m octavo.kernels.native.build`"
    assert paths(tiny).startswith(f"torch (not Octavo's own kernels: {why}")


def test_a_block_size_that_they_do_not_serve_is_named(tiny: Path) -> None:
    loaded()
    assert paths(tiny, block_size=8) == (
        "torch (not Octavo's own kernels: they want blocks of a multiple of 16 tokens, not 8)"
    )


def test_a_model_of_which_they_compute_only_a_part_is_told_apart(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = loaded().variant
    with monkeypatch.context() as patch:
        patch.setattr(linear, "_native_takes", lambda weight: False)
        path = paths(tiny)
    assert path.startswith(f"native {variant} for attention, torch for the rest (a weight is multiplied by ")
    gpt2 = GPT2Config(vocab_size=300, n_positions=64, n_embd=32, n_layer=1, n_head=2)
    write_tiny_model(tmp_path / "gpt2", gpt2)
    assert paths(tmp_path / "gpt2") == f"native {variant} for attention and linear layers, transformers for the rest"


def test_the_line_at_the_start_of_a_worker_says_it(tiny: Path, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = f"native {loaded().variant}\n" if kernels == "compiled" else "torch (not Octavo's own kernels: "
    monkeypatch.setattr(cli, "serve", lambda *_, **__: None)
    monkeypatch.setenv("OCTAVO_RUNTIME_DIR", str(tiny))
    options = ["--num-blocks", "8", "--dtype", "float32", "--health-address", "127.0.0.1:0"]
    result = CliRunner().invoke(cli.worker, ["--model", str(tiny), *options])
    assert result.exit_code == 0, result.output
    assert f"; kernels: {expected}" in result.stdout
