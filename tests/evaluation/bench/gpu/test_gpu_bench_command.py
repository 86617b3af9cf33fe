"""`python -m octavo.bench.gpu` as it is called, with a GPU and without one."""

import json
from pathlib import Path

import pytest
import torch

from octavo.bench.gpu import peers
from octavo.bench.gpu.__main__ import NO_DEVICE, main

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@without_gpu
def test_without_a_device_it_says_so_and_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.json"
    assert main(["--out", str(out)]) == NO_DEVICE
    said, complaint = capsys.readouterr()
    assert complaint.startswith("octavo.bench.gpu: no CUDA device")
    assert not said
    assert not out.exists()


def test_a_dry_run_lists_every_case_with_its_floor_and_the_peers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run"]) == 0
    text = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "K1 B=64, ctx 2048 3 s 125 us >= 80 / 90 %" in lines
    assert "R1 qwen3-8b, B=256, ctx 1024 98 s 14 ms <= 1.4 / 1.25 x" in lines
    assert any(line.startswith("E1 qwen3-8b, 256 x 1024/1024") for line in lines)
    here, not_here = lines[-2:]
    for name, found in peers.found().items():
        assert name in (here if found else not_here)


def test_an_unknown_goal_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "K1,K3", "--dry-run"]) == 2
    assert "there is no goal K3" in capsys.readouterr().err


def test_a_rehearsal_measures_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In Triton's interpreter, where there is no GPU: that all of it fits together."""
    out = tmp_path / "report.json"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    only = "K4,K8,K9,S1"
    assert main(["--quick", "--device", device, "--only", only, "--out", str(out)]) == 0
    text, progress = capsys.readouterr()
    report = json.loads(out.read_bytes())
    assert [case["goal"] for case in report["cases"]] == ["K4", "K8", "K9", "K9", "S1", "S1"]
    for case in report["cases"]:
        assert case["value"] > 0, case
        assert f"{case['goal']} {case['part']}" in text
        assert f"{case['goal']} {case['part']}" in progress
    assert all(sample["median"] > 0 for sample in report["ceilings"].values())
