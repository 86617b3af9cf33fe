"""A vocabulary that several ranks share reads and answers like a whole one."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.testing.shard_threads import ThreadGroup, run_ranks
from octavo.worker.models.config_file import ModelConfigError
from octavo.worker.tensor_parallel.shards import ShardedVocabulary

EMBEDDING = torch.randn(11, 4, generator=torch.Generator().manual_seed(0))
IDS = torch.tensor([10, 0, 5, 5, 3, 7])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_rank_gets_all_rows(size: int) -> None:
    def embedded(group: ThreadGroup) -> Tensor:
        vocabulary = ShardedVocabulary(11, group)
        mine = vocabulary.share.mine
        return vocabulary.look_up(IDS.clone(), partial(F.embedding, weight=EMBEDDING[mine.start : mine.stop]))

    for rows in run_ranks(size, embedded):
        assert torch.equal(rows, EMBEDDING[IDS])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_first_rank_gets_all_logits_and_others_none(size: int) -> None:
    logits = EMBEDDING.T.contiguous()

    def gathered(group: ThreadGroup) -> Tensor:
        vocabulary = ShardedVocabulary(11, group)
        mine = vocabulary.share.mine
        return vocabulary.gather(logits[:, mine.start : mine.stop])

    first, *others = run_ranks(size, gathered)
    assert torch.equal(first, logits)
    assert [tuple(other.shape) for other in others] == [(0, 11)] * (size - 1)


def test_ids_are_left_as_they_were() -> None:
    ids = IDS.clone()

    def look_up(group: ThreadGroup) -> None:
        vocabulary = ShardedVocabulary(11, group)
        vocabulary.look_up(ids, partial(F.embedding, weight=EMBEDDING[: len(vocabulary.share)]))

    run_ranks(2, look_up)
    assert torch.equal(ids, IDS)


def test_fewer_tokens_than_ranks_are_refused() -> None:
    with pytest.raises(ModelConfigError, match="--tp 3 leaves a rank without any of the model's 2 tokens"):
        run_ranks(3, lambda group: ShardedVocabulary(2, group))
