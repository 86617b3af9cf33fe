"""Where ranks meet, and on which addresses they listen until then."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch

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
