"""Collectives of real process groups, over loopback and through shared memory, all ranks threads of this process."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from octavo.testbed.stack import free_address
from octavo.worker.tensor_parallel import links
from octavo.worker.tensor_parallel.distributed import DistributedGroup, RankLostError
from octavo.worker.tensor_parallel.links import add_in_order
from octavo.worker.tensor_parallel.rendezvous import connect

T = TypeVar("T")
_PATIENCE_S = 60.0


class Threads:
    """The ranks of one replica, each on a thread of its own."""

    def __init__(self, pool: ThreadPoolExecutor, rendezvous: str, size: int) -> None:
        self._pool = pool
        ranks = [pool.submit(connect, rendezvous, rank, size, patience_s=_PATIENCE_S) for rank in range(size)]
        self.groups = [rank.result() for rank in ranks]

    def all(self, do: Callable[[DistributedGroup], T]) -> list[T]:
        """What `do` gives on each rank, at the same time."""
        return list(self._pool.map(do, self.groups))


@pytest.fixture(params=["sockets-2", "sockets-3", "memory-2", "memory-3", "scarce-3"])
def threads(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Threads]:
    """`scarce`: through memory that a row of tensors hardly fits into."""
    kind, _, size = request.param.partition("-")
    if kind == "scarce":
        monkeypatch.setattr(links, "_SLOT_BYTES", 40)
    rendezvous = free_address() if kind == "sockets" else f"file:{tmp_path}"
    with ThreadPoolExecutor(int(size)) as pool:
        threads = Threads(pool, rendezvous, int(size))
        yield threads
        for group in threads.groups:
            group.close()


def part(rank: int, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(rows, columns, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_has_the_same_bits_on_all_ranks(threads: Threads, dtype: torch.dtype) -> None:
    sums = threads.all(lambda group: group.all_reduce(part(group.rank, 5, 7, dtype)))
    parts = [part(rank, 5, 7, dtype).float() for rank in range(len(sums))]
    assert all(torch.equal(found, sums[0]) for found in sums)
    torch.testing.assert_close(sums[0], torch.stack(parts).sum(0).to(dtype))


def test_a_sum_stands_in_the_place_of_its_part(threads: Threads) -> None:
    def reduced(group: DistributedGroup) -> bool:
        tensor = part(group.rank, 2, 3)
        return group.all_reduce(tensor) is tensor

    assert all(threads.all(reduced))


def test_a_rows_sum_does_not_depend_on_the_rows_around_it(threads: Threads) -> None:
    def reduced(rows: slice) -> Tensor:
        return threads.all(lambda group: group.all_reduce(part(group.rank, 33, 7)[rows].clone()))[0]

    many = reduced(slice(None))
    for row in (0, 16, 32):
        assert torch.equal(reduced(slice(row, row + 1)), many[row : row + 1])


def test_terms_are_added_in_the_order_of_the_ranks() -> None:
    parts = torch.tensor([[1e8], [-1e8], [1.0]])
    assert add_in_order(parts, torch.empty(1)).item() == 1.0
    assert add_in_order(parts.flip(0), torch.empty(1)).item() == 0.0


def test_only_the_first_rank_gathers_columns_of_any_width(threads: Threads) -> None:
    size = len(threads.groups)
    sizes = [4, *range(1, size)]
    gathered = threads.all(lambda group: group.gather_columns(part(group.rank, 3, sizes[group.rank]), sizes))
    assert gathered[1:] == [None] * (size - 1)
    assert gathered[0] is not None
    assert torch.equal(gathered[0], torch.cat([part(rank, 3, width) for rank, width in enumerate(sizes)], dim=1))


def test_every_rank_learns_every_number(threads: Threads) -> None:
    size = len(threads.groups)
    assert (
        threads.all(lambda group: group.exchange(1 << (40 + group.rank)))
        == [[1 << (40 + r) for r in range(size)]] * size
    )


def test_a_frame_of_the_first_rank_reaches_all_others(threads: Threads) -> None:
    def frames(group: DistributedGroup) -> list[bytes]:
        sent = [b"x", bytes(100_000), b"last"]
        if group.rank:
            return [group.receive_frame() for _ in sent]
        for frame in sent:
            group.send_frame(frame)
        return sent

    first, *others = threads.all(frames)
    assert others == [first] * len(others)


def test_a_rank_that_keeps_the_others_waiting_is_lost(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        leader, follower = Threads(pool, f"file:{tmp_path}", 2).groups
    follower.set_patience(0.05)
    with pytest.raises(RankLostError, match="waiting for the first rank"):
        follower.receive_frame()
    leader.set_patience(0.05)
    with pytest.raises(RankLostError, match="adding up"):
        leader.all_reduce(torch.ones(3))
    leader.close()
    follower.close()


def test_a_rank_that_ends_is_lost_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        leader, follower = Threads(pool, f"file:{tmp_path}", 2).groups
    follower.close()
    with pytest.raises(RankLostError, match="adding up"):
        leader.all_reduce(torch.ones(3))
    leader.close()
