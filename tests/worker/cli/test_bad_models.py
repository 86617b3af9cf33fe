"""A model that is not right is refused before the worker is ready: with one line and a status that nobody retries."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file

from octavo.testbed.tiny_model import VOCAB_SIZE, write_byte_model
from octavo.testing.native import threads
from octavo.worker import make_runner
from octavo.worker.cli import worker as cli
from octavo.worker.runner import Runner

LAYER = {
    "input_layernorm.weight": (32,),
    "self_attn.q_proj.weight": (32, 32),
    "self_attn.k_proj.weight": (16, 32),
    "self_attn.v_proj.weight": (16, 32),
    "self_attn.o_proj.weight": (32, 32),
    "post_attention_layernorm.weight": (32,),
    "mlp.gate_proj.weight": (64, 32),
    "mlp.up_proj.weight": (64, 32),
    "mlp.down_proj.weight": (32, 64),
}
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (VOCAB_SIZE, 32),
    "model.norm.weight": (32,),
    **{f"model.layers.{layer}.{name}": shape for layer in range(2) for name, shape in LAYER.items()},
}
# Keys and values of a token in two layers of two heads of eight numbers, in bfloat16.
BYTES_PER_TOKEN = 2 * 2 * 2 * 8 * 2
DOWN = "model.layers.1.mlp.down_proj.weight"


def write_weights(directory: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, directory / "model.safetensors")


def without_weights(directory: Path) -> Path:
    """Where the weights were."""
    (directory / "model.safetensors").unlink()
    return directory / "model.safetensors"


def write_shards(directory: Path, twice: set[str]) -> None:
    """All in a first file, and some again in a second, of which the index says that they are there."""
    (directory / "model.safetensors").unlink()
    save_file({name: torch.zeros(shape) for name, shape in SHAPES.items()}, directory / "model-1.safetensors")
    save_file({name: torch.ones(SHAPES[name]) for name in twice}, directory / "model-2.safetensors")
    places = {name: f"model-{2 if name in twice else 1}.safetensors" for name in SHAPES}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="octavo-") as name:
        for variable in [key for key in os.environ if key.startswith("OCTAVO_")]:
            monkeypatch.delenv(variable)
        monkeypatch.setenv("OCTAVO_RUNTIME_DIR", name)
        write_byte_model(Path(name) / "model")
        write_weights(Path(name) / "model", SHAPES)
        yield Path(name) / "model"


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> list[Runner]:
    """The runners that would have been served."""
    runners: list[Runner] = []
    monkeypatch.setattr(cli, "serve", lambda runner, **_: runners.append(runner))
    return runners


def start(model: Path, *arguments: str) -> Result:
    """With room for one context unless `arguments` say otherwise: to touch the default share takes seconds."""
    room = ["--kv-cache-memory", str(2048 * BYTES_PER_TOKEN)]
    return CliRunner().invoke(cli.worker, ["--model", str(model), *room, *arguments])


def refusal(model: Path, *arguments: str) -> str:
    result = start(model, *arguments)
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def edit_config(model: Path, **changes: object) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | changes))


def test_the_model_itself_is_right(model: Path, served: list[Runner]) -> None:
    result = start(model)
    assert result.exit_code == 0, result.stderr
    assert len(served) == 1


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda m: (m / "config.json").unlink(), "no model directory at"),
    "broken config": (lambda m: (m / "config.json").write_text('{"vocab_size": 258,'), "config.json"),
    "no object": (lambda m: (m / "config.json").write_text("[1, 2]"), "config.json"),
    "a word for a number": (lambda m: edit_config(m, hidden_size="wide"), "config.json"),
    "no architecture": (lambda m: edit_config(m, architectures=["NoSuchForCausalLM"]), "NoSuchForCausalLM"),
    "no weights": (lambda m: (m / "model.safetensors").unlink(), "is the download complete?"),
    "broken weights": (lambda m: (m / "model.safetensors").write_bytes(b"\0" * 64), "no readable safetensors file"),
    "wrong shape": (
        lambda m: write_weights(m, SHAPES | {DOWN: (32, 63)}),
        f"tensor '{DOWN}' in {{model}} is [32, 63]; config.json makes it [32, 64]",
    ),
    "missing tensor": (
        lambda m: write_weights(m, {name: shape for name, shape in SHAPES.items() if name != DOWN}),
        f"{{model}} has no tensor '{DOWN}'",
    ),
    "more layers than any": (
        lambda m: edit_config(m, num_hidden_layers=10**9),
        "num_hidden_layers = 1000000000 is more than the 2048 layers that a model may have; correct it",
    ),
    "more layers in a part": (
        lambda m: edit_config(m, architectures=["NoSuchForCausalLM"], text_config={"num_hidden_layers": 1e9}),
        "num_hidden_layers = 1000000000.0 is more than the 2048 layers",
    ),
    "more positions than can be counted": (lambda m: edit_config(m, max_position_embeddings=10**12), "<= 2147483647"),
    "a vocabulary that cannot be counted": (lambda m: edit_config(m, vocab_size=10**12), "<= 2147483647"),
    "more layers than there are weights of": (
        lambda m: edit_config(m, num_hidden_layers=2048),
        "has no tensor 'model.",
    ),
    "an activation that nobody knows": (
        lambda m: edit_config(m, hidden_act="swoosh"),
        "hidden_act = 'swoosh' is what it does not know; correct config.json, or see which version of transformers it",
    ),
    "a rotary embedding that nobody knows": (
        lambda m: edit_config(m, rope_parameters={"rope_type": "spiral", "rope_theta": 1e4, "factor": 2.0}),
        "rope_type = 'spiral' is what it does not know",
    ),
    "an older way to say it": (
        lambda m: edit_config(m, rope_scaling={"type": "spiral", "factor": 2.0}),
        "'spiral'",
    ),
    "a pipe for weights": (
        lambda m: os.mkfifo(without_weights(m)),
        "{model}/model.safetensors is no file but a pipe, a socket or a device, which could be read for ever",
    ),
    "a pipe beside them": (lambda m: os.mkfifo(m / "tokenizer.model"), "tokenizer.model is no file but a pipe"),
    "a device for weights": (
        lambda m: without_weights(m).symlink_to("/dev/zero"),
        "model.safetensors is no file but a pipe, a socket or a device",
    ),
    "a directory for weights": (
        lambda m: without_weights(m).mkdir(),
        "holds neither model.safetensors nor",
    ),
    "a tensor in two files": (
        lambda m: write_shards(m, {DOWN}),
        f"tensor '{DOWN}' is in model-1.safetensors and in model-2.safetensors of {{model}}, and nothing says which",
    ),
    "extra tensor": (
        lambda m: write_weights(m, SHAPES | {"model.layers.2.mlp.down_proj.weight": (32, 64)}),
        "1 tensors that its config.json has no place for: model.layers.2.mlp.down_proj.weight",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_model_is_refused(model: Path, served: list[Runner], name: str) -> None:
    spoil, why = WRONG[name]
    spoil(model)
    assert why.format(model=model) in refusal(model)
    assert served == []


@pytest.mark.parametrize(
    "name", [name for name in WRONG if name.startswith(("more layers than any", "an act", "a rot"))]
)
def test_transformers_refuses_it_alike(model: Path, name: str) -> None:
    spoil, why = WRONG[name]
    spoil(model)
    assert why in refusal(model, "--model-impl", "transformers")


def test_pickled_weights_are_refused_with_the_command_that_converts(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert f"run `octavo convert-weights {model} --output {model}-safetensors`" in refusal(model)


def test_threads_are_no_more_than_a_quota_lets_run(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with threads(2):
        monkeypatch.setattr(make_runner, "available_cores", lambda: 1)
        assert start(model).exit_code == 0
        assert torch.get_num_threads() == 1


def test_random_weights_need_no_file(model: Path, served: list[Runner]) -> None:
    (model / "model.safetensors").unlink()
    result = start(model, "--load-format", "dummy")
    assert result.exit_code == 0, result.stderr
    assert len(served) == 1


def test_a_cache_too_small_for_a_block_names_the_least(model: Path) -> None:
    why = refusal(model, "--kv-cache-memory", str(16 * BYTES_PER_TOKEN - 1))
    assert f"give at least {16 * BYTES_PER_TOKEN} with --kv-cache-memory" in why


def test_a_cache_too_small_for_one_context_names_both_remedies(model: Path, served: list[Runner]) -> None:
    memory = ["--kv-cache-memory", str(1000 * BYTES_PER_TOKEN)]
    why = refusal(model, *memory)
    assert "holds 992 tokens of a sequence and the context has 2048" in why
    assert f"give --kv-cache-memory {2048 * BYTES_PER_TOKEN}, or shorten the context with --max-model-len 992" in why
    assert served == []
    for remedy in (["--max-model-len", "992", *memory], ["--kv-cache-memory", str(2048 * BYTES_PER_TOKEN)]):
        assert start(model, *remedy).exit_code == 0
    assert len(served) == 2
