"""Cases in their order and within a budget, and statistics of what they measure."""

from collections.abc import Callable, Iterator

import pytest
import torch

from octavo.bench.gpu.__main__ import all_cases
from octavo.bench.gpu.cases import (
    FIRST,
    Budget,
    CaseOutcome,
    CaseResult,
    Goal,
    GpuCase,
    HeldModel,
    NotMeasured,
    Samples,
    absent,
    chosen,
    in_order,
    run_all,
    time_limit,
)
from octavo.bench.gpu.floors import NOMINAL, DeviceWork
from octavo.bench.gpu.machine import GpuMachine
from octavo.bench.gpu.timing import Contenders, race

TARGET = Goal("figure", "x", 2.0, 1.0)
CPU = torch.device("cpu")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def case(goal: str, seconds: float = 1.0, held: HeldModel | None = None, modules: tuple[str, ...] = ()) -> GpuCase:
    return GpuCase(goal, "part", TARGET, lambda machine: CaseResult(1.5), (), seconds, held, modules)


def run(
    cases: list[GpuCase], clock: Clock, seconds: float, measure: Callable[[GpuCase], CaseResult], holds: str = ""
) -> list[CaseOutcome]:
    return list(run_all(cases, Budget(seconds, clock), NOMINAL, measure, lambda name: name == holds))


def test_the_most_wanted_goals_come_first_and_the_others_as_written() -> None:
    ordered = in_order([case(goal) for goal in ("K2", "E1", "R2", "K1", "A", "R1", "K4", "R3", "K1")])
    assert [each.goal for each in ordered] == ["K1", "K1", "K4", "R1", "R2", "R3", "E1", "K2", "A"]


def test_every_goal_has_cases_and_all_titles_differ() -> None:
    goals = {"K1", "K2", "K4", "K5", "K6", "K7", "K8", "K9", "K10", "K11", "K12", "K13", "S1", "S2", "S3", "S4"}
    goals |= {"R1", "R2", "R3", "R4", "R5", "E1", "E2", "E3", "D1", "D2"}
    cases = all_cases(quick=False)
    assert {each.goal for each in cases} == goals
    assert list(dict.fromkeys(each.goal for each in cases))[: len(FIRST)] == list(FIRST)
    assert len({each.title for each in cases}) == len(cases)
    # The most wanted all fit into one call, each model started where it is first needed.
    started, seconds = "", 0.0
    for each in (each for each in cases if each.goal in FIRST):
        starts = each.held is not None and each.held.name != started
        seconds += each.seconds + (each.held.start_s if each.held and starts else 0.0)
        started = each.held.name if each.held else started
    assert seconds < 540


def test_goals_are_chosen_by_name() -> None:
    cases = [case("K1"), case("R1"), case("K1")]
    assert chosen(cases, []) == cases
    assert chosen(cases, ["K1"]) == [cases[0], cases[2]]
    with pytest.raises(ValueError, match="there is no goal K3; there are K1, R1"):
        chosen(cases, ["K1", "K3"])


def test_what_does_not_fit_into_the_budget_is_skipped_and_what_does_is_measured() -> None:
    clock = Clock()

    def measure(measured: GpuCase) -> CaseResult:
        clock.now += measured.seconds
        return CaseResult(1.5)

    outcomes = run([case("A", 6.0), case("B", 5.0), case("C", 3.0)], clock, 10.0, measure)
    assert [bool(each.measured) for each in outcomes] == [True, False, True]
    assert outcomes[1].skipped == "it takes about 5 s, and 4 s are left"


@pytest.mark.parametrize(("holds", "fits"), [("", False), ("model", True)])
def test_a_start_counts_only_where_it_is_needed(holds: str, fits: bool) -> None:
    [outcome] = run([case("A", 5.0, HeldModel("model", 10.0))], Clock(), 12.0, lambda _: CaseResult(1.5), holds)
    assert bool(outcome.measured) is fits


def test_a_case_that_fails_loses_no_other() -> None:
    def measure(measured: GpuCase) -> CaseResult:
        if measured.goal == "A":
            raise RuntimeError("no such luck")
        if measured.goal == "B":
            raise NotMeasured("no peer is here")
        return CaseResult(1.5)

    failed, skipped, measured = run([case("A"), case("B"), case("C")], Clock(), 10.0, measure)
    assert "no such luck" in failed.failed
    assert "Traceback" in failed.failed
    assert skipped.skipped == "no peer is here"
    assert measured.measured == CaseResult(1.5)


def test_what_cannot_be_imported_is_named_and_nothing_is_run() -> None:
    [outcome] = run(
        [case("A", modules=("torch", "no_such_module.part"))], Clock(), 10.0, lambda _: pytest.fail("it ran")
    )
    assert outcome.skipped == "no_such_module.part cannot be imported"
    assert absent(["json", "torch.nn", "neither", "torch.neither"]) == ["neither", "torch.neither"]


def spin(limit: float, kept: float | None = None) -> None:
    with time_limit(limit):
        if kept is not None:
            with time_limit(kept):
                pass
        while True:
            pass


@pytest.mark.parametrize("kept", [None, 30.0])
def test_what_takes_too_long_is_ended_whatever_other_limits_were_kept(kept: float | None) -> None:
    with pytest.raises(TimeoutError, match="it was given 0 s"):
        spin(0.02, kept)


def test_a_floor_is_made_of_measured_rates() -> None:
    timed = GpuCase("A", "", TARGET, lambda machine: CaseResult(1.5), (DeviceWork(bytes=NOMINAL.copy_bytes_per_s),) * 2)
    [outcome] = run([timed], Clock(), 10.0, lambda _: CaseResult(1.5))
    assert outcome.floor_s == pytest.approx(2.0)


def test_a_sample_is_a_median_and_its_spread() -> None:
    sample = Samples.of([5.0, 1.0, 2.0, 4.0, 3.0, 11.0, 6.0, 8.0, 7.0, 10.0, 9.0])
    assert sample == Samples(median=6.0, low=2.0, high=10.0, count=11)
    assert sample.spread == pytest.approx(8 / 6)
    assert Samples.of([2.0]) == Samples(2.0, 2.0, 2.0, 1)
    with pytest.raises(ValueError, match="nothing was measured"):
        Samples.of([])


@pytest.mark.parametrize(
    ("at_least", "value", "verdict"),
    [
        (False, 0.9, "stretch"),
        (False, 1.5, "goal"),
        (False, 2.5, "missed"),
        (True, 2.5, "stretch"),
        (True, 0.9, "missed"),
    ],
)
def test_a_target_says_what_was_reached(at_least: bool, value: float, verdict: str) -> None:
    bounds = (1.0, 2.0) if at_least else (2.0, 1.0)
    assert Goal("figure", "x", *bounds, at_least=at_least).verdict(value) == verdict


def test_contenders_run_in_turns_and_one_that_cannot_is_missing() -> None:
    order = list[str]()

    def unable() -> list[Callable[[], object]]:
        raise RuntimeError("not on this machine")

    contenders: Contenders = {
        "first": [lambda: order.append("a"), lambda: order.append("b")],
        "unable": unable,
        "last": [lambda: order.append("c")],
    }
    result = race(contenders, CPU, seconds=0.0)
    assert set(result.samples) == {"first", "last"}
    assert result.missing == {"unable": "RuntimeError: not on this machine"}
    assert result.best("last") == "last"
    assert result.best("unable") is None
    turns = [name for name, before in zip(order, ["", *order], strict=False) if name != before]
    # Both inputs of the first by turns, and then the other.
    assert turns.count("c") > 5
    assert order.count("a") == order.count("b")


def test_the_first_contender_must_run() -> None:
    def unable() -> list[Callable[[], object]]:
        raise RuntimeError("not on this machine")

    with pytest.raises(RuntimeError, match="not on this machine"):
        race({"ours": unable}, CPU)


class Kept:
    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def machine() -> Iterator[GpuMachine]:
    machine = GpuMachine(CPU, Budget(10.0))
    yield machine
    machine.release()


def test_what_is_held_is_shared_until_something_else_is_held(machine: GpuMachine) -> None:
    first = machine.hold(HeldModel("first", 1.0), Kept)
    assert machine.hold(HeldModel("first", 1.0), Kept) is first
    assert machine.holds("first")
    second = machine.hold(HeldModel("second", 1.0), Kept)
    assert (first.closed, second.closed) == (1, 0)
    assert not machine.holds("first")
    machine.release()
    machine.release()
    assert second.closed == 1


def test_what_fails_to_start_is_not_held(machine: GpuMachine) -> None:
    first = machine.hold(HeldModel("first", 1.0), Kept)
    with pytest.raises(ZeroDivisionError):
        machine.hold(HeldModel("second", 1.0), lambda: 1 / 0)  # type: ignore[type-var]
    assert first.closed == 1
    assert not machine.holds("second")
