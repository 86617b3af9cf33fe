"""The benchmark of the store of KV blocks measures what it says."""

from pathlib import Path

import pytest

from octavo.bench.parts import kv_store
from octavo.bench.parts.kv_store import conversations, measure_hits, measure_memory


def test_it_prints_a_line_for_each_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kv_store.main(["--directory", str(tmp_path), "--mib", "16", "--rounds", "1", "--turns", "5"])
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if "GB in a CPU second" in line]) == 2
    assert len([line for line in lines if line.startswith("blocks of ") and "GB/s" in line]) == 6
    assert len([line for line in lines if line.startswith("  a start takes ")]) == 3
    assert len([line for line in lines if line.startswith("room for ")]) == 3
    assert list(tmp_path.iterdir()) == []


def test_a_turn_asks_for_what_its_conversation_has_said() -> None:
    said = set[int]()
    for again, new in conversations(0, 3, 50):
        assert said.issuperset(again)
        assert said.isdisjoint(new)
        said.update(new)


def test_where_everything_has_room_everything_is_found(tmp_path: Path) -> None:
    hits, writes = measure_hits(tmp_path, 4000, 3, 20)
    assert hits == {"exact LRU": 1.0, "FIFO": 1.0, "the store": 1.0}
    assert writes == 1.0


def test_a_block_takes_memory(tmp_path: Path) -> None:
    assert 64 < measure_memory(tmp_path, 1280) < 1000
