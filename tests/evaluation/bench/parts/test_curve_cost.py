from pathlib import Path

import pytest

from octavo.bench.parts import curve_cost
from octavo.runtime.transport.curve_keys import write_keys
from octavo.wire.codec import encode


def test_both_ways_of_a_message_are_measured(tmp_path: Path) -> None:
    write_keys(tmp_path / "keys")
    for keys in (None, tmp_path / "keys"):
        cost = curve_cost.measure(keys, messages=20, rounds=2, sequences=3)
        assert cost.messages_per_s > 0
        assert cost.cpu_us_per_message > 0
        assert cost.message_bytes == len(encode(curve_cost.deltas_of_a_step(3)))


def test_the_command_prints_one_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    curve_cost.main(["--messages", "20", "--rounds", "1"])
    clear, curve = capsys.readouterr().out.splitlines()
    assert clear.startswith("in the clear ")
    assert curve.startswith("CURVE ")
