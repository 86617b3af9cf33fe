"""One rank's share of a transformers model, built small so that parts of tensors fit into it.

Shoeybi et al., "Megatron-LM" (2019). The model's own code runs on the share, with fewer heads and columns than it was
written for; `join` adds the collectives that the code lacks.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from octavo.worker.loading.tensor_file import TensorPart
from octavo.worker.models.transformers.check import UnsupportedModel
from octavo.worker.models.transformers.names import Layout, StoredNames
from octavo.worker.models.transformers.plan import Axis, Split, shared_layers
from octavo.worker.tensor_parallel.group import ShardGroup
from octavo.worker.tensor_parallel.shards import HeadShares, ShardedVocabulary, Shards, Share, stacked

# Octavo's kernels multiply pairs of inputs.
_MLP_UNIT = 2
_NOTHING = TensorPart(0, ())


T = TypeVar("T")
# The names that attention modules give to their numbers of heads.
_QUERY_COUNTS = ("num_heads", "num_attention_heads")
_KV_COUNTS = ("num_key_value_heads",)


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """A tensor of shape `whole`, of which a rank holds `part`; a part without ranges stands for zeros."""

    whole: tuple[int, ...]
    part: TensorPart

    @property
    def is_held(self) -> bool:
        return bool(self.part.ranges)


@dataclass(frozen=True, slots=True)
class SharedExperts:
    """A parameter with the weights of all experts of a layer, and one linear layer of one expert, as a checkpoint may
    have it."""

    all: SharedTensor
    one: SharedTensor


def vocabulary_tensors(end: nn.Module, group: ShardGroup) -> dict[str, SharedTensor]:
    """Returns the shares of a model's embedding or LM head, by the names of its parameters."""
    return {
        leaf: SharedTensor(tuple(tensor.shape), ShardedVocabulary(len(tensor), group).share.along(0))
        for leaf, tensor in end.named_parameters(recurse=False)
    }


def linear_tensors(
    linear: nn.Module, split: Split, heads: HeadShares, shards: Shards
) -> Iterator[tuple[str, SharedTensor]]:
    """Yields the shares of a linear layer, by the names of its parameters. Raises `ModelConfigError` if it cannot be
    divided."""
    # Conv1D keeps its weight transposed.
    outputs, inputs = (1, 0) if isinstance(linear, Conv1D) else (0, 1)
    dim = inputs if split.reduced else outputs
    weight, bias = linear.weight, linear.bias
    assert isinstance(weight, Tensor)
    shares = [_share(weight.shape[dim] // split.stacked, split.axis, heads, shards)] * split.stacked
    yield "weight", SharedTensor(tuple(weight.shape), stacked(dim, shares))
    if isinstance(bias, Tensor) and not split.reduced:
        yield "bias", SharedTensor(tuple(bias.shape), stacked(0, shares))
    elif isinstance(bias, Tensor) and shards.rank:
        # The sum over ranks holds it once.
        yield "bias", SharedTensor(tuple(bias.shape), _NOTHING)


def _share(size: int, axis: Axis, heads: HeadShares, shards: Shards) -> Share:
    if axis is Axis.COLUMNS:
        return shards.split(size, axis.value, unit=_MLP_UNIT)
    dealt = heads.kv if axis is Axis.KV_HEADS else heads.query
    width, rest = divmod(size, dealt.whole)
    if rest:
        raise UnsupportedModel(f"a layer is {size} wide, no multiple of {dealt.whole} {axis.value}: leave out --tp")
    return dealt.times(width)


def expert_tensors(experts: nn.Module, shards: Shards) -> dict[str, SharedExperts]:
    """Returns the shares of a module that computes the experts of a layer, by the names of its parameters. Raises
    `ModelConfigError`."""
    parameters = dict(experts.named_parameters())
    if parameters.keys() != {"gate_up_proj", "down_proj"} or getattr(experts, "is_transposed", False):
        raise UnsupportedModel(
            f"its experts ({type(experts).__name__}: {', '.join(sorted(parameters))}) are of a kind that ranks cannot"
            " share: leave out --tp"
        )
    number, hidden, inner = parameters["down_proj"].shape
    share = shards.split(inner, Axis.COLUMNS.value, unit=_MLP_UNIT)
    return {
        "gate_up_proj": SharedExperts(
            SharedTensor((number, 2 * inner, hidden), stacked(1, [share, share])),
            SharedTensor((inner, hidden), share.along(0)),
        ),
        "down_proj": SharedExperts(
            SharedTensor((number, hidden, inner), share.along(2)), SharedTensor((hidden, inner), share.along(1))
        ),
    }


@dataclass(frozen=True, slots=True)
class ModelShare:
    """Describes a rank's share of a model: a part of the parameters in `tensors` (by name), the whole of all others.

    `experts` are those of `tensors` that hold experts, one by one; `names` are the checkpoints' names of parameters.
    The rest are names of modules: `embedding` and `head` at the ends, `attention` those that compute with `heads`,
    `reduced` those whose outputs are summed over ranks.
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
        """Returns the share of the tensor that a checkpoint calls `stored`; None: it is needed whole. Raises
        `UnsupportedModel`."""
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
    """Returns the share of a rank of `model`, which may have no values.

    Raises `ModelConfigError`: as `UnsupportedModel` if no plan for sharing it is known, else if it cannot be divided
    among so many ranks.
    """
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
    """Returns the shares that `parts` gives for the parameters of the modules called `names`, by the parameters' full
    names."""
    return {f"{name}.{leaf}": part for name in names for leaf, part in parts(model.get_submodule(name), name)}


def shared_architecture(whole: type[PreTrainedModel], share: ModelShare) -> type[PreTrainedModel]:
    """Returns the class of models like `whole` that have the parameters of `share`."""
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
    """Returns the names of the embedding and of the LM head."""
    names = {id(module): name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding) or type(head) is not nn.Linear:
        raise UnsupportedModel(
            f"the embedding ({type(embedding).__name__}) or the LM head ({type(head).__name__}) of"
            f" {type(model).__name__} is of a kind that ranks cannot share: leave out --tp"
        )
    return names[id(embedding)], names[id(head)]


def _shrink(model: nn.Module, share: ModelShare) -> None:
    """Shrinks a model without values to its `share`."""
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


def join(model: nn.Module, share: ModelShare, group: ShardGroup) -> None:
    """Adds the collectives with the other ranks to the forward pass of `model`, which holds `share` and whose modules
    are final."""
    for name in share.reduced:
        _reduce(model.get_submodule(name), group)
    _look_up_together(model.get_submodule(share.embedding), share.tensors[f"{share.embedding}.weight"].whole[0], group)
    _gather_logits(model.get_submodule(share.head), share.tensors[f"{share.head}.weight"].whole[0], group)


def _reduce(layer: Any, group: ShardGroup) -> None:
    compute = layer.forward
    layer.forward = lambda *args, **kwargs: group.all_reduce(compute(*args, **kwargs))


def _look_up_together(embedding: Any, size: int, group: ShardGroup) -> None:
    # Not every model's embedding is a plain one.
    look_up, vocabulary = embedding.forward, ShardedVocabulary(size, group)
    embedding.forward = lambda input_ids: vocabulary.look_up(input_ids, look_up)


def _gather_logits(head: Any, size: int, group: ShardGroup) -> None:
    """Makes the output of `head` one row of all tokens, [1, tokens, size]; no tokens on ranks other than 0."""
    multiply, vocabulary = head.forward, ShardedVocabulary(size, group)

    def forward(hidden: Tensor) -> Tensor:
        return vocabulary.gather(multiply(hidden).flatten(0, -2))[None]

    head.forward = forward
