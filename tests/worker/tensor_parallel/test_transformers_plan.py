"""Which layers of a model are shared, and how."""

from typing import Any

import pytest

from octavo.testing.small.tiny_configs import causal_class, tiny_config
from octavo.worker.models.transformers.loading import empty_model
from octavo.worker.models.transformers.plan import Axis, SharedLayers, Split, shared_layers

QUERY, KV, COLUMNS = Split(Axis.QUERY_HEADS), Split(Axis.KV_HEADS), Split(Axis.COLUMNS)
OUTPUT, DOWN = Split(Axis.QUERY_HEADS, reduced=True), Split(Axis.COLUMNS, reduced=True)


def layers_of(model_type: str) -> SharedLayers:
    architecture = causal_class(model_type)
    config: Any = tiny_config(model_type, architecture.config_class)
    config.architectures = [architecture.__name__]
    return shared_layers(empty_model(config))


LAYERS = {
    "opt": {
        "model.decoder.layers.2.self_attn.q_proj": QUERY,
        "model.decoder.layers.2.self_attn.k_proj": KV,
        "model.decoder.layers.2.self_attn.v_proj": KV,
        "model.decoder.layers.2.self_attn.out_proj": OUTPUT,
        "model.decoder.layers.2.fc1": COLUMNS,
        "model.decoder.layers.2.fc2": DOWN,
    },
    "gpt2": {
        "transformer.h.2.attn.c_attn": Split(Axis.QUERY_HEADS, stacked=3),
        "transformer.h.2.attn.c_proj": OUTPUT,
        "transformer.h.2.mlp.c_fc": COLUMNS,
        "transformer.h.2.mlp.c_proj": DOWN,
    },
    "gpt_neox": {
        "gpt_neox.layers.2.attention.query_key_value": QUERY,
        "gpt_neox.layers.2.attention.dense": OUTPUT,
        "gpt_neox.layers.2.mlp.dense_h_to_4h": COLUMNS,
        "gpt_neox.layers.2.mlp.dense_4h_to_h": DOWN,
    },
}


@pytest.mark.parametrize("model_type", LAYERS)
def test_all_linear_layers_of_a_block_are_shared(model_type: str) -> None:
    found = layers_of(model_type)
    assert {name: split for name, split in found.linears.items() if ".2." in name} == LAYERS[model_type]
    assert len(found.linears) == 4 * len(LAYERS[model_type])
    assert not found.experts


def test_experts_are_shared_beside_linear_layers() -> None:
    found = layers_of("qwen2_moe")
    assert found.experts == tuple(f"model.layers.{layer}.mlp.experts" for layer in range(4))
    assert {name.split(".")[-1] for name in found.linears} == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_layers_whose_outputs_all_ranks_need_stay_whole() -> None:
    assert {name.split(".")[-1] for name in layers_of("olmo2").linears} == {"gate_proj", "up_proj", "down_proj"}
