"""A draft model's guesses change no bit of any answer, and what cannot guess is refused."""

import json
from pathlib import Path
from random import Random
from shutil import copytree
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from octavo.runtime.models.grammar import load_vocabulary
from octavo.testbed.models import write_tiny_model
from octavo.testbed.tiny_model import VOCAB_SIZE
from octavo.testing.depth import deep
from octavo.testing.oracles.drafted_runs import Asked, compare_proposed, random_requests
from octavo.testing.small.constraints import DIGITS, WORDS, compiled
from octavo.testing.small.draft_models import CONFIGS, SIZES, make_runner, write_model
from octavo.wire.steps import KVGroup
from octavo.worker.calibrate.calibrate import calibrate
from octavo.worker.loading.quantize_model import quantize_model
from octavo.worker.model_settings import ConfigError, ModelSettings
from octavo.worker.models.registry import quantizable
from octavo.worker.step import draft_model
from octavo.worker.step.draft_model import STEPS_AWAKE, DraftLayout, Hosted
from octavo.worker.step.model_runner import ModelRunner, ModelRunnerError

pytestmark = pytest.mark.usefixtures("compiled_kernels")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The models; `short` is the first half of the layers of `llama`, `packed` a copy in 8 bits."""
    made = {name: tmp_path_factory.mktemp("models") / name for name in (*CONFIGS, "short", "packed")}
    for name in CONFIGS:
        write_model(made[name], name)
    shorten(made["llama"], made["short"], 2)
    linears, ends = quantizable(made["llama"])
    quantize_model(made["llama"], made["packed"], "q8_0", linears, ends)
    return made


def shorten(source: Path, target: Path, num_layers: int) -> None:
    """Writes a model of the first layers of another."""
    copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if _layer(name) < num_layers}
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    change_config(target, num_hidden_layers=num_layers)


def _layer(name: str) -> int:
    parts = name.split(".")
    return int(parts[2]) if parts[1:2] == ["layers"] else -1


def change_config(directory: Path, **changes: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))


def requests(models: dict[str, Path], seed: int, count: int) -> list[Asked]:
    vocabulary = load_vocabulary(models["llama"])
    texts = [compiled(each, vocabulary) for each in (DIGITS, WORDS)]
    return random_requests(Random(seed), count, VOCAB_SIZE, longest_prompt=70, most_tokens=24, grammars=texts)


@pytest.mark.parametrize(
    ("name", "draft", "options"),
    [
        ("llama", "short", {}),
        ("llama", "packed", {"dtype": "bfloat16"}),
        pytest.param("llama", "short", {"dtype": "bfloat16"}, marks=pytest.mark.deep),
        pytest.param("llama", "packed", {"dtype": "auto", "quantization": "q4_0"}, marks=pytest.mark.deep),
        pytest.param("llama", "windows", {"numerics": "exact"}, marks=pytest.mark.deep),
        pytest.param("windows", "llama", {"dtype": "bfloat16", "kv_cache_dtype": "int8"}, marks=pytest.mark.deep),
        pytest.param("only windows", "llama", {}, marks=pytest.mark.deep),
    ],
)
@pytest.mark.parametrize("seed", [0, *deep(*range(1, 6))])
def test_guesses_of_any_quality_change_no_bit(
    models: dict[str, Path], name: str, draft: str, options: dict[str, Any], seed: int
) -> None:
    runner = make_runner(models[name], models[draft], **options)
    drafted = compare_proposed(runner, requests(models, seed, 10), seed)
    assert drafted.num_drafted > drafted.num_accepted


@pytest.mark.parametrize("name", ["llama", "windows"])
@pytest.mark.parametrize("dtype", ["float32", *deep("bfloat16")])
@pytest.mark.parametrize("steps_awake", [0, *deep(1, STEPS_AWAKE)])
def test_a_model_guesses_itself_without_fail(
    models: dict[str, Path], name: str, dtype: str, steps_awake: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedily and drawn, with penalties and grammars, after chunks, forks and restarts, and whatever it has slept
    through: so all its keys and values are there. Only behind the end of an answer nothing is right."""
    monkeypatch.setattr(draft_model, "STEPS_AWAKE", steps_awake)
    runner = make_runner(models[name], models[name], dtype=dtype)
    asked = [each for each in requests(models, 3, 24) if not each.params.stop_token_ids]
    drafted = compare_proposed(runner, asked, 3)
    assert drafted.num_accepted > 100
    assert drafted.num_wrong == 0


@pytest.mark.parametrize("dtype", ["float32", *deep("bfloat16")])
@pytest.mark.parametrize("is_awake", [False, *deep(True)])
def test_a_model_of_windows_alone_guesses_itself_but_for_what_it_has_slept_through(
    models: dict[str, Path], dtype: str, is_awake: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_model, "STEPS_AWAKE", 0)
    runner = make_runner(models["only windows"], models["only windows"], dtype=dtype)
    if is_awake:
        monkeypatch.setattr(draft_model, "STEPS_AWAKE", 10**6)
    asked = [each for each in requests(models, 3, 24) if not each.params.stop_token_ids]
    drafted = compare_proposed(runner, asked, 3)
    assert drafted.num_accepted > 100
    # What windows have passed by then it guesses without.
    assert drafted.num_wrong == 0 or not is_awake


def test_the_worker_tells_what_guesses_cost(models: dict[str, Path]) -> None:
    with_one, without = make_runner(models["llama"], models["short"]), ModelRunner(models["llama"], ModelSettings())
    assert with_one.draft_model == "short"
    assert [cost.rows for cost in calibrate(with_one).proposals] == [1, 4, 16]
    assert min(cost.seconds for cost in calibrate(with_one).proposals) > 0
    assert calibrate(without).proposals == []
    # Two layers beside four, of the same sizes.
    assert with_one.kv_bytes_per_token == 2 * (without.kv_bytes_per_token * 3 // 2)


class TestLayout:
    def test_deals_layers_out_among_the_groups_that_see_furthest(self) -> None:
        config: Any = LlamaConfig(**SIZES)
        config.windows, config.num_kv_heads = (0, 7, 0), 2
        placed = DraftLayout.of(config, [KVGroup(9), KVGroup(0), KVGroup(0)], 16, None)  # type: ignore[arg-type]
        assert placed.hosted == [Hosted(1, 0), Hosted(2, 7), Hosted(1, 0)]
        assert [group.layers for group in placed.layout.groups] == [(0, 2), (1,)]

    def test_lets_no_layer_see_what_its_group_gives_back(self) -> None:
        config: Any = LlamaConfig(**SIZES)
        config.windows, config.num_kv_heads = (0, 7, 30), 2
        placed = DraftLayout.of(config, [KVGroup(9), KVGroup(20)], 16, None)  # type: ignore[arg-type]
        assert placed.hosted == [Hosted(1, 20), Hosted(1, 7), Hosted(1, 20)]


class TestRefusals:
    def test_name_another_vocabulary(self, models: dict[str, Path], tmp_path: Path) -> None:
        other = copytree(models["short"], tmp_path / "other")
        tokenizer = json.loads((other / "tokenizer.json").read_text())
        first, second, *_ = vocabulary = tokenizer["model"]["vocab"]
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
        (other / "tokenizer.json").write_text(json.dumps(tokenizer))
        with pytest.raises(
            ModelRunnerError, match=r"tokenizers differ in 4 tokens of 258 and 258; give a smaller model"
        ):
            make_runner(models["llama"], other)
        (other / "tokenizer.json").unlink()
        with pytest.raises(ModelRunnerError, match=r"has no tokenizer\.json that can be read"):
            make_runner(models["llama"], other)

    def test_name_another_number_of_tokens(self, models: dict[str, Path], tmp_path: Path) -> None:
        other = copytree(models["llama"], tmp_path / "other")
        write_tiny_model(other, LlamaConfig(**{**SIZES, "vocab_size": VOCAB_SIZE + 6}))
        with pytest.raises(ModelRunnerError, match=r"a vocabulary of 264 tokens, and the model one of 258"):
            make_runner(models["llama"], other)

    def test_name_a_shorter_context(self, models: dict[str, Path], tmp_path: Path) -> None:
        other = copytree(models["short"], tmp_path / "other")
        change_config(other, max_position_embeddings=128)
        with pytest.raises(ModelRunnerError, match=r"a context of 256 tokens is asked for; the model has 1 to 128"):
            make_runner(models["llama"], other)
        assert make_runner(models["llama"], other, max_model_len=128).draft_model == "other"

    def test_name_kernels_that_are_missing(self, models: dict[str, Path]) -> None:
        with pytest.raises(ModelRunnerError, match="drafts are checked by Octavo's own kernels alone: "):
            make_runner(models["llama"], models["short"], block_size=8)

    @pytest.mark.parametrize(("options", "why"), [({"device": "cuda"}, "on a GPU"), ({"tp": 2}, "not shared by ranks")])
    def test_name_devices_that_cannot(self, options: dict[str, Any], why: str) -> None:
        with pytest.raises(ConfigError, match=why):
            ModelSettings(draft_model="draft", **options)
