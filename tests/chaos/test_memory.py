"""Whether memory grows is told by a line through its samples, and how sure that line is."""

import random
from pathlib import Path

import pytest

from octavo.chaos.memory import steepest_slope
from octavo.chaos.report import CampaignReport


def test_a_line_has_its_slope() -> None:
    assert steepest_slope([0, 900, 1800, 3600], [10, 11, 12, 14]) == pytest.approx(4.0)


def test_noise_makes_the_bound_looser_and_more_samples_tighter() -> None:
    noise = random.Random(1)
    values = [20 + noise.uniform(-1, 1) for _ in range(400)]
    few = steepest_slope(list(range(0, 400, 10)), values[:40])
    many = steepest_slope(list(range(0, 4000, 10)), values)
    assert 0 < many < few


def test_a_report_takes_the_place_of_its_campaigns_older_one(tmp_path: Path) -> None:
    file = tmp_path / "reports.json"
    for name, count in (("kill", 1), ("leave", 2), ("kill", 3)):
        CampaignReport(name, count, 1.0, 10, {}, {}, []).keep(file)
    text = file.read_text()
    assert text.count('"campaign": "kill"') == 1
    assert '"count": 3' in text
    assert '"count": 2' in text
    assert '"count": 1' not in text
