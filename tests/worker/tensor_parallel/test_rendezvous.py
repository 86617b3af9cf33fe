"""Where ranks meet, and on which addresses they listen until then."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch._C import _distributed_c10d as c10d

from octavo.testbed.stack import free_address
from octavo.worker.tensor_parallel import rendezvous
from octavo.worker.tensor_parallel.rendezvous import RendezvousError, connect


def listening_addresses() -> set[str]:
    """Those that this process listens on, hexadecimal as in /proc/net/tcp."""
    inodes = {os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    tables = Path("/proc/net/tcp").read_text().splitlines()[1:] + Path("/proc/net/tcp6").read_text().splitlines()[1:]
    rows = [line.split() for line in tables]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes}


@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_ranks_that_meet_on_one_machine_listen_on_loopback_alone(tmp_path: Path, scheme: str) -> None:
    place = f"file:{tmp_path}" if scheme == "file" else free_address()
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(connect, place, rank, 2, patience_s=60) for rank in range(2)]
        groups = [rank.result() for rank in ranks]
        assert listening_addresses() == {"0100007F"}
        assert list(pool.map(lambda group: group.exchange(group.rank + 5), groups)) == [[5, 6], [5, 6]]
    for group in groups:
        group.close()


def test_ranks_that_have_met_need_the_place_no_more(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    with ThreadPoolExecutor(3) as pool:
        ranks = [pool.submit(connect, f"file:{place}", rank, 3, patience_s=60) for rank in range(3)]
        ranks[0].result()
        shutil.rmtree(place)
        groups = [rank.result() for rank in ranks]
        sums = pool.map(lambda group: group.all_reduce(torch.ones(2)).tolist(), groups)
        assert list(sums) == [[3.0, 3.0]] * 3
        assert list(pool.map(lambda group: group.exchange(group.rank), groups)) == [[0, 1, 2]] * 3
    for group in groups:
        group.close()
    assert not place.exists()


@pytest.mark.parametrize(("address", "warnings"), [("127.0.0.1", 0), ("::1", 0), ("192.0.2.7", 1), ("2001:db8::7", 1)])
def test_who_meets_over_a_network_is_warned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, address: str, warnings: int
) -> None:
    monkeypatch.setattr(rendezvous, "_tcp_store", lambda *_: None)
    monkeypatch.setattr(rendezvous, "_own_address_towards", lambda *_: address)
    rendezvous._met_at("leader:5000", 1, 2, timedelta(seconds=1))
    assert [address in record.getMessage() for record in caplog.records] == [True] * warnings


def test_an_address_that_is_not_this_machines_is_no_place_to_meet() -> None:
    # From a range that is kept for documentation.
    with pytest.raises(RendezvousError, match="rank 0 of 2 could not meet the others"):
        connect("192.0.2.1:5000", 0, 2, patience_s=1)


def test_ranks_that_never_come_are_not_waited_for_for_ever(tmp_path: Path) -> None:
    with pytest.raises(RendezvousError, match="start all ranks with one --tp-rendezvous"):
        connect(f"file:{tmp_path}", 0, 2, patience_s=0.1)


class FakeNccl(c10d.ProcessGroupGloo):
    """torch's ProcessGroupNCCL as its sources describe it: it is made of a store, a rank, a size and options, connects
    to a device when it is told to, and computes as gloo does."""

    made: list["FakeNccl"]

    class Options:
        _timeout = timedelta()

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        gloo: Any = c10d.ProcessGroupGloo
        inner = gloo._Options()
        inner._devices = [gloo.create_device(hostname="127.0.0.1")]
        inner._timeout = options._timeout
        super().__init__(store, rank, size, inner)
        self.calls = list[Any]([options._timeout])
        FakeNccl.made.append(self)

    def eager_connect_single_device(self, device: torch.device | None = None) -> None:
        self.calls.append(device)

    def set_timeout(self, timeout: timedelta) -> None:
        self.calls.append(timeout)

    def abort(self) -> None:
        self.calls.append("abort")


@pytest.mark.parametrize("indexed", [True, False])
def test_gpus_are_connected_when_ranks_meet_and_let_go_without_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indexed: bool
) -> None:
    FakeNccl.made = []
    current = list[torch.device]()
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(c10d, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    gpus = [torch.device("cuda", rank) if indexed else torch.device("cuda") for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        ranks = [
            pool.submit(connect, f"file:{tmp_path}", rank, 2, patience_s=60, gpu=gpu) for rank, gpu in enumerate(gpus)
        ]
        groups = [rank.result() for rank in ranks]
        links = [group._device for group in groups if group._device is not None]
        assert len(links) == 2
        # The same operations that carry tensors between GPUs, here over gloo.
        assert [total.tolist() for total in pool.map(lambda link: link.all_reduce(torch.ones(2)), links)] == [
            [2, 2]
        ] * 2
        parts = [torch.full((2, 1), 1.0), torch.full((2, 3), 2.0)]
        gathered = list(pool.map(lambda link, part: link.gather_columns(part, [1, 3]), links, parts))
        assert [None if whole is None else whole.tolist() for whole in gathered] == [[[1, 2, 2, 2]] * 2, None]
    for group in groups:
        group.set_patience(7)
        group.close()
    expected = {0, 1} if indexed else {5}
    assert {device.index for device in current} == expected
    for nccl in FakeNccl.made:
        device = nccl.calls[1]
        assert device.index in expected
        assert nccl.calls == [timedelta(seconds=60), device, timedelta(seconds=7), "abort"]


def test_a_torch_without_nccl_is_told(tmp_path: Path) -> None:
    if distributed.is_nccl_available():
        pytest.skip("this torch has NCCL")
    with ThreadPoolExecutor(2) as pool:
        ranks = [
            pool.submit(connect, f"file:{tmp_path}", rank, 2, patience_s=60, gpu=torch.device("cuda", rank))
            for rank in range(2)
        ]
        for rank in ranks:
            with pytest.raises(RendezvousError, match="this torch has no NCCL, which ranks on GPUs need"):
                rank.result()
