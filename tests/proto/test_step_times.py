"""What a file of step times says of any step, and what is refused as none."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.runtime.models.step_times import (
    Calibration,
    CalibrationError,
    StepShape,
    StepTimeModel,
    TokenTime,
    read_calibration,
)
from octavo.wire.costs import PrefillCosts, StepCosts, SwapCosts


def model(*token_times: tuple[int, float]) -> StepTimeModel:
    return StepTimeModel([TokenTime(*each) for each in token_times], 0.5, 1e-2, 1e-5, 1e-6, 0.25, 3e-3, 2e-3, 1e-3)


TIMES = model((4, 1.0), (8, 1.2), (16, 2.0))
CALIBRATION = Calibration(
    "tiny", "cpu", "bfloat16", 2048, 258, 16, 100, 25, TIMES, 0.02, StepCosts(PrefillCosts(1, 1, 1), SwapCosts(1, 1, 1))
)


@pytest.mark.parametrize(
    ("num_tokens", "seconds"), [(0, 0.0), (1, 1.0), (4, 1.0), (6, 1.1), (8, 1.2), (10, 1.4), (16, 2.0), (116, 12.0)]
)
def test_between_known_numbers_of_tokens_time_is_linear_and_goes_on_so(num_tokens: int, seconds: float) -> None:
    assert TIMES.seconds(StepShape(num_tokens)) == pytest.approx(seconds)


def test_with_one_known_number_of_tokens_all_take_the_same() -> None:
    assert [model((4, 1.0)).seconds(StepShape(count)) for count in (1, 4, 400)] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("shape", "seconds"),
    [
        (StepShape(4, num_sampled=3), 1.0 + 0.5 + 0.03),
        (StepShape(4, context_tokens=1000), 1.01),
        (StepShape(4, prefill_pairs=1000.5), 1.0010005),
        (StepShape(blocks_out=2), 0.25 + 0.006),
        (StepShape(blocks_in=2), 0.25 + 0.004),
        (StepShape(copies=2), 0.25 + 0.002),
        (StepShape(4, blocks_out=1, copies=1), 1.0 + 0.5 + 0.004),
        (StepShape(), 0.0),
    ],
)
def test_every_quantity_costs_what_it_says(shape: StepShape, seconds: float) -> None:
    assert TIMES.seconds(shape) == pytest.approx(seconds)


times = st.lists(st.floats(0.0, 10.0), min_size=1, max_size=6).map(sorted)


@given(times, st.integers(0, 300), st.integers(0, 300))
def test_where_known_times_rise_a_larger_step_takes_no_less(rising: list[float], one: int, other: int) -> None:
    of = model(*zip((1, 2, 4, 16, 64, 100), rising, strict=False))
    low, high = sorted((one, other))
    assert of.seconds(StepShape(low)) <= of.seconds(StepShape(high)) + 1e-9


def test_a_slowed_model_takes_longer_for_every_step_that_computes_and_every_row() -> None:
    slowed = TIMES.slowed(0.1, 0.01)
    for shape in (StepShape(1), StepShape(10, 5, 100), StepShape(600, 1, 0, 1e5)):
        extra = slowed.seconds(shape) - TIMES.seconds(shape)
        assert extra == pytest.approx(0.1 + 0.01 * shape.num_sampled)
    assert slowed.seconds(StepShape(blocks_out=3)) == TIMES.seconds(StepShape(blocks_out=3))


@pytest.mark.parametrize("token_times", [[(4, 1.0), (4, 2.0)], [(8, 1.0), (4, 2.0)]])
def test_known_numbers_of_tokens_must_rise(token_times: list[tuple[int, float]]) -> None:
    with pytest.raises(ValueError, match="rising order"):
        model(*token_times)


def test_what_is_written_can_be_read_by_people_and_by_us(tmp_path: Path) -> None:
    CALIBRATION.write(tmp_path / "c.json")
    assert read_calibration(tmp_path / "c.json") == CALIBRATION
    assert '  "block_size": 16,\n' in (tmp_path / "c.json").read_text(encoding="utf-8")


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"cannot read .*c\.json: No such file"):
        read_calibration(tmp_path / "c.json")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_blocks": 0}, "num_blocks"),
        ({"num_blocks": "many"}, "num_blocks"),
        ({"colour": "red"}, "colour"),
        ({"times": {}}, "token_times"),
        ({"error": -1.0}, "error"),
    ],
)
def test_a_file_of_something_else_is_refused_with_what_is_wrong(
    tmp_path: Path, changes: dict[str, object], why: str
) -> None:
    content = msgspec.to_builtins(CALIBRATION) | changes
    (tmp_path / "c.json").write_bytes(msgspec.json.encode(content))
    with pytest.raises(CalibrationError, match=rf"c\.json is no calibration: .*{why}.*`octavo calibrate`"):
        read_calibration(tmp_path / "c.json")


def test_text_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text("step times", encoding="utf-8")
    with pytest.raises(CalibrationError, match="is no calibration"):
        read_calibration(tmp_path / "c.json")
