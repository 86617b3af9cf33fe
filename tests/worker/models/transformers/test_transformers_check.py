"""What paged attention cannot serve is refused at start, with the reason."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertLMHeadModel,
    DeepseekV3Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from octavo.testing.small.architecture_trial import write_random_model
from octavo.testing.small.tiny_configs import causal_class, tiny_config
from octavo.worker.models.transformers.attention import PAGED
from octavo.worker.models.transformers.check import PagedShape, UnsupportedModel, check
from octavo.worker.models.transformers.cut import CutModel

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


def tiny(directory: Path, architecture: Any, config: Any) -> Any:
    model = write_random_model(directory, config, architecture)
    model.set_attn_implementation(PAGED)
    return model


def checked(model: Any, context: int = 256) -> PagedShape:
    with torch.inference_mode():
        return check(CutModel(model), context)


@pytest.fixture
def llama(tmp_path: Path) -> Any:
    return tiny(tmp_path, LlamaForCausalLM, LlamaConfig(**SIZES, num_key_value_heads=2, head_dim=24))


@pytest.fixture
def mistral(tmp_path: Path) -> Any:
    return tiny(tmp_path, MistralForCausalLM, MistralConfig(**SIZES, num_key_value_heads=1, sliding_window=20))


def test_the_shape_of_the_cache_is_what_the_layers_ask_for(llama: Any, mistral: Any) -> None:
    assert checked(llama) == PagedShape(300, 256, 2, 24, (0, 0, 0))
    assert checked(mistral) == PagedShape(300, 256, 1, 16, (20, 20, 20))


def test_a_window_that_holds_the_context_is_none(mistral: Any) -> None:
    assert checked(mistral, 20).windows == (0, 0, 0)


def at_layer_1(model: Any, change: Callable[[dict[str, Any]], None]) -> None:
    """Has `change` change what goes into the second layer's attention."""

    def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        changed = dict(kwargs)
        change(changed)
        return args, changed

    model.model.layers[1].self_attn.register_forward_pre_hook(hook, with_kwargs=True)


def test_a_layer_whose_window_is_not_that_of_its_mask_is_refused(mistral: Any) -> None:
    at_layer_1(mistral, lambda kwargs: kwargs.update(attention_mask=None))
    with pytest.raises(UnsupportedModel, match="layer 1 names a window of 20 tokens, but masks for one of 0"):
        checked(mistral)


def mix_neighbours(kwargs: dict[str, Any]) -> None:
    """As a convolution or a shift of tokens does."""
    hidden: Tensor = kwargs["hidden_states"]
    kwargs["hidden_states"] = hidden + 0.1 * torch.nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1]


def add_distances(kwargs: dict[str, Any]) -> None:
    """As ALiBi does."""
    mask: Tensor | None = kwargs["attention_mask"]
    length = kwargs["hidden_states"].shape[1]
    kwargs["attention_mask"] = torch.arange(length)[None, None, None] + (0 if mask is None else mask)


def bias_scores(kwargs: dict[str, Any]) -> None:
    kwargs["position_bias"] = torch.zeros(1)


def attend_both_ways(kwargs: dict[str, Any]) -> None:
    kwargs.update(attention_mask=None, is_causal=False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (mix_neighbours, "query of layer 1 changes when sequences share a row"),
        (add_distances, "layer 1 adds to the scores with a mask or bias of its own making"),
        (bias_scores, "layer 1 gives its attention position_bias, which is not implemented"),
        (attend_both_ways, "layer 1 attends both ways"),
    ],
)
def test_what_paged_attention_would_leave_out_is_refused(
    llama: Any, change: Callable[[dict[str, Any]], None], reason: str
) -> None:
    at_layer_1(llama, change)
    with pytest.raises(UnsupportedModel, match=reason):
        checked(llama)


def test_a_model_that_counts_positions_itself_is_refused(tmp_path: Path) -> None:
    """RoBERTa's first position is the one after the padding token's id."""
    architecture = causal_class("roberta")
    model = tiny(tmp_path, architecture, tiny_config("roberta", architecture.config_class))
    with pytest.raises(UnsupportedModel, match="positions are counted in a way of its own"):
        checked(model)


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    config = BertConfig(**SIZES, is_decoder=False)
    with pytest.raises(UnsupportedModel, match=r"attends both ways|another way than causally"):
        checked(tiny(tmp_path, BertLMHeadModel, config))


def test_attention_in_chunks_is_refused_unless_one_holds_the_context(tmp_path: Path) -> None:
    architecture = causal_class("llama4_text")
    model = tiny(tmp_path, architecture, tiny_config("llama4_text", architecture.config_class))
    with pytest.raises(UnsupportedModel, match="by chunks"):
        checked(copy.deepcopy(model))
    assert set(checked(model, 20).windows) == {0}


def test_values_smaller_than_keys_are_refused(tmp_path: Path) -> None:
    architecture = causal_class("deepseek_v3")
    model = tiny(tmp_path, architecture, tiny_config("deepseek_v3", DeepseekV3Config))
    with pytest.raises(UnsupportedModel, match=r"keys .* = \[4, 16\].* and values .*\[4, 12\].* differ in shape"):
        checked(model)


def test_layers_of_different_shapes_are_refused(tmp_path: Path) -> None:
    architecture = causal_class("mimo_v2_flash")
    model = tiny(tmp_path, architecture, tiny_config("mimo_v2_flash", architecture.config_class))
    with pytest.raises(UnsupportedModel, match="layers have keys of different shapes"):
        checked(model)


def test_layers_that_compute_attention_themselves_are_refused(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for layer in llama.model.layers:
        monkeypatch.setattr(layer.self_attn, "forward", lambda hidden_states, **_: (hidden_states, None))
    with pytest.raises(UnsupportedModel, match="never call the attention that is plugged in"):
        checked(llama)


def test_a_head_that_needs_more_than_hidden_states_is_refused(llama: Any) -> None:
    embedding = llama.get_input_embeddings()
    llama.lm_head.register_forward_hook(lambda _module, _inputs, output: output + embedding.seen.sum())
    embedding.register_forward_pre_hook(lambda module, inputs: setattr(module, "seen", inputs[0]))
    at_layer_1(llama, lambda kwargs: setattr(embedding, "seen", embedding.seen[:, :1]))
    with pytest.raises(UnsupportedModel, match="logits do not follow"):
        checked(llama)


def test_whatever_a_model_raises_is_the_reason(llama: Any) -> None:
    def fail(_kwargs: dict[str, Any]) -> None:
        raise KeyError("cache_kwargs")

    at_layer_1(llama, fail)
    with pytest.raises(UnsupportedModel, match="first forward pass fails: KeyError: 'cache_kwargs'"):
        checked(llama)
