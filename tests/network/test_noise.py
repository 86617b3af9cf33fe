"""Messages are lost and late, connections end: streams are slow then, and right."""

import pytest

from octavo.chaos.network.noise import WEATHERS, Weather, run

pytestmark = pytest.mark.system


def test_streams_are_right_over_bad_wires() -> None:
    weathers = {
        "delay": Weather(delay_s=0.2, questions=1),
        "loss": Weather({"frontends": 0.2}, questions=1),
        "resets": WEATHERS["resets"],
    }
    report = run(weathers)
    assert report.faults == []
    assert report.whole == 8 * (1 + 1 + 40)
    assert report.figures["frontends_messages_lost"] >= 1
    assert report.figures["delay answer_p50_s"] > 0.8
