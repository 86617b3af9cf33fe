"""Decoders give vectors and scores as sentence-transformers and transformers have them, however texts are cut."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from octavo.testing.depth import deep, deep_unless
from octavo.wire.pooling import PoolingModel, PoolingParams, PoolingTask
from octavo.wire.sampling import SamplingParams
from octavo.wire.steps import BlockMoves, FailureReason
from octavo.worker.make_runner import describe
from octavo.worker.model_settings import ModelSettings
from octavo.worker.models.compiled import CompiledLlama
from octavo.worker.models.config_file import ModelConfigError, UnsupportedSetting
from octavo.worker.pooling.decoders import decoder_pooling
from octavo.worker.pooling.gathering import GatheredText
from octavo.worker.pooling.heads import _POOLS
from octavo.worker.sequences import WorkerSequence, WorkItem
from octavo.worker.step.model_runner import ModelRunner

Vector = np.ndarray[Any, Any]
_SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
}
# As E5-Mistral, Qwen3-Embedding and gte-Qwen2's base, Gemma's and Llama's are.
_FAMILIES = ("Mistral", "Qwen3", "Qwen2", "Gemma2", "Llama")
_BLOCK = 16


def make(directory: Path, family: str, head: str = "Model", **changes: Any) -> Any:
    """Writes a random model, and returns it as transformers has it."""
    torch.manual_seed(0)
    made = getattr(transformers, f"{family}{head}")(getattr(transformers, f"{family}Config")(**_SIZES, **changes))
    for parameter in made.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 0.5, 0.3)
    made.eval().save_pretrained(directory)
    made.set_attn_implementation("eager")
    return made


def write_sentence_files(directory: Path, mode: str, *modules: str, **limits: Any) -> None:
    named = [("", "Transformer"), ("1_Pooling", "Pooling"), *((f"2_{each}", each) for each in modules)]
    listed = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in named]
    (directory / "modules.json").write_text(json.dumps(listed))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))
    if limits:
        (directory / "sentence_bert_config.json").write_text(json.dumps(limits))


def runner_of(directory: Path, **settings: Any) -> ModelRunner:
    return ModelRunner(directory, ModelSettings(threads=1, num_blocks=64, num_cpu_blocks=0, **settings))


def texts(*sizes: int) -> list[list[int]]:
    chance = random.Random(1)
    return [[chance.randrange(3, 300) for _ in range(size)] for size in sizes or (1, 5, 16, 17, 64, 65, 190)]


def sequences(token_ids: list[list[int]], task: PoolingTask = PoolingTask.EMBED) -> list[WorkerSequence]:
    """Returns a sequence of each text, with blocks of its own."""
    first_block, made = 0, []
    for number, each in enumerate(token_ids, 1):
        count = -(-len(each) // _BLOCK)
        table = list(range(first_block, first_block := first_block + count))
        params = SamplingParams(max_tokens=1)
        made.append(WorkerSequence(number, 0, params, len(each), each, 0, [table], pooling=PoolingParams(task)))
    return made


def item(sequence: WorkerSequence, start: int, end: int) -> WorkItem:
    choosers = (sequence,) if end == len(sequence.token_ids) else ()
    return WorkItem(sequence, start, end - start, choosers)


def outputs(runner: ModelRunner, *steps: list[WorkItem]) -> dict[int, Vector]:
    """Returns the outputs by sequence."""
    found: dict[int, Vector] = {}
    for items in steps:
        done = runner.execute(BlockMoves(), items)
        assert (done.failed, done.sampled) == ([], [])
        found |= {each.sequence_id: np.frombuffer(each.values, "<f4") for each in done.pooled}
    return found


def whole(runner: ModelRunner, token_ids: list[list[int]], task: PoolingTask = PoolingTask.EMBED) -> list[Vector]:
    """Returns the output of each text, all of them in one step."""
    made = sequences(token_ids, task)
    found = outputs(runner, [item(each, 0, len(each.token_ids)) for each in made])
    runner.forget(list(found))
    return [found[each.sequence_id] for each in made]


def cut(made: list[WorkerSequence], chance: random.Random) -> Iterator[list[WorkItem]]:
    """Yields steps in which texts go on by any number of tokens, until all are done."""
    done = dict.fromkeys((each.sequence_id for each in made), 0)
    while left := [each for each in made if done[each.sequence_id] < len(each.token_ids)]:
        items = []
        for each in chance.sample(left, chance.randint(1, len(left))):
            start = done[each.sequence_id]
            end = min(len(each.token_ids), start + chance.choice([1, 3, 16, 50]))
            items.append(item(each, start, end))
            done[each.sequence_id] = end
        yield items


def states(model: Any, token_ids: list[int]) -> Any:
    with torch.inference_mode():
        return model(torch.tensor([token_ids]), attention_mask=torch.ones(1, len(token_ids)))


@pytest.mark.parametrize("family", deep_unless({"Mistral", "Qwen3"}.__contains__, _FAMILIES))
@pytest.mark.parametrize("mode", ["lasttoken", "mean_tokens"])
def test_vectors_are_those_of_transformers_alone_in_batches_and_in_chunks(
    tmp_path: Path, family: str, mode: str
) -> None:
    model = make(tmp_path, family)
    write_sentence_files(tmp_path, mode)
    runner = runner_of(tmp_path)
    assert runner.model.pooling == PoolingModel(PoolingTask.EMBED, 64, gathers=mode != "lasttoken")
    assert (runner.model.dtype, "64 numbers for each text" in describe(runner)) == ("float32", True)
    found = whole(runner, texts())
    for each, vector in zip(texts(), found, strict=True):
        hidden = states(model, each).last_hidden_state[0]
        np.testing.assert_allclose(vector, hidden[-1] if mode == "lasttoken" else hidden.mean(0), atol=1e-4)
    if not isinstance(runner.decoder, CompiledLlama):
        # Torch's linear layers promise no bits.
        return
    for each, vector in zip(texts(), found, strict=True):
        assert whole(runner, [each])[0].tobytes() == vector.tobytes()
    for seed in range(3):
        made = sequences(texts())
        in_chunks = outputs(runner, *cut(made, random.Random(seed)))
        runner.forget([each.sequence_id for each in made])
        assert [in_chunks[each.sequence_id].tobytes() for each in made] == [each.tobytes() for each in found]


@pytest.mark.parametrize("mode", _POOLS)
def test_every_pooling_gives_the_same_bits_however_a_text_is_cut(mode: str) -> None:
    hidden = torch.randn(333, 48, generator=torch.Generator().manual_seed(3))
    chance, expected = random.Random(4), _POOLS[mode](hidden)
    found = set()
    for _ in range(5):
        text, start = GatheredText([mode]), 0
        while start < len(hidden):
            end = min(len(hidden), start + chance.randint(1, 150))
            text.add(hidden[start:end], start)
            start = end
        [part] = text.parts()
        torch.testing.assert_close(part, expected, atol=1e-5, rtol=1e-5)
        found.add(part.numpy().tobytes())
    assert len(found) == 1


def test_an_option_names_the_pooling_of_a_model_without_files(tmp_path: Path) -> None:
    model = make(tmp_path, "Qwen2", "ForCausalLM")
    assert runner_of(tmp_path).model.pooling is None
    [token_ids] = texts(40)
    hidden = states(model.model, token_ids).last_hidden_state[0]
    for pooling, expected in (("last", hidden[-1]), ("mean", hidden.mean(0)), ("cls", hidden[0])):
        [vector] = whole(runner_of(tmp_path, pooling=pooling), [token_ids])
        np.testing.assert_allclose(vector, expected, atol=1e-4)


def test_the_option_wins_over_the_files_and_their_norm_stays(tmp_path: Path) -> None:
    model = make(tmp_path, "Qwen3")
    write_sentence_files(tmp_path, "lasttoken", "Normalize", max_seq_length=100)
    runner = runner_of(tmp_path, pooling="mean")
    assert runner.model.max_model_len == 100
    [token_ids] = texts(40)
    mean = states(model, token_ids).last_hidden_state[0].mean(0)
    np.testing.assert_allclose(whole(runner, [token_ids])[0], mean / mean.norm(), atol=1e-4)
    assert decoder_pooling(tmp_path, "none") is None


def test_weights_are_found_with_and_without_the_prefix_and_a_head_is_left_out(tmp_path: Path) -> None:
    model = make(tmp_path, "Mistral", "ForCausalLM")
    path = tmp_path / "model.safetensors"
    [token_ids] = texts(30)
    [with_prefix] = whole(runner_of(tmp_path, pooling="last"), [token_ids])
    stored = {name.removeprefix("model."): tensor for name, tensor in load_file(path).items() if "lm_head" not in name}
    save_file(stored, path)
    [without] = whole(runner_of(tmp_path, pooling="last"), [token_ids])
    assert with_prefix.tobytes() == without.tobytes()
    np.testing.assert_allclose(without, states(model.model, token_ids).last_hidden_state[0, -1], atol=1e-4)


@pytest.mark.parametrize("family", ["Qwen3", *deep("Llama")])
@pytest.mark.parametrize("num_labels", [1, 3])
def test_scores_of_classes_are_those_of_transformers(tmp_path: Path, family: str, num_labels: int) -> None:
    model = make(tmp_path, family, "ForSequenceClassification", num_labels=num_labels)
    runner = runner_of(tmp_path)
    assert runner.model.pooling == PoolingModel(PoolingTask.CLASSIFY, num_labels)
    found = whole(runner, texts(), PoolingTask.CLASSIFY)
    for each, scores in zip(texts(), found, strict=True):
        np.testing.assert_allclose(scores, states(model, each).logits[0], atol=1e-4)


def test_the_last_state_is_the_same_after_tokens_that_others_have_computed(tmp_path: Path) -> None:
    make(tmp_path, "Qwen3")
    runner = runner_of(tmp_path, pooling="last")
    [token_ids] = texts(80)
    [expected] = whole(runner, [token_ids])
    [found] = outputs(runner, [item(sequences([token_ids])[0], 48, 80)]).values()
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_mean_that_begins_after_tokens_computed_elsewhere_fails_the_step(tmp_path: Path) -> None:
    make(tmp_path, "Qwen3")
    runner = runner_of(tmp_path, pooling="mean")
    [sequence] = sequences(texts(80))
    with pytest.raises(ValueError, match="goes on at token 48, and 0 were computed here"):
        outputs(runner, [item(sequence, 48, 80)])
    outputs(runner, [item(sequence, 0, 48)])
    runner.forget([sequence.sequence_id])
    with pytest.raises(ValueError, match="takes all"):
        outputs(runner, [item(sequence, 48, 80)])


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_text_whose_states_are_not_finite_fails_alone(tmp_path: Path, pooling: str) -> None:
    make(tmp_path, "Llama")
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    stored["embed_tokens.weight"][7] = float("nan")
    save_file(stored, path)
    runner = runner_of(tmp_path, pooling=pooling)
    broken, sound = sequences([[9, 7, 8], [9, 10, 8]])
    done = runner.execute(BlockMoves(), [item(broken, 0, 3), item(sound, 0, 3)])
    assert [(each.sequence_id, each.reason) for each in done.failed] == [(1, FailureReason.NOT_FINITE)]
    assert [each.sequence_id for each in done.pooled] == [2]
    done = runner.execute(BlockMoves(), [item(broken, 0, 2), item(sound, 0, 2)])
    assert [each.sequence_id for each in done.failed] == [1]


def test_quantised_weights_are_near(tmp_path: Path) -> None:
    make(tmp_path, "Qwen3")
    exact = whole(runner_of(tmp_path, pooling="mean"), texts())
    try:
        runner = runner_of(tmp_path, pooling="mean", quantization="q8_0")
    except ModelConfigError as error:
        pytest.skip(str(error))
    for one, other in zip(exact, whole(runner, texts()), strict=True):
        assert np.dot(one, other) / np.linalg.norm(one) / np.linalg.norm(other) > 0.999


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"tp": 2}, "--tp 2 is not for that"),
        ({"model_impl": "transformers"}, "--model-impl transformers out"),
        ({"draft_model": "elsewhere"}, "--draft-model elsewhere"),
    ],
)
def test_settings_that_mean_nothing_there_are_refused(tmp_path: Path, settings: dict[str, Any], told: str) -> None:
    make(tmp_path, "Qwen3")
    with pytest.raises(ModelConfigError, match=told):
        runner_of(tmp_path, pooling="last", **settings)


def test_attention_to_both_sides_is_refused_where_files_tell_of_it(tmp_path: Path) -> None:
    make(tmp_path, "Qwen2")
    write_sentence_files(tmp_path, "lasttoken")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "is_causal": False}))
    with pytest.raises(UnsupportedSetting, match="is_causal = false"):
        runner_of(tmp_path)
    path.write_text(json.dumps({**config, "auto_map": {"AutoModel": "modeling_qwen.Qwen2Model"}}))
    with pytest.raises(UnsupportedSetting, match=r"code of its own.*--pooling last"):
        runner_of(tmp_path)
    assert runner_of(tmp_path, pooling="last").model.pooling is not None
