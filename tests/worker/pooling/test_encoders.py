"""Encoders give what transformers' models give, each text as if it were alone, by either implementation."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from octavo.kernels.native.library import find
from octavo.wire.pooling import PoolingModel, PoolingParams, PoolingTask
from octavo.wire.sampling import SamplingParams
from octavo.wire.steps import BlockMove, BlockMoves, FailureReason
from octavo.worker.model_settings import ModelSettings
from octavo.worker.models.config_file import ModelConfigError, UnsupportedSetting
from octavo.worker.models.encoders import compiled
from octavo.worker.models.encoders.families import is_encoder
from octavo.worker.pooling.runner import EncoderRunner
from octavo.worker.sequences import WorkerSequence, WorkItem

_SIZES = {"vocab_size": 300, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
_XLM = {**_SIZES, "num_hidden_layers": 2, "max_position_embeddings": 200, "type_vocab_size": 1, "pad_token_id": 1}
_MODERN = {
    **_SIZES,
    "num_hidden_layers": 4,
    "max_position_embeddings": 300,
    "local_attention": 32,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0),
}
_BERT = {**_SIZES, "num_hidden_layers": 2, "max_position_embeddings": 200}
# The class of each model, its configuration, and what differs from the usual.
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", _BERT),
    "xlm-roberta": ("XLMRoberta", _XLM),
    "roberta": ("Roberta", _XLM),
    "modernbert": ("ModernBert", _MODERN),
}


def make(directory: Path, family: str, head: str = "Model", **changes: Any) -> Any:
    """Writes a random model, and returns it as transformers has it."""
    torch.manual_seed(0)
    name, config = _MODELS[family]
    made = getattr(transformers, f"{name}{head}")(getattr(transformers, f"{name}Config")(**{**config, **changes}))
    for parameter in made.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 0.5, 0.3)
    made.eval().save_pretrained(directory)
    made.set_attn_implementation("eager")
    return made


def item(number: int, token_ids: list[int], task: PoolingTask = PoolingTask.EMBED, pair_start: int = 0) -> WorkItem:
    params = SamplingParams(max_tokens=1)
    pooling = PoolingParams(task, pair_start)
    sequence = WorkerSequence(number, 0, params, len(token_ids), token_ids, 0, [], pooling=pooling)
    return WorkItem(sequence, 0, len(token_ids), (sequence,))


def texts(longest: int = 190) -> list[list[int]]:
    chance = random.Random(1)
    return [[chance.randrange(3, 300) for _ in range(size)] for size in (1, 5, 16, 17, 64, 65, longest)]


def outputs(runner: EncoderRunner, items: list[WorkItem]) -> list[np.ndarray[Any, Any]]:
    done = runner.execute(BlockMoves(), items)
    assert not done.failed
    assert [each.sequence_id for each in done.pooled] == [each.sequence.sequence_id for each in items]
    return [np.frombuffer(each.values, "<f4") for each in done.pooled]


@pytest.fixture(params=["native", "torch"])
def runner_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., EncoderRunner]:
    """Makes runners by Octavo's own kernels, where they are compiled, and by torch."""
    if request.param == "torch":
        monkeypatch.setattr("octavo.worker.pooling.runner.compiled_encoder", lambda model: model)
    elif isinstance(find(), Exception):
        pytest.skip(str(find()))

    def made(directory: Path, **settings: Any) -> EncoderRunner:
        runner = EncoderRunner(directory, ModelSettings(threads=1, **settings))
        assert runner.kernels == request.param
        return runner

    return made


def states(model: Any, token_ids: list[int], pair_start: int = 0) -> Any:
    options = {}
    if pair_start and model.config.model_type == "bert":
        types = [0] * pair_start + [1] * (len(token_ids) - pair_start)
        options["token_type_ids"] = torch.tensor([types])
    with torch.inference_mode():
        return model(torch.tensor([token_ids]), attention_mask=torch.ones(1, len(token_ids)), **options)


@pytest.mark.parametrize("family", _MODELS)
def test_vectors_are_those_of_transformers_whatever_is_beside_a_text(
    tmp_path: Path, family: str, runner_of: Callable[..., EncoderRunner]
) -> None:
    model = make(tmp_path, family)
    assert is_encoder(tmp_path)
    runner = runner_of(tmp_path)
    assert runner.model.pooling == PoolingModel(PoolingTask.EMBED, 64)
    items = [item(i, each, pair_start=len(each) // 2) for i, each in enumerate(texts())]
    found = outputs(runner, items)
    for each, vector in zip(texts(), found, strict=True):
        expected = states(model, each, len(each) // 2).last_hidden_state[0].mean(0)
        np.testing.assert_allclose(vector, expected, atol=1e-5)
    for alone, vector in zip(items, found, strict=True):
        [by_itself] = outputs(runner, [alone])
        assert by_itself.tobytes() == vector.tobytes()
    backwards = outputs(runner, items[::-1])
    assert [each.tobytes() for each in backwards] == [each.tobytes() for each in found[::-1]]


@pytest.mark.parametrize("family", _MODELS)
@pytest.mark.parametrize("num_labels", [1, 3])
def test_scores_of_classes_are_those_of_transformers(
    tmp_path: Path, family: str, num_labels: int, runner_of: Callable[..., EncoderRunner]
) -> None:
    changes = {"classifier_pooling": "mean"} if family == "modernbert" and num_labels == 3 else {}
    model = make(tmp_path, family, "ForSequenceClassification", num_labels=num_labels, **changes)
    runner = runner_of(tmp_path)
    assert runner.model.pooling == PoolingModel(PoolingTask.CLASSIFY, num_labels)
    items = [item(i, each, PoolingTask.CLASSIFY, len(each) // 2) for i, each in enumerate(texts())]
    for each, scores in zip(texts(), outputs(runner, items), strict=True):
        np.testing.assert_allclose(scores, states(model, each, len(each) // 2).logits[0], atol=1e-5)


def test_bf16_is_near_fp32(tmp_path: Path, runner_of: Callable[..., EncoderRunner]) -> None:
    make(tmp_path, "bert")
    items = [item(i, each) for i, each in enumerate(texts())]
    exact = outputs(runner_of(tmp_path), items)
    coarse = outputs(runner_of(tmp_path, dtype="bfloat16"), items)
    for one, other in zip(exact, coarse, strict=True):
        np.testing.assert_allclose(one, other, atol=0.1)


def test_a_step_whose_rows_fill_a_cache_twice_changes_no_vector(tmp_path: Path) -> None:
    make(tmp_path, "bert", intermediate_size=8_192)
    runner = EncoderRunner(tmp_path, ModelSettings(threads=2))
    items = [item(number, [number % 290 + 5, *range(5, 50)]) for number in range(5)]
    alone = [outputs(runner, [each])[0] for each in items]
    for together, expected in zip(outputs(runner, items), alone, strict=True):
        np.testing.assert_allclose(together, expected, atol=1e-6)
        if runner.kernels == "native":
            np.testing.assert_array_equal(together, expected)


def write_sentence_files(directory: Path, pooling: dict[str, Any], *modules: str, **limits: Any) -> None:
    listed = [{"path": "", "type": "sentence_transformers.models.Transformer"}]
    listed += [
        {"path": f"{number}_{name}", "type": f"sentence_transformers.models.{name}"}
        for number, name in enumerate(("Pooling", *modules), 1)
    ]
    (directory / "modules.json").write_text(json.dumps(listed))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (directory / "sentence_bert_config.json").write_text(json.dumps(limits))


_POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "cls_token": lambda hidden: hidden[0],
    "max_tokens": lambda hidden: hidden.max(0).values,
    "mean_tokens": lambda hidden: hidden.mean(0),
    "mean_sqrt_len_tokens": lambda hidden: hidden.sum(0) / len(hidden) ** 0.5,
    "weightedmean_tokens": lambda hidden: torch.arange(1.0, len(hidden) + 1) @ hidden / sum(range(len(hidden) + 1)),
    "lasttoken": lambda hidden: hidden[-1],
}


@pytest.mark.parametrize("mode", _POOLS)
def test_pooling_is_what_the_models_own_files_say(tmp_path: Path, mode: str) -> None:
    model = make(tmp_path, "bert")
    write_sentence_files(tmp_path, {f"pooling_mode_{mode}": True}, "Normalize", max_seq_length=80)
    runner = EncoderRunner(tmp_path, ModelSettings(threads=1))
    assert runner.model.max_model_len == 80
    found = outputs(runner, [item(number, token_ids) for number, token_ids in enumerate(texts(80))])
    for token_ids, vector in zip(texts(80), found, strict=True):
        expected = _POOLS[mode](states(model, token_ids).last_hidden_state[0])
        np.testing.assert_allclose(vector, expected / expected.norm(), atol=1e-5)


def test_vectors_go_through_dense_layers(tmp_path: Path) -> None:
    model = make(tmp_path, "bert")
    write_sentence_files(tmp_path, {"pooling_mode": "mean"}, "Dense")
    directory = tmp_path / "2_Dense"
    directory.mkdir()
    sizes = {"in_features": 64, "out_features": 10, "bias": True}
    config = {**sizes, "activation_function": "torch.nn.modules.activation.Tanh"}
    (directory / "config.json").write_text(json.dumps(config))
    weight, bias = torch.randn(10, 64), torch.randn(10)
    save_file({"linear.weight": weight, "linear.bias": bias}, directory / "model.safetensors")
    runner = EncoderRunner(tmp_path, ModelSettings(threads=1))
    assert runner.model.pooling == PoolingModel(PoolingTask.EMBED, 10)
    items = [item(number, token_ids) for number, token_ids in enumerate(texts())]
    for alone, vector in zip(items, outputs(runner, items), strict=True):
        pooled = states(model, texts()[alone.sequence.sequence_id]).last_hidden_state[0].mean(0)
        np.testing.assert_allclose(vector, torch.tanh(weight @ pooled + bias), atol=1e-5)
        assert outputs(runner, [alone])[0].tobytes() == vector.tobytes()


@pytest.mark.parametrize(
    ("pooling", "modules", "reason"),
    [
        ({"pooling_mode_mean_tokens": True}, ["LayerNorm"], "LayerNorm"),
        ({"pooling_mode": "something"}, [], "something"),
        ({}, [], "pooling"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": False}, [], "include_prompt"),
    ],
)
def test_files_that_ask_for_something_else_are_refused(
    tmp_path: Path, pooling: dict[str, Any], modules: list[str], reason: str
) -> None:
    make(tmp_path, "bert")
    write_sentence_files(tmp_path, pooling, *modules)
    with pytest.raises(UnsupportedSetting, match=reason):
        EncoderRunner(tmp_path, ModelSettings(threads=1))


@pytest.mark.parametrize(
    "settings",
    [{"quantization": "q8_0"}, {"tp": 2}, {"kv_cache_dtype": "int8"}, {"max_model_len": 100_000}],
)
def test_settings_that_mean_nothing_for_an_encoder_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    make(tmp_path, "bert")
    with pytest.raises(ModelConfigError):
        EncoderRunner(tmp_path, ModelSettings(**settings))


def test_a_text_whose_output_is_not_finite_fails_alone(tmp_path: Path, runner_of: Callable[..., EncoderRunner]) -> None:
    model = make(tmp_path, "bert")
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[7] = float("nan")
    model.save_pretrained(tmp_path)
    done = runner_of(tmp_path).execute(BlockMoves(), [item(0, [3, 4]), item(1, [3, 7]), item(2, [5])])
    assert [each.sequence_id for each in done.pooled] == [0, 2]
    assert [(each.sequence_id, each.reason) for each in done.failed] == [(1, FailureReason.NOT_FINITE)]


def test_plans_that_are_for_a_decoder_fail(tmp_path: Path) -> None:
    make(tmp_path, "bert")
    runner = EncoderRunner(tmp_path, ModelSettings(threads=1))
    whole = item(0, [3, 4, 5])
    with pytest.raises(ValueError, match="whole"):
        runner.execute(BlockMoves(), [WorkItem(whole.sequence, 0, 2, ())])
    with pytest.raises(ValueError, match="keys"):
        runner.execute(BlockMoves(copy=[BlockMove(0, 1)]), [whole])


def test_the_kernels_serve_every_family(tmp_path: Path) -> None:
    """So the tests above are of two implementations."""
    if isinstance(find(), Exception):
        pytest.skip(str(find()))
    make(tmp_path, "modernbert")
    runner = EncoderRunner(tmp_path, ModelSettings(threads=1))
    assert isinstance(runner._encoder, compiled.CompiledEncoder)
