"""What is simulated of a work is compared by answers alone, so many at a time."""

import pytest

from octavo.bench.whole.speculation_simulated import Compared, simulate, tokens_per_s
from octavo.runtime.models.step_times import Calibration, StepTimeModel, TokenTime
from octavo.wire.costs import PrefillCosts, RowCost, StepCosts, SwapCosts
from octavo.workload.job import Job, Transcript

STEP_S = 0.01
TOLD = [number % 7 for number in range(70)]


def calibration() -> Calibration:
    """A worker that takes as long for any step."""
    rows = [RowCost(count, STEP_S) for count in (1, 64)]
    costs = StepCosts(PrefillCosts(STEP_S, 0.0, 0.0), SwapCosts(0.0, 0.0, 0.0), rows)
    times = StepTimeModel([TokenTime(1, STEP_S)], 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    return Calibration("small", "cpu", "bfloat16", 2048, 1000, 16, 500, 100, times, 0.01, costs)


def jobs(count: int) -> list[Job]:
    """Requests whose outputs repeat themselves."""
    prompts = [list(range(20 * number, 20 * number + 20)) for number in range(count)]
    return [Job(float(n), 20, 70, transcript=Transcript(prompt, [TOLD], [])) for n, prompt in enumerate(prompts)]


@pytest.mark.parametrize("batch", [1, 2])
def test_so_many_answers_come_at_a_time(batch: int) -> None:
    """Each plain answer of 70 tokens takes 70 steps; what was prepared before counts for nothing."""
    plain = simulate(jobs(4), batch, calibration(), "off")
    assert tokens_per_s(plain, 4) == pytest.approx(batch / STEP_S, rel=0.05)


def test_what_repeats_itself_is_faster_with_guesses() -> None:
    plain, found = (tokens_per_s(simulate(jobs(3), 1, calibration(), setting), 3) for setting in ("off", "auto"))
    assert found > 2 * plain
    compared = Compared("edit", 1, {"off": 10.0, "auto": 30.0}, {"off": plain, "auto": found}, 5.0)
    assert compared.gains == (3.0, found / plain)
