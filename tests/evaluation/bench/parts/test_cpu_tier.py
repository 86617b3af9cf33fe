"""What conversations compute again, with blocks in CPU memory and without."""

import json
from pathlib import Path

from click.testing import CliRunner

from octavo.bench.parts.cpu_tier import main, measure


def test_with_room_for_all_only_what_is_new_is_computed() -> None:
    with_room = measure(4, conversations=8, turns=3, message=48, answer=16)
    without = measure(0, conversations=8, turns=3, message=48, answer=16)
    assert with_room.prompt_tokens == without.prompt_tokens
    assert (without.stored, without.loaded) == (0, 0)
    assert with_room.loaded > 0
    # All new messages; and of each prompt after the first the end of what is known, which fills no block.
    assert 8 * 3 * 48 <= with_room.computed <= 8 * 3 * (48 + 2 * 16)
    assert without.computed > 1.5 * with_room.computed


def test_what_cpu_memory_has_no_room_for_comes_from_a_disk() -> None:
    sizes = {"conversations": 12, "turns": 4, "message": 48, "answer": 16}
    without, with_disk = (measure(1, has_disk=has_disk, **sizes) for has_disk in (False, True))
    assert (without.read, with_disk.prompt_tokens) == (0, without.prompt_tokens)
    assert with_disk.read > 0
    assert 12 * 4 * 48 <= with_disk.computed < 0.8 * without.computed
    assert without.computed - with_disk.computed <= with_disk.read * 16


def test_rows_are_printed_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    few = ["--conversations", "8", "--turns", "2", "--times", "0", "--times", "4", "--json", str(path)]
    result = CliRunner().invoke(main, few, catch_exceptions=False)
    assert "4 x" in result.output
    rows = json.loads(path.read_text())
    assert [(row["times"], row["has_disk"]) for row in rows] == [(0, False), (4, False), (4, True)]
    assert rows[1]["computed"] < rows[0]["computed"]
