"""Ranks share quantised weights: each takes its rows or columns of what is stored, or quantises its own."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from octavo.kernels.native.library import VARIANT_VARIABLE, find
from octavo.testing.native import loaded
from octavo.testing.shard_threads import RankRunner, ThreadGroup, run_ranks
from octavo.testing.small.architecture_trial import write_random_model
from octavo.testing.small.packed import KINDS, quantize_checkpoint
from octavo.worker.loading.weights import WeightsError
from octavo.worker.models.transformers import model as transformers_model
from octavo.worker.models.transformers.model import TransformersModel

PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6], list(range(100, 140))]
SIZES: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "intermediate_size": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA = LlamaConfig(**SIZES, num_key_value_heads=2)
PHI3 = Phi3Config(**SIZES, num_key_value_heads=2)


@pytest.fixture(autouse=True)
def loads_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """While transformers makes a model it changes things that are global to the process, which ranks here share."""
    turn = threading.RLock()

    def in_turn(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with turn:
                return function(*args)

        return call

    for name in ("load", "empty_model", "quantizable_linears"):
        monkeypatch.setattr(transformers_model, name, in_turn(getattr(transformers_model, name)))


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Weights are then the numbers that are stored, and rounding alone tells ranks apart."""
    monkeypatch.setenv(VARIANT_VARIABLE, "none")
    find.cache_clear()
    yield
    find.cache_clear()


def logits(directory: Path, size: int, **options: Any) -> tuple[Tensor, bool]:
    """The logits after `PROMPTS` on `size` ranks, and whether transformers computes them."""

    def work(group: ThreadGroup) -> tuple[Tensor, bool]:
        runner = RankRunner(directory, group, **options)
        return runner.prompt_logits(PROMPTS), isinstance(runner.model, TransformersModel)

    return run_ranks(size, work)[0]


def difference(directory: Path, **options: Any) -> tuple[float, bool]:
    """How far two ranks are from one, relative to the logits."""
    (alone, _), (shared, by_transformers) = (logits(directory, size, **options) for size in (1, 2))
    return float((shared - alone).norm() / alone.norm()), by_transformers


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("kind", ["w8a8", "w4a16", "w4a16 bf16", "w4a16 channel", "gptq", "gptq 8 bits", "awq"])
@pytest.mark.parametrize(("config", "architecture"), [(LLAMA, LlamaForCausalLM), (PHI3, Phi3ForCausalLM)])
def test_shares_of_a_checkpoint_are_the_whole(tmp_path: Path, kind: str, config: Any, architecture: Any) -> None:
    quantize_checkpoint(tmp_path, write_random_model(tmp_path, config, architecture), KINDS[kind])
    apart, by_transformers = difference(tmp_path)
    assert apart < 1e-5
    assert not by_transformers


@pytest.mark.usefixtures("without_kernels")
def test_a_rank_that_would_cut_a_group_of_32_is_told(tmp_path: Path) -> None:
    model = write_random_model(tmp_path, LlamaConfig(**{**SIZES, "intermediate_size": 96}), LlamaForCausalLM)
    quantize_checkpoint(tmp_path, model, KINDS["gptq"])
    with pytest.raises(WeightsError, match=r"down_proj\.weight cannot be shared by so many ranks: inputs 0 to 48 cut"):
        logits(tmp_path, 2)


@pytest.mark.parametrize("options", [{}, {"quantization": "q8_0"}], ids=["a checkpoint", "as they load"])
def test_ranks_share_quantised_layers_of_transformers(tmp_path: Path, options: dict[str, Any]) -> None:
    loaded()
    config = GPTNeoXConfig(**SIZES)
    model = write_random_model(tmp_path, config, GPTNeoXForCausalLM)
    if not options:
        quantize_checkpoint(tmp_path, model, KINDS["gptq"])
    apart, by_transformers = difference(tmp_path, model_impl="transformers", **options)
    assert apart < 0.02
    assert by_transformers
