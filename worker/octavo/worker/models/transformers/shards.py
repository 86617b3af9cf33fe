"""One rank's share of a transformers model, built small so that parts of tensors fit into it.

Shoeybi et al., "Megatron-LM" (2019). The model's own code runs on it, with fewer heads and columns than it was written
for; `octavo.worker.models.transformers.collectives` stands in for what it does not have.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from octavo.worker.models.transformers.check import UnsupportedModel
from octavo.worker.models.transformers.names import Layout, StoredNames
from octavo.worker.models.transformers.parts import SharedTensor, expert_tensors, linear_tensors, vocabulary_tensors
from octavo.worker.models.transformers.plan import Axis, shared_layers
from octavo.worker.tensor_parallel.group import ShardGroup
from octavo.worker.tensor_parallel.shards import HeadShares, Shards

T = TypeVar("T")

# What attention modules call the numbers of heads that they compute with.
_QUERY_COUNTS = ("num_heads", "num_attention_heads")
_KV_COUNTS = ("num_key_value_heads",)


@dataclass(frozen=True, slots=True)
class ModelShare:
    """What a rank has of a model: of the parameters in `tensors` (by name) a part, of all others the whole.

    `experts`: those of `tensors` that hold experts, one by one; `names`: what checkpoints call the parameters. The rest
    are names of modules: `embedding` and `head` at the ends, `attention` those that compute with `heads`, `reduced`
    those whose outputs are summed over ranks.
    """

    names: StoredNames
    tensors: Mapping[str, SharedTensor]
    experts: Mapping[str, SharedTensor]
    embedding: str
    head: str
    attention: tuple[str, ...]
    heads: HeadShares
    reduced: tuple[str, ...]

    def tensor(self, stored: str) -> SharedTensor | None:
        """What a checkpoint calls `stored`; None: it is needed whole. Raises `UnsupportedModel`."""
        name, layout = self.names.parameter(stored)
        if layout is Layout.SAME or name not in self.tensors:
            return self.tensors.get(name)
        if layout is Layout.STACKED and name in self.experts:
            return self.experts[name]
        raise UnsupportedModel(
            f"tensor {stored!r} of the checkpoint is not laid out as the model computes with it, so that ranks cannot"
            " take a share of it: leave out --tp"
        )


def model_share(model: Any, group: ShardGroup) -> ModelShare:
    """The share of a rank of `model`, which may have no values. Raises `ConfigError`: as `UnsupportedModel` if nobody
    knows how to share it, else if it cannot be dealt out to so many."""
    layers = shared_layers(model)
    shards = Shards(group.rank, group.size)
    heads = _heads(model, shards)
    embedding, head = _ends(model)
    of_experts = _named(model, layers.experts, lambda module, _: expert_tensors(module, shards).items())
    tensors = {
        **_named(model, (embedding, head), lambda module, _: vocabulary_tensors(module, group).items()),
        **_named(
            model, layers.linears, lambda module, name: linear_tensors(module, layers.linears[name], heads, shards)
        ),
        **{name: experts.all for name, experts in of_experts.items()},
    }
    attention = (name.rpartition(".")[0] for name, split in layers.linears.items() if split.axis is not Axis.COLUMNS)
    return ModelShare(
        names=StoredNames(model),
        tensors=tensors,
        experts={name: experts.one for name, experts in of_experts.items()},
        embedding=embedding,
        head=head,
        attention=tuple(dict.fromkeys(attention)),
        heads=heads,
        reduced=(*(name for name, split in layers.linears.items() if split.reduced), *layers.experts),
    )


def _named(
    model: nn.Module, names: Iterable[str], parts: Callable[[nn.Module, str], Iterable[tuple[str, T]]]
) -> dict[str, T]:
    """What `parts` gives of the parameters of the modules called `names`, by the parameters' full names."""
    return {f"{name}.{leaf}": part for name in names for leaf, part in parts(model.get_submodule(name), name)}


def shared_architecture(whole: type[PreTrainedModel], share: ModelShare) -> type[PreTrainedModel]:
    """The class of models like `whole` that have the parameters of `share`."""
    build: Any = whole.__init__

    def build_share(model: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        build(model, config, *args, **kwargs)
        _shrink(model, share)

    return type(whole.__name__, (whole,), {"__init__": build_share, "__module__": whole.__module__})


def _heads(model: Any, shards: Shards) -> HeadShares:
    text = model.config.get_text_config(decoder=True)
    num_heads = text.num_attention_heads
    return shards.heads(num_heads, getattr(text, "num_key_value_heads", None) or num_heads)


def _ends(model: Any) -> tuple[str, str]:
    """The names of the embedding and of the LM head."""
    names = {id(module): name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding) or type(head) is not nn.Linear:
        raise UnsupportedModel(
            f"the embedding ({type(embedding).__name__}) or the LM head ({type(head).__name__}) of"
            f" {type(model).__name__} is of a kind that ranks cannot share: leave out --tp"
        )
    return names[id(embedding)], names[id(head)]


def _shrink(model: nn.Module, share: ModelShare) -> None:
    """Leaves of a model without values what `share` says."""
    for name, tensor in share.tensors.items():
        parent, _, leaf = name.rpartition(".")
        if tensor.is_held:
            _hold(model.get_submodule(parent), leaf, tensor.part.shape(tensor.whole))
    for name in share.attention:
        _count_heads(model.get_submodule(name), share.heads)


def _hold(module: nn.Module, leaf: str, shape: tuple[int, ...]) -> None:
    module.register_parameter(leaf, nn.Parameter(module.get_parameter(leaf).new_empty(shape), requires_grad=False))
    match module:
        case nn.Linear(weight=weight):
            module.out_features, module.in_features = weight.shape
        case Conv1D(weight=weight):
            module.nx, module.nf = weight.shape
        case nn.Embedding():
            # It may be another rank's row, and matters in training only.
            module.padding_idx = None


def _count_heads(attention: Any, heads: HeadShares) -> None:
    """Corrects the numbers that an attention module lays its tensors out by."""
    counts = {**dict.fromkeys(_QUERY_COUNTS, len(heads.query)), **dict.fromkeys(_KV_COUNTS, len(heads.kv))}
    for name in counts.keys() & vars(attention).keys():
        setattr(attention, name, counts[name])
    if hasattr(attention, "split_size"):
        attention.split_size = attention.split_size // heads.query.whole * len(heads.query)
