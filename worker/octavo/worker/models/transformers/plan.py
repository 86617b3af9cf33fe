"""The plan of a shared transformers model: the layers that its ranks share, and the shared dimension of each."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from octavo.worker.models.transformers.check import UnsupportedModel

# The words of transformers' plans for the halves of a block that ranks compute alone, for the experts of a layer, and
# for layers that every rank may as well compute itself. A model's ends, its embedding and its LM head, are shared
# whatever its plan says.
_COLUMNS, _ROWS = "colwise", "rowwise"
_EXPERTS, _PACKED_COLUMNS = "moe_tp_experts", "packed_colwise"
_WHOLE = {"replicated_with_grad_allreduce", "colwise_gather_output", "rowwise_split_input"}
# Plans in the same words for models that transformers has none for, by their base classes.
_OPT = {
    **dict.fromkeys((f"decoder.layers.*.self_attn.{name}_proj" for name in "qkv"), _COLUMNS),
    "decoder.layers.*.self_attn.out_proj": _ROWS,
    "decoder.layers.*.fc1": _COLUMNS,
    "decoder.layers.*.fc2": _ROWS,
}
_GPT2 = {
    "h.*.attn.c_attn": _COLUMNS,
    "h.*.attn.c_proj": _ROWS,
    "h.*.mlp.c_fc": _COLUMNS,
    "h.*.mlp.c_proj": _ROWS,
}
_PERSIMMON = {
    "layers.*.self_attn.query_key_value": _COLUMNS,
    "layers.*.self_attn.dense": _ROWS,
    "layers.*.mlp.dense_h_to_4h": _COLUMNS,
    "layers.*.mlp.dense_4h_to_h": _ROWS,
}
_OWN: dict[str, dict[str, str]] = {"OPTModel": _OPT, "GPT2Model": _GPT2, "PersimmonModel": _PERSIMMON}
_KEYS_AND_VALUES = {"k_proj", "v_proj"}
# Queries, keys and values side by side; in other layers those of one head are, and heads follow each other.
_STACKED = {"c_attn"}


class Axis(Enum):
    """Names what is divided among the ranks."""

    QUERY_HEADS = "query heads"
    KV_HEADS = "KV heads"
    COLUMNS = "MLP columns"


@dataclass(frozen=True, slots=True)
class Split:
    """Describes the shared dimension of a linear layer: its outputs, or with `reduced` its inputs, so that the outputs
    are sums over ranks.

    `stacked` tells how many times all of the axis lie side by side.
    """

    axis: Axis
    reduced: bool = False
    stacked: int = 1


@dataclass(frozen=True, slots=True)
class SharedLayers:
    """Names the layers that ranks share: linear layers, and modules that hold the experts of a layer.

    The outputs of these modules are sums over ranks too.
    """

    linears: Mapping[str, Split]
    experts: tuple[str, ...]


def shared_layers(model: Any) -> SharedLayers:
    """Returns the layers of `model` that ranks share. Raises `UnsupportedModel` if no plan is known."""
    plan = _plan(model)
    if others := sorted(set(plan.values()) - {_COLUMNS, _ROWS, _EXPERTS, _PACKED_COLUMNS} - _WHOLE):
        raise UnsupportedModel(
            f"ranks would share layers of {type(model).__name__} in ways that are not implemented"
            f" ({', '.join(others)}): leave out --tp"
        )
    names = [name for name, _ in model.named_modules()]
    linears = {name: _split(name, style) for name in names if (style := _style(name, plan)) in (_COLUMNS, _ROWS)}
    experts = tuple(name for name in names if _are_shared_experts(name, plan))
    if not linears and not experts:
        raise UnsupportedModel(
            f"nothing says how ranks could share {type(model).__name__}: --tp above 1 is for the Llama family, OPT,"
            " GPT-2, and whatever transformers has a tensor-parallel plan for; leave it out"
        )
    return SharedLayers(linears, experts)


def _plan(model: Any) -> Mapping[str, str]:
    ends = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    end_names = {name for name, module in model.named_modules() if id(module) in ends}
    found = {pattern: style for pattern, style in model._tp_plan.items() if pattern not in end_names}
    own = _OWN.get(type(model.base_model).__name__, {})
    return found or {f"{model.base_model_prefix}.{pattern}": style for pattern, style in own.items()}


def _style(name: str, plan: Mapping[str, str]) -> str | None:
    """Returns the plan's word for the module `name`; a plan leaves the numbers in names open."""
    return plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name))


def _are_shared_experts(name: str, plan: Mapping[str, str]) -> bool:
    styles = [_style(each, plan) for each in (name, f"{name}.gate_up_proj", f"{name}.down_proj")]
    return styles == [_EXPERTS, _PACKED_COLUMNS, _ROWS]


def _split(name: str, style: str | None) -> Split:
    parent, _, leaf = name.rpartition(".")
    reduced = style == _ROWS
    if "attn" not in parent and "attention" not in parent:
        return Split(Axis.COLUMNS, reduced)
    axis = Axis.KV_HEADS if leaf in _KEYS_AND_VALUES else Axis.QUERY_HEADS
    return Split(axis, reduced, stacked=3 if leaf in _STACKED else 1)
