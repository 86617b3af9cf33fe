"""Every head, column and token is some rank's, in order, and as evenly as it comes."""

import pytest

from octavo.worker.loading.tensor_file import TensorPart
from octavo.worker.models.config_file import ModelConfigError
from octavo.worker.tensor_parallel.shards import HeadShares, Shards, Share, stacked


def heads_of(size: int, num_heads: int, num_kv_heads: int) -> list[HeadShares]:
    return [Shards(rank, size).heads(num_heads, num_kv_heads) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("whole", [13, 16, 100, 49_152])
@pytest.mark.parametrize("unit", [1, 2])
def test_shares_are_disjoint_and_even_and_all_there_is(size: int, whole: int, unit: int) -> None:
    shares = [Shards(rank, size).split(whole, "things", unit=unit) for rank in range(size)]
    assert [place for share in shares for place in share.mine] == list(range(whole))
    assert {share.whole for share in shares} == {whole}
    assert [len(share) for share in shares] == Shards(0, size).sizes(whole, "things", unit=unit)
    assert all(share.mine.start % unit == 0 for share in shares)
    assert max(map(len, shares)) - min(map(len, shares)) < 2 * unit


def test_a_rank_without_a_share_is_refused() -> None:
    with pytest.raises(ModelConfigError, match="--tp 4 leaves a rank without any of the model's 6 columns"):
        Shards(0, 4).split(6, "columns", unit=2)


@pytest.mark.parametrize(
    ("size", "num_heads", "num_kv_heads", "query", "kv"),
    [
        (1, 9, 3, [(0, 9)], [(0, 3)]),
        (2, 9, 3, [(0, 6), (6, 9)], [(0, 2), (2, 3)]),
        (3, 9, 3, [(0, 3), (3, 6), (6, 9)], [(0, 1), (1, 2), (2, 3)]),
        (2, 4, 4, [(0, 2), (2, 4)], [(0, 2), (2, 4)]),
        (4, 8, 2, [(0, 2), (2, 4), (4, 6), (6, 8)], [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (4, 14, 2, [(0, 4), (4, 7), (7, 11), (11, 14)], [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (2, 5, 1, [(0, 3), (3, 5)], [(0, 1), (0, 1)]),
    ],
)
def test_query_heads_are_where_their_kv_head_is(
    size: int, num_heads: int, num_kv_heads: int, query: list[tuple[int, int]], kv: list[tuple[int, int]]
) -> None:
    shares = heads_of(size, num_heads, num_kv_heads)
    assert [share.query.mine for share in shares] == [range(*each) for each in query]
    assert [share.kv.mine for share in shares] == [range(*each) for each in kv]
    held = sum(len(share.kv) for share in shares)
    assert {share.copies for share in shares} == {held // num_kv_heads}


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("per_kv_head", [1, 3, 4, 7])
def test_whatever_is_not_refused_deals_out_every_head_once(num_kv_heads: int, per_kv_head: int) -> None:
    num_heads = num_kv_heads * per_kv_head
    for size in range(1, num_heads + 2):
        try:
            shares = heads_of(size, num_heads, num_kv_heads)
        except ModelConfigError:
            assert size > num_kv_heads
            continue
        assert [head for share in shares for head in share.query.mine] == list(range(num_heads))
        for share in shares:
            assert {head // per_kv_head for head in share.query.mine} == set(share.kv.mine)
            # What attention asks of a rank: its KV heads have equally many of its query heads.
            assert len(share.query) % len(share.kv) == 0


def test_a_number_of_ranks_that_does_not_fit_the_heads_is_refused_with_those_that_do() -> None:
    with pytest.raises(ModelConfigError, match=r"^--tp 4 does not fit a model of 9 attention heads and 3 KV heads"):
        Shards(0, 4).heads(9, 3)
    with pytest.raises(ModelConfigError, match=r"one of 1, 2, 3, 6, 9 does$"):
        Shards(0, 12).heads(9, 3)


def test_a_stack_has_the_share_of_each_of_its_members() -> None:
    query, kv = Share(4, range(2, 4)).times(8), Share(2, range(1, 2)).times(8)
    assert stacked(0, [query, kv, kv]) == TensorPart(0, (range(16, 32), range(40, 48), range(56, 64)))
    assert kv.along(1) == TensorPart(1, (range(8, 16),))
