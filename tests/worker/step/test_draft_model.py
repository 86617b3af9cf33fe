"""A draft model's guesses change no bit of any answer, and its keys and values are wherever the model's are."""

import json
from pathlib import Path
from random import Random
from shutil import copytree
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import Gemma2Config, LlamaConfig, Qwen3Config

from octavo.runtime.models.grammar import load_vocabulary
from octavo.testbed.models import write_tiny_model
from octavo.testbed.tiny_model import VOCAB_SIZE, write_byte_model
from octavo.testing.depth import deep
from octavo.testing.oracles.drafted_runs import Asked, compare_proposed, random_requests
from octavo.testing.oracles.worker_plans import moves
from octavo.testing.small.constraints import DIGITS, WORDS, compiled
from octavo.wire.sampling import SamplingParams
from octavo.wire.steps import KVGroup
from octavo.worker.calibrate.calibrate import calibrate
from octavo.worker.loading.quantize_model import quantize_model
from octavo.worker.model_settings import ConfigError, ModelSettings
from octavo.worker.models.registry import quantizable
from octavo.worker.sequences import WorkerSequence, WorkItem
from octavo.worker.step import draft_model
from octavo.worker.step.draft_model import STEPS_AWAKE, DraftLayout, DraftModel, Hosted
from octavo.worker.step.model_runner import ModelRunner, ModelRunnerError

pytestmark = pytest.mark.usefixtures("compiled_kernels")
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES),
    "windows": Qwen3Config(
        **SIZES,
        use_sliding_window=True,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
    ),
    "only windows": Gemma2Config(**{**SIZES, "layer_types": ["sliding_attention"] * 4}, sliding_window=20),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The models; `short` is the first half of the layers of `llama`, `packed` a copy in 8 bits."""
    made = {name: tmp_path_factory.mktemp("models") / name for name in (*CONFIGS, "short", "packed")}
    for name, config in CONFIGS.items():
        write_byte_model(made[name], 256)
        write_tiny_model(made[name], config)
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


def make_runner(directory: Path, draft: Path, **options: Any) -> ModelRunner:
    usual: dict[str, Any] = {"num_blocks": 512, "threads": 1, "dtype": "float32"}
    return ModelRunner(directory, ModelSettings(**usual | options), draft_directory=draft)


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


@pytest.mark.parametrize("name", ["llama", "windows", *deep("only windows")])
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


class Steps:
    """Runs one sequence after the other on a runner, a step at a time, and writes down the tokens that its draft model
    computes in each forward pass."""

    def __init__(self, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runner = runner
        self.passes: list[int] = []
        forward = DraftModel._forward

        def counted(model: DraftModel, items: list[WorkItem], rows: list[int]) -> Any:
            self.passes.append(sum(item.num_tokens for item in items))
            return forward(model, items, rows)

        monkeypatch.setattr(DraftModel, "_forward", counted)

    def begin(self, sequence_id: int, prompt: list[int], blocks: list[int], num_computed: int = 0) -> WorkerSequence:
        params = SamplingParams(max_tokens=64, temperature=1.0, seed=5)
        return WorkerSequence(sequence_id, 0, params, len(prompt), list(prompt), num_computed, [blocks])

    def step(self, *asked: tuple[WorkerSequence, int]) -> list[list[int]]:
        """Computes what is left of sequences, and has so many guesses made of each; returns these."""
        items = [
            WorkItem(each, each.num_computed, len(each.token_ids) - each.num_computed, (each,), [], count)
            for each, count in asked
        ]
        self.passes.clear()
        output = self.runner.execute(moves(), items)
        for (sequence, _), sampled in zip(asked, output.sampled, strict=True):
            sequence.num_computed = len(sequence.token_ids)
            sequence.token_ids.append(sampled.token_id)
        return [each.token_ids for each in output.proposed]

    def check(self, sequence: WorkerSequence, guessed: list[int]) -> None:
        """The model itself has guessed: all comes true."""
        for guess in guessed:
            self.step((sequence, 0))
            assert sequence.token_ids[-1] == guess


PROMPT = list(range(3, 43))


@pytest.fixture
def steps(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Steps of a model that guesses itself."""
    return Steps(make_runner(models["llama"], models["llama"], num_cpu_blocks=8), monkeypatch)


class TestBlocks:
    @pytest.mark.parametrize("is_awake", [False, True])
    def test_move_for_both_models(self, steps: Steps, is_awake: bool) -> None:
        """Out, in to other places, and copied: then the draft model goes on as before, and knows what it has."""
        runner, sequence = steps.runner, steps.begin(1, PROMPT, [4, 5, 6, 7])
        steps.step((sequence, 1 if is_awake else 0))
        runner.execute(moves(swap_out=[(4, 0), (5, 1), (6, 2)]), [])
        runner.execute(moves(swap_in=[(0, 20), (1, 21), (2, 22)]), [])
        runner.execute(moves(copy=[(20, 30), (22, 31)]), [])
        sequence.block_tables = [[30, 21, 31, 40]]
        # The old ones are somebody else's by now.
        steps.step((steps.begin(2, [9] * 64, [4, 5, 20, 22]), 0))
        (guessed,) = steps.step((sequence, 5))
        assert steps.passes == [*([] if is_awake else [40]), 2, 1, 1, 1, 1]
        assert len(guessed) == 5
        steps.check(sequence, guessed)

    @pytest.mark.parametrize("is_awake", [False, True])
    def test_say_where_they_are_kept_how_far_they_are_followed(self, steps: Steps, is_awake: bool) -> None:
        """What is read from a disk, or another worker, and found there."""
        runner, first = steps.runner, steps.begin(1, PROMPT, [4, 5, 6, 7])
        steps.step((first, 1 if is_awake else 0))
        contents = [bytearray(b"".join(parts)) for parts in runner.read_blocks([4, 5]).blocks()]
        copied = runner.peek_blocks([4, 5], in_cpu=False)
        assert copied is not None
        assert [bytearray(each) for each in copied] == contents
        for cpu_block, content in enumerate(contents):
            runner.fill_cpu_block(cpu_block, content)
        runner.execute(moves(swap_in=[(0, 20), (1, 21)]), [])
        second = steps.begin(2, PROMPT, [20, 21, 22, 23], num_computed=32)
        (guessed,) = steps.step((second, 4))
        assert steps.passes == [*([] if is_awake else [32]), 9, 1, 1, 1]
        steps.check(second, guessed)


class TestSleep:
    def test_costs_nothing_until_a_guess_is_asked_for(self, steps: Steps) -> None:
        sequence = steps.begin(1, PROMPT, [4, 5, 6, 7, 8])
        steps.step((sequence, 0))
        assert steps.passes == []
        (guessed,) = steps.step((sequence, 3))
        # The prompt, the last two tokens, and two of the guesses.
        assert steps.passes == [40, 2, 1, 1]
        steps.check(sequence, guessed)

    def test_begins_again_after_some_steps_without_a_question(self, steps: Steps) -> None:
        sequence = steps.begin(1, PROMPT, [4, 5, 6, 7, 8])
        steps.step((sequence, 1))
        assert steps.passes == [41]
        for _ in range(STEPS_AWAKE):
            steps.step((sequence, 0))
            assert steps.passes == [1]
        for _ in range(3):
            steps.step((sequence, 0))
            assert steps.passes == []
        (guessed,) = steps.step((sequence, 2))
        assert steps.passes == [3, 2, 1]
        steps.check(sequence, guessed)

    def test_is_caught_up_with_by_those_alone_that_are_asked_about(self, steps: Steps) -> None:
        """And by what they share with others: that is there then."""
        first, other = steps.begin(1, PROMPT, [4, 5, 6, 7]), steps.begin(2, [9] * 40, [8, 9, 10, 11])
        steps.step((first, 0), (other, 0))
        steps.step((first, 1), (other, 0))
        assert steps.passes == [40, 2]
        third = steps.begin(3, [*PROMPT[:32], 7, 7, 7], [4, 5, 12], num_computed=32)
        (guessed,) = steps.step((third, 2), (other, 0))
        assert steps.passes == [4, 1]
        steps.check(third, guessed)

    def test_of_a_long_prompt_is_caught_up_with_in_pieces(self, steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(draft_model, "_MOST_CAUGHT_UP", 25)
        first, second = steps.begin(1, PROMPT, [4, 5, 6, 7]), steps.begin(2, [9] * 20, [8, 9, 10])
        steps.step((first, 0), (second, 0))
        guessed = steps.step((first, 2), (second, 2))
        assert steps.passes == [25, 25, 10, 4, 2]
        steps.check(first, guessed[0])
        steps.check(second, guessed[1])

    def test_is_none_where_windows_pass_what_was_missed(
        self, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        steps = Steps(make_runner(models["only windows"], models["llama"]), monkeypatch)
        steps.step((steps.begin(1, PROMPT, [4, 5, 6]), 0))
        assert steps.passes == [40]


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
