"""Which parts of a transformers model's tensors a rank holds."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from octavo.worker.loading.tensor_file import Part
from octavo.worker.models.transformers.check import UnsupportedModel
from octavo.worker.models.transformers.plan import Axis, Split
from octavo.worker.tensor_parallel.group import ShardGroup
from octavo.worker.tensor_parallel.shards import HeadShares, Shards, Share, stacked
from octavo.worker.tensor_parallel.vocabulary import Vocabulary

# Octavo's kernels multiply pairs of inputs.
_MLP_UNIT = 2
_NOTHING = Part(0, ())


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """One of shape `whole`, of which a rank holds `part`; without any ranges: zeros."""

    whole: tuple[int, ...]
    part: Part

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
    """Of a model's embedding or LM head, by the names of its parameters."""
    return {
        leaf: SharedTensor(tuple(tensor.shape), Vocabulary(len(tensor), group).share.along(0))
        for leaf, tensor in end.named_parameters(recurse=False)
    }


def linear_tensors(
    linear: nn.Module, split: Split, heads: HeadShares, shards: Shards
) -> Iterator[tuple[str, SharedTensor]]:
    """Of a linear layer, by the names of its parameters. Raises `ConfigError` if it cannot be dealt out."""
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
    """Of a module that computes with the experts of a layer, by the names of its parameters. Raises `ConfigError`."""
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
