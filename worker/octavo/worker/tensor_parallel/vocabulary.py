"""Embedding and LM head whose rows lie on different ranks."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from octavo.worker.tensor_parallel.group import ShardGroup
from octavo.worker.tensor_parallel.shards import Shards


class Vocabulary:
    """`size` tokens, of which the ranks of `group` hold a `share` each. Raises `ConfigError` if there are too few."""

    def __init__(self, size: int, group: ShardGroup) -> None:
        shards = Shards(group.rank, group.size)
        self.size = size
        self.share = shards.split(size, "tokens of the vocabulary")
        self._sizes = shards.sizes(size, "tokens of the vocabulary")
        self._group = group

    def embed(self, input_ids: Tensor, embedding: Tensor) -> Tensor:
        """[tokens, width]: on every rank the rows of `input_ids`, of which each has some in its share of the embedding,
        [len(share), width]."""
        return self.look_up(input_ids, lambda places: F.embedding(places, embedding))

    def look_up(self, input_ids: Tensor, rows_at: Callable[[Tensor], Tensor]) -> Tensor:
        """As `embed`, by `rows_at`, which looks up places in this rank's share and gives a tensor of its own."""
        if self._group.size == 1:
            return rows_at(input_ids)
        places = input_ids - self.share.mine.start
        elsewhere = (places < 0) | (places >= len(self.share))
        rows = rows_at(places.masked_fill_(elsewhere, 0))
        return self._group.all_reduce(rows.masked_fill_(elsewhere.unsqueeze(-1), 0))

    def gather(self, logits: Tensor) -> Tensor:
        """[rows, size] on rank 0, of each rank's `logits` ([rows, len(share)]); on the others [0, size]."""
        gathered = self._group.gather_columns(logits, self._sizes)
        return logits.new_empty((0, self.size)) if gathered is None else gathered
