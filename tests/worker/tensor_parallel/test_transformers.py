"""Models that transformers computes, shared by ranks: the logits and the tokens of transformers itself."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.testbed.models import transformers_greedy
from octavo.testing.depth import deep, every
from octavo.testing.shard_threads import RankRunner, ThreadGroup, run_ranks
from octavo.testing.small.architecture_trial import write_random_model
from octavo.testing.small.tiny_configs import causal_class, tiny_config
from octavo.worker.loading.tensor_file import TensorPart
from octavo.worker.loading.weights import Checkpoint, WeightsError
from octavo.worker.models.config_file import ModelConfigError
from octavo.worker.models.transformers import model as transformers_model
from octavo.worker.models.transformers.check import UnsupportedModel

PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6], list(range(100, 145))]
TOLERANCE = 1e-4
# Fused queries, keys and values, in both orders; LM heads with a bias, tied, with a scale or a cap behind them; scaled
# embeddings; sliding windows; experts, stored one by one or together; names that checkpoints have from before.
OTHERS = [
    "cohere",
    "gemma2",
    "gpt_neox",
    "granitemoe",
    "mixtral",
    "nemotron",
    "persimmon",
    "phi",
    "qwen2_moe",
    "starcoder2",
]


@pytest.fixture(autouse=True)
def loads_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """While transformers makes a model it changes things that are global to the process, which ranks here share."""
    turn = threading.RLock()

    def in_turn(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with turn:
                return function(*args)

        return call

    for name in ("load", "empty_model"):
        monkeypatch.setattr(transformers_model, name, in_turn(getattr(transformers_model, name)))


def write_tiny(directory: Path, model_type: str, **changes: Any) -> Any:
    architecture = causal_class(model_type)
    config = tiny_config(model_type, architecture.config_class)
    for key, value in changes.items():
        setattr(config, key, value)
    return write_random_model(directory, config, architecture)


def rank_of(directory: Path, group: ThreadGroup, **options: Any) -> RankRunner:
    return RankRunner(directory, group, model_impl="transformers", **options)


def on_ranks(directory: Path, size: int, **options: Any) -> list[tuple[Tensor, list[list[int]]]]:
    """The logits after `PROMPTS`, then ten greedy ids of each, as each rank has them."""

    def work(group: ThreadGroup) -> tuple[Tensor, list[list[int]]]:
        runner = rank_of(directory, group, **options)
        return runner.prompt_logits(PROMPTS), runner.generate(PROMPTS, 10)

    return run_ranks(size, work)


@torch.inference_mode()
def expected_logits(model: Any) -> Tensor:
    return torch.stack([model(torch.tensor([prompt])).logits[0, -1] for prompt in PROMPTS])


def assert_like_transformers(directory: Path, model: Any, size: int) -> None:
    (logits, tokens), *followers = on_ranks(directory, size)
    expected = expected_logits(model)
    assert (logits - expected).abs().max() <= TOLERANCE * expected.abs().max()
    assert tokens == [transformers_greedy(model, prompt, 10) for prompt in PROMPTS]
    assert [tuple(logits.shape) for logits, _ in followers] == [(0, expected.shape[1])] * (size - 1)


@pytest.mark.parametrize("size", [*deep(2), 3, *deep(4)])
@pytest.mark.parametrize("model_type", ["opt", "gpt2"])
def test_logits_and_tokens_do_not_depend_on_the_number_of_ranks(model_type: str, size: int, tmp_path: Path) -> None:
    assert_like_transformers(tmp_path, write_tiny(tmp_path, model_type), size)


@pytest.mark.parametrize("model_type", every(3, OTHERS))
def test_plans_of_transformers_are_followed(model_type: str, tmp_path: Path) -> None:
    assert_like_transformers(tmp_path, write_tiny(tmp_path, model_type), 2)


@pytest.mark.parametrize("model_type", ["opt", "gpt2"])
def test_linear_layers_may_be_those_of_torch(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    monkeypatch.setattr(transformers_model, "replace_linears", lambda _: None)
    assert_like_transformers(tmp_path, write_tiny(tmp_path, model_type), 2)


def test_ranks_may_share_a_kv_head(tmp_path: Path) -> None:
    """Four query heads, two KV heads, four ranks."""
    assert_like_transformers(tmp_path, write_tiny(tmp_path, "starcoder2"), 4)


def test_projections_around_the_decoder_stay_whole(tmp_path: Path) -> None:
    """As in OPT-350m, whose norms come after attention besides."""
    model = write_tiny(tmp_path, "opt", word_embed_proj_dim=32, do_layer_norm_before=False)
    assert_like_transformers(tmp_path, model, 2)


def test_names_without_the_prefix_of_the_decoder_are_known(tmp_path: Path) -> None:
    model = write_tiny(tmp_path, "gpt2")
    path = tmp_path / "model.safetensors"
    bare = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    save_file(bare, path, metadata={"format": "pt"})
    assert_like_transformers(tmp_path, model, 2)


def test_blocks_hold_the_heads_of_their_rank(tmp_path: Path) -> None:
    write_tiny(tmp_path, "opt")
    configs = run_ranks(3, lambda group: rank_of(tmp_path, group).model.config)
    assert [config.num_kv_heads for config in configs] == [2, 1, 1]
    assert {(config.vocab_size, config.head_dim, config.windows) for config in configs} == {(300, 16, (0,) * 4)}


@pytest.mark.parametrize("model_type", ["opt", "phi"])
def test_random_weights_are_the_same_model_on_any_number_of_ranks(model_type: str, tmp_path: Path) -> None:
    write_tiny(tmp_path, model_type)
    (alone, tokens), (shared, shared_tokens) = (on_ranks(tmp_path, size, load_format="dummy")[0] for size in (1, 2))
    torch.testing.assert_close(shared, alone, atol=1e-5, rtol=1e-4)
    assert shared_tokens == tokens


def test_bfloat16_is_served(tmp_path: Path) -> None:
    write_tiny(tmp_path, "opt")
    alone, shared = (on_ranks(tmp_path, size, dtype=torch.bfloat16)[0][0].float() for size in (1, 2))
    assert (shared - alone).abs().max() <= 0.05 * alone.abs().max()


@pytest.mark.parametrize(
    ("model_type", "whole"),
    [
        ("gpt2", {"wpe", "ln_1", "ln_2", "ln_f"}),
        ("mixtral", {"gate", "input_layernorm", "post_attention_layernorm", "norm"}),
    ],
)
def test_two_ranks_read_every_shared_number_once(
    model_type: str, whole: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny(tmp_path, model_type)
    taken: Counter[str] = Counter()
    take = Checkpoint.take

    def counted(self: Checkpoint, name: str, shape: tuple[int, ...], part: TensorPart | None = None) -> Tensor:
        tensor = take(self, name, shape, part)
        taken[name] += tensor.numel()
        return tensor

    monkeypatch.setattr(Checkpoint, "take", counted)
    run_ranks(2, lambda group: rank_of(tmp_path, group))
    times = {name: taken[name] / tensor.numel() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert set(times.values()) == {1, 2}
    assert {name.split(".")[-2] for name, count in times.items() if count == 2} == whole


def test_attention_that_no_plan_shares_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its norms reach over all heads."""
    model = write_tiny(tmp_path, "olmoe")
    assert_like_transformers(tmp_path, model, 2)
    assert [record.message for record in caplog.records if record.name == transformers_model.__name__] == [
        "every rank computes all attention heads of this model and keeps all their keys and values"
    ]


def load_on(size: int, directory: Path) -> Sequence[RankRunner]:
    return run_ranks(size, lambda group: rank_of(directory, group))


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("bert", "nothing says how ranks could share BertLMHeadModel: .* Llama family, OPT, GPT-2"),
        ("phi3", "nothing says how ranks could share Phi3ForCausalLM"),
        ("granite_swa", r"in ways that are not implemented \(local_params\)"),
        ("hrm_text", "not laid out as the model computes with it"),
    ],
)
def test_what_nobody_knows_how_to_share_is_refused(model_type: str, reason: str, tmp_path: Path) -> None:
    write_tiny(tmp_path, model_type)
    with pytest.raises(UnsupportedModel, match=reason):
        load_on(2, tmp_path)


def test_more_ranks_than_heads_are_refused(tmp_path: Path) -> None:
    write_tiny(tmp_path, "opt")
    with pytest.raises(ModelConfigError, match="--tp 5 does not fit a model of 4 attention heads"):
        load_on(5, tmp_path)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    """Though each rank's rows would be there."""
    write_tiny(tmp_path, "opt")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.decoder.embed_tokens.weight"
    save_file({**tensors, name: torch.cat((tensors[name], tensors[name]))}, path, metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"\[600, 64\]; config\.json makes it \[300, 64\]"):
        load_on(2, tmp_path)
