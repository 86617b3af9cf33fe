import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.cell import __main__ as cell
from octavo.bench.cell.load import Answers, ReplicaTally, Size, busy_shares
from octavo.bench.parts.scheduler_alone import SchedulerAlone, make_request, plans
from octavo.scheduler.core.config import SchedulerConfig
from octavo.wire.sampling import SamplingParams


def test_a_fake_replica_answers_what_the_scheduler_asked() -> None:
    """Of prompts that take one chunk or several, and of answers that end at different steps."""
    alone, answers = SchedulerAlone(SchedulerConfig(max_num_batched_tokens=16), num_blocks=64), Answers()
    for index, length in enumerate((5, 40, 9)):
        request = make_request(str(index), alone.draw_tokens(length), SamplingParams(max_tokens=4 + index))
        alone.submit(request)
    num_sampled = 0
    while alone.core.groups:
        (plan,) = plans(alone.schedule())
        expected = [token.sequence_id for token in alone.next_result().sampled]
        result = answers.to(plan, 20_000)
        assert [token.sequence_id for token in result.sampled] == expected
        num_sampled += len(expected)
        alone.accept(result)
    assert num_sampled == 4 + 5 + 6


def test_waiting_and_looking_late_are_not_busy() -> None:
    tallies = [ReplicaTally(idle_s=0.5), ReplicaTally(late_s=1.0), ReplicaTally()]
    assert busy_shares(tallies, 10.0) == pytest.approx([0.95, 0.9, 1.0])


def test_all_that_can_run_at_once_has_blocks() -> None:
    size = Size(replicas=2, sequences=64, frontends=1, step_s=0.02)
    longest = size.lengths.prompt + size.lengths.longest
    assert size.num_blocks * 0.99 > size.sequences * longest / 16


def test_a_scheduler_that_took_no_tick_is_reported() -> None:
    figures: dict[str, Any] = {field.name: 1 for field in dataclasses.fields(cell.CellRow)}
    assert "a core is used up by 1 replicas" in cell.CellRow(**figures).to_text()
    assert "too few ticks" in cell.CellRow(**{**figures, "scheduler": 0.0}).to_text()


def test_a_small_cell_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "cell.json"
    flags = "--replicas 2 --sequences 4 --step-ms 10 --warm-up 0.2 --seconds 0.4 --no-pin"
    assert cell.main([*flags.split(), "--json", str(report)]) == 0
    assert "2 replicas x 4 sequences, 1 frontends" in capsys.readouterr().out
    [row] = json.loads(report.read_text())
    assert row["steps_per_s"] > 0
    assert row["tokens_per_s"] <= 4 * row["steps_per_s"]
    assert row["busy_least"] <= row["busy"] <= 1
    assert min(row["plan_bytes"], row["result_bytes"], row["deltas_bytes"]) > 0
