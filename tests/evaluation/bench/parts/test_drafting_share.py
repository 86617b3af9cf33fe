"""What speculation adds to a step of the scheduler is measured by pairs; what repeats nothing is planned as without."""

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.parts import drafting_share
from octavo.bench.parts.drafting_share import Interval
from octavo.bench.parts.recorded_answers import CURVES, RecordedReplica, recordings
from octavo.bench.parts.scheduler_alone import plans
from octavo.scheduler.core.config import Speculate
from octavo.scheduler.core.events import Effect
from octavo.wire.codec import encode


def test_a_median_is_between_bounds_that_nineteen_of_twenty_times_hold_the_true_one() -> None:
    assert Interval.of([3.0]) == Interval(3.0, 3.0, 3.0)
    # The least and the largest of six hold it but for one time in 32, those next to them but for more than one in 5.
    assert Interval.of([6.0, 1.0, 5.0, 2.0, 4.0, 3.0]) == Interval(3.5, 1.0, 6.0)
    assert Interval.of([float(each) for each in range(1, 16)]) == Interval(8.0, 4.0, 12.0)


def test_the_command_prints_a_line_for_each_text_and_curve(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    written = tmp_path / "shares.json"
    sizes = ["--sequences", "3", "--prompt", "20", "--answer", "30", "--rounds", "2"]
    assert drafting_share.main([*sizes, "--kinds", "random", "copy", "--json", str(written)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [[k, c, "3"] for k in ("random", "copy") for c in CURVES]
    found = {(each["kind"], each["curve"]): each for each in json.loads(written.read_text())}
    assert found["random", "flat"]["spent"] == 0
    assert found["copy", "flat"]["spent"] > 0
    assert found["copy", "flat"]["token"]["median"] < found["copy", "flat"]["step"]["median"]


class Noted(RecordedReplica):
    """Keeps the bytes of all plans, each with the number of steps that were under way when it was made."""

    def __init__(self, *arguments: Any) -> None:
        self.planned: list[tuple[int, bytes]] = []
        super().__init__(*arguments)

    def schedule(self) -> list[Effect]:
        num_under_way = len(self.replica.outstanding)
        effects = super().schedule()
        self.planned += [(num_under_way, encode(plan)) for plan in plans(effects)]
        return effects


@pytest.mark.parametrize(("kind", "curve"), [("random", "cpu"), ("random", "flat"), ("words", "cpu")])
def test_where_nothing_is_guessed_all_is_planned_to_the_byte_and_as_early_as_without(kind: str, curve: str) -> None:
    """So a worker does the same: all that speculation costs is what the scheduler takes longer."""
    words: dict[str, int] = {}

    def planned(setting: Speculate) -> list[tuple[int, bytes]]:
        recorded = recordings(kind, 64, lambda text: [words.setdefault(each, len(words)) for each in text.split()])
        replica = Noted(recorded, setting, CURVES[curve])
        replica.play()
        return replica.planned

    without = planned("off")
    assert planned("auto") == without
    assert {num_under_way for num_under_way, _ in without} == {0, 1}
