"""What the ranks that share a transformers model tell each other in a forward pass, in the places where its code would
have gone on with its own."""

from typing import Any

from torch import Tensor, nn

from octavo.worker.models.transformers.shards import ModelShare
from octavo.worker.tensor_parallel.group import ShardGroup
from octavo.worker.tensor_parallel.vocabulary import Vocabulary


def join(model: nn.Module, share: ModelShare, group: ShardGroup) -> None:
    """Has the forward pass of `model`, which holds `share` and whose modules are final, call on the other ranks."""
    for name in share.reduced:
        _reduce(model.get_submodule(name), group)
    _look_up_together(model.get_submodule(share.embedding), share.tensors[f"{share.embedding}.weight"].whole[0], group)
    _gather_logits(model.get_submodule(share.head), share.tensors[f"{share.head}.weight"].whole[0], group)


def _reduce(layer: Any, group: ShardGroup) -> None:
    compute = layer.forward
    layer.forward = lambda *args, **kwargs: group.all_reduce(compute(*args, **kwargs))


def _look_up_together(embedding: Any, size: int, group: ShardGroup) -> None:
    # Not every model's embedding is a plain one.
    look_up, vocabulary = embedding.forward, Vocabulary(size, group)
    embedding.forward = lambda input_ids: vocabulary.look_up(input_ids, look_up)


def _gather_logits(head: Any, size: int, group: ShardGroup) -> None:
    """Its output becomes one row of all tokens, [1, tokens, size]; on ranks other than 0 of none."""
    multiply, vocabulary = head.forward, Vocabulary(size, group)

    def forward(hidden: Tensor) -> Tensor:
        return vocabulary.gather(multiply(hidden).flatten(0, -2))[None]

    head.forward = forward
