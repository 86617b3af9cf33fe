"""The benchmark of KV events measures what it says."""

import pytest

from octavo.bench.parts import kv_events_cost
from octavo.bench.parts.kv_events_cost import Load


def test_blocks_are_told_while_both_sides_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Load(sequences=4, prompt=48, shared=16, answer=16, budget=64)
    monkeypatch.setattr(kv_events_cost, "_STEPS_OF_A_BATCH", 4)
    cost = kv_events_cost.measure(load, steps=40)
    assert cost.off_us > 0
    assert cost.on_us > 0
    assert cost.blocks > 0


def test_it_prints_a_line_for_each_load(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(kv_events_cost, "LOADS", [Load(sequences=2, prompt=32, shared=0, answer=4, budget=64)])
    kv_events_cost.main(["--steps", "5"])
    assert "2 sequences, 32+4 tokens" in capsys.readouterr().out
