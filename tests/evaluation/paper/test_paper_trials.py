"""Short trials: what each system does with the same memory, what is remembered, and what is shared."""

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from octavo.paper import lab as labs
from octavo.paper.figures.common import ALL
from octavo.paper.lab import Lab, run_once
from octavo.paper.setups import SETUPS
from octavo.paper.trial import Trial, TrialResult, run
from octavo.simulator.cell import SimulationError

SHORT = Trial("vLLM", "opt-13b", "alpaca", rate=20.0, seconds=6.0)


def test_systems_batch_and_use_memory_in_the_papers_order() -> None:
    results = [run(Trial(system, "opt-13b", "sharegpt", 8.0, 25.0, drained=False)) for system in ALL]
    batched = [result.batched for result in results]
    assert batched == sorted(batched)
    assert batched[-1] > 1.5 * batched[1]
    useful = [result.memory.tokens for result in results if result.memory]
    assert useful == sorted(useful)
    assert len(useful) == len(ALL)


def test_a_trial_is_deterministic_and_its_seed_counts() -> None:
    assert run(SHORT) == run(SHORT)
    assert run(replace(SHORT, seed=1)) != run(SHORT)


def test_shares_of_memory_are_those_of_a_whole() -> None:
    memory = run(Trial("Orca (Pow2)", "opt-13b", "sharegpt", 8.0, 20.0, drained=False)).memory
    assert memory
    assert memory.tokens + memory.reserved + memory.internal + memory.external == pytest.approx(1.0)


def test_more_samples_share_more_of_their_prompt_and_beams_more_than_samples() -> None:
    two, four = (run(replace(SHORT, rate=4.0, n=n)).saved for n in (2, 4))
    beams = run(replace(SHORT, rate=4.0, beam_width=4)).saved
    assert two
    assert four
    assert beams
    assert 0.0 < two < four < beams < 0.75


def test_beams_whose_next_tokens_are_about_as_likely_have_a_common_past_the_sooner() -> None:
    close, apart = (run(replace(SHORT, rate=4.0, beam_width=4, beam_gap=gap)).saved for gap in (0.3, 5.0))
    assert close
    assert apart
    assert close > 1.05 * apart


def test_a_pinned_prefix_is_not_computed_again() -> None:
    translations = Trial("vLLM", "llama-13b", "wmt16", rate=20.0, seconds=6.0, prefix_tokens=341)
    alone, pinned = run(translations), run(replace(translations, pinned=True))
    assert pinned.normalised_latency_s < alone.normalised_latency_s
    with pytest.raises(ValueError, match="shares prefixes"):
        run(replace(translations, pinned=True, system="Orca (Max)"))


def test_blocks_that_cost_time_to_read_cost_the_more_the_smaller_they_are() -> None:
    small, usual, free = (
        run(replace(SHORT, block_size=size, blockwise_reads=reads)).normalised_latency_s
        for size, reads in ((1, True), (16, True), (16, False))
    )
    assert small > usual > free


def test_a_trace_in_which_nothing_happens_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no request comes in 0.001 s"):
        run(replace(SHORT, seconds=0.001))
    with pytest.raises(ValueError, match="no request was answered within"):
        run(Trial("FasterTransformer", "opt-13b", "sharegpt", 20.0, 0.5, drained=False))


def test_what_is_known_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run_once(SHORT, tmp_path)

    def fail(_: Trial) -> TrialResult:
        raise SimulationError("run again")

    monkeypatch.setattr(labs, "run", fail)
    assert run_once(SHORT, tmp_path) == first
    with pytest.raises(SimulationError):
        run_once(replace(SHORT, rate=19.0), tmp_path)
    monkeypatch.setattr(labs, "_code", lambda: b"other code")
    with pytest.raises(SimulationError):
        run_once(SHORT, tmp_path)


def test_results_survive_their_file() -> None:
    result = run(SHORT)
    assert msgspec.json.decode(msgspec.json.encode(result), type=TrialResult) == result


def test_a_search_ends_at_a_rate_that_is_sustained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # What even seconds show.
    monkeypatch.setattr(labs, "LIMIT_S", 0.1)
    with Lab(tmp_path, quick=True) as lab:
        (knee,) = lab.search([replace(SHORT, seconds=180.0)])
    assert knee.rates == sorted(knee.rates)
    by_rate = dict(zip(knee.rates, knee.latencies, strict=True))
    assert by_rate[knee.rate] <= 0.1 < max(knee.latencies)
    assert "1 of 1: vLLM, opt-13b, alpaca, from 20 requests/s" in capsys.readouterr().err


def test_processes_find_what_one_alone_finds(tmp_path: Path) -> None:
    trials = [replace(SHORT, seconds=60.0, system=system) for system in ("vLLM", "Orca (Oracle)", "Orca (Max)")]
    with Lab(tmp_path / "one", quick=True) as lab:
        alone = lab.run(trials)
    with Lab(tmp_path / "two", jobs=2, quick=True) as lab:
        assert lab.run(trials) == alone


@pytest.mark.parametrize("name", ["opt-13b", "opt-66b", "opt-175b"])
def test_servers_have_the_papers_memory(name: str) -> None:
    setup = SETUPS[name]
    assert setup.slots
    assert setup.computed_slots == pytest.approx(setup.slots, rel=0.03)
    spec = setup.spec(block_size=32)
    assert 0 <= setup.slots - spec.num_blocks * 32 < 32
