"""Rotary tables and rotation, against transformers' own for the parameters of released models."""

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.glm import modeling_glm
from transformers.models.phi3 import modeling_phi3

from octavo.worker.models.architectures import ARCHITECTURES
from octavo.worker.models.config_file import ConfigFile
from octavo.worker.models.rotary import (
    RotaryConfig,
    RotaryTable,
    halves_first,
    inverse_frequencies,
    rotary_config,
    rotate,
)

turn_halves: Any = modeling_phi3.apply_rotary_pos_emb
turn_neighbours: Any = modeling_glm.apply_rotary_pos_emb
YARN: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + i / 100 for i in range(48)],
    "long_factor": [1.0 + i * i / 40 for i in range(48)],
}
# Head dimension, context, original context, parameters.
RELEASED: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "linear": (128, 16384, 4096, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
    "llama 3.1": (
        128,
        131072,
        8192,
        {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ),
    "qwen 2.5": (128, 131072, 32768, YARN),
    "yarn with betas": (64, 65536, 4096, {**YARN, "factor": 16.0, "beta_fast": 48.0, "beta_slow": 2.0}),
    "yarn between whole dimensions": (64, 65536, 4096, {**YARN, "truncate": False}),
    "yarn with an attention factor": (128, 65536, 8192, {**YARN, "factor": 8.0, "attention_factor": 1.2}),
    "yarn with mscales": (64, 163840, 4096, {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7}),
    "yarn without a factor": (64, 65536, 4096, {**YARN, "factor": None}),
    "phi 3, long": (96, 131072, 4096, LONGROPE),
    "phi 3, short": (96, 4096, 4096, LONGROPE),
    "longrope with a factor": (96, 131072, 4096, {**LONGROPE, "factor": 8.0}),
    "longrope with an attention factor": (96, 131072, 4096, {**LONGROPE, "attention_factor": 1.5}),
}


@pytest.mark.parametrize(("head_dim", "context", "original", "parameters"), RELEASED.values(), ids=RELEASED.keys())
@pytest.mark.filterwarnings("ignore")
def test_frequencies_and_attention_factors_are_those_of_transformers(
    head_dim: int, context: int, original: int, parameters: dict[str, Any]
) -> None:
    parameters = {**parameters, "original_max_position_embeddings": original}
    config = LlamaConfig(
        hidden_size=head_dim, num_attention_heads=1, max_position_embeddings=context, rope_parameters=dict(parameters)
    )
    expected, attention_factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, seq_len=context)
    rotary = rotary_config(file(context, parameters), ARCHITECTURES["LlamaForCausalLM"], "", head_dim, context)
    assert rotary.attention_factor == pytest.approx(attention_factor, rel=1e-12)
    torch.testing.assert_close(inverse_frequencies(rotary), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["linear", "llama 3.1", "qwen 2.5", "phi 3, long"])
@pytest.mark.filterwarnings("ignore")
def test_an_exact_table_holds_the_nearest_numbers(name: str) -> None:
    """Of the angles in fp32, as double arithmetic has them; its frequencies are close to those that torch computes."""
    head_dim, context, original, parameters = RELEASED[name]
    parameters = {**parameters, "original_max_position_embeddings": original}
    config = rotary_config(file(context, parameters), ARCHITECTURES["LlamaForCausalLM"], "", head_dim, context)
    exact = RotaryTable.of(config, 3000, torch.device("cpu"), exact=True)
    exact.reach(2999)
    frequencies = inverse_frequencies(config, exact=True)
    torch.testing.assert_close(frequencies, inverse_frequencies(config), rtol=1e-6, atol=0.0)
    angles = torch.outer(torch.arange(3000.0), frequencies).double()
    for table, function in ((exact.cos, torch.cos), (exact.sin, torch.sin)):
        assert torch.equal(table, function(angles).float().mul_(config.attention_factor))


def file(context: int, parameters: dict[str, Any]) -> ConfigFile:
    return ConfigFile(["LlamaForCausalLM"], 100, 64, 64, 1, 1, context, rope_parameters=parameters)


def heads(rotary_dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, RotaryTable]:
    """12 tokens' queries and keys with their positions, and the table that turns them."""
    torch.manual_seed(0)
    table = RotaryTable.of(RotaryConfig(100.0, rotary_dim, attention_factor=1.25), 50, torch.device("cpu"))
    return torch.randn(12, 4, 16), torch.randn(12, 2, 16), torch.randint(50, (12,)), table


def angles_of_transformers(table: RotaryTable, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return table.cos[positions].repeat(1, 2)[None], table.sin[positions].repeat(1, 2)[None]


@pytest.mark.parametrize("rotary_dim", [16, 10])
def test_heads_are_turned_as_transformers_turns_them(rotary_dim: int) -> None:
    query, key, positions, table = heads(rotary_dim)
    expected = turn_halves(query[None], key[None], *angles_of_transformers(table, positions), 2)
    angles = table.at(positions, torch.float32)
    torch.testing.assert_close(rotate(query, angles), expected[0][0])
    torch.testing.assert_close(rotate(key, angles), expected[1][0])


@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_interleaved_heads_give_the_same_products_once_their_halves_come_first(rotary_dim: int) -> None:
    query, key, positions, table = heads(rotary_dim)
    theirs = turn_neighbours(query[None], key[None], *angles_of_transformers(table, positions), 2)
    order = halves_first(1, 0, 16, rotary_dim)
    angles = table.at(positions, torch.float32)
    turned_query, turned_key = rotate(query[..., order], angles), rotate(key[..., order], angles)
    products = torch.einsum("thd,tkd->thk", turned_query, turned_key)
    torch.testing.assert_close(products, torch.einsum("thd,tkd->thk", theirs[0][0], theirs[1][0]))


def test_other_heads_keep_their_order() -> None:
    order = halves_first(2, 1, 4, 4).tolist()
    assert order == [0, 2, 1, 3, 4, 6, 5, 7, 8, 9, 10, 11]


def test_angles_are_those_of_the_positions() -> None:
    rotary = RotaryConfig(theta=50.0, rotary_dim=6)
    table = RotaryTable.of(rotary, 9, torch.device("cpu"))
    angles = torch.outer(torch.arange(9.0), inverse_frequencies(rotary))
    torch.testing.assert_close(table.cos, angles.cos())
    torch.testing.assert_close(table.sin, angles.sin())
    cos, signed_sin = table.at(torch.tensor([8, 3]), torch.bfloat16)
    torch.testing.assert_close(cos[:, 0, :3], angles[[8, 3]].cos().bfloat16())
    torch.testing.assert_close(signed_sin[:, 0, :3], -angles[[8, 3]].sin().bfloat16())


@pytest.mark.parametrize("exact", [False, True])
def test_rows_are_computed_when_their_positions_are_reached_and_are_the_same_whatever_came_before(exact: bool) -> None:
    config, cpu = RotaryConfig(1e4, 64, attention_factor=1.25), torch.device("cpu")
    at_once, gradually = (RotaryTable.of(config, 5000, cpu, exact=exact) for _ in range(2))
    assert at_once.num_rows < 2000
    assert not at_once.cos[2000:].any()
    at_once.reach(4999)
    for position in (3, 1023, 1024, 2500):
        cos, _ = gradually.at(torch.tensor([0, position]), torch.float32)
        assert torch.equal(cos[1, 0, :32], at_once.cos[position])
    assert 2500 < gradually.num_rows < 4000
    # What is beyond the table fails as an index does, and computes no more than there is.
    with pytest.raises(IndexError):
        gradually.at(torch.tensor([5000]), torch.float32)
    assert gradually.num_rows == 5000
    assert torch.equal(gradually.cos, at_once.cos)
    assert torch.equal(gradually.sin, at_once.sin)


def test_a_long_context_takes_memory_as_far_as_it_is_used() -> None:
    before = resident_bytes()
    table = RotaryTable.of(RotaryConfig(1e4, 128), 1 << 20, torch.device("cpu"))
    assert table.cos.nbytes + table.sin.nbytes == 512 << 20
    assert resident_bytes() - before < 64 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
