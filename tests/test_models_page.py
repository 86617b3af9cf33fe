"""docs/models.md and the README say what the sweep found, and what the sweep found is still so."""

import re
from pathlib import Path

import pytest
import transformers

from octavo.testing.small.architecture_table import PAGE, read_results, render
from octavo.testing.small.architecture_trial import Trial, try_architecture
from octavo.testing.small.tiny_configs import causal_model_types

# One that works and one of each kind of refusal; `python -m octavo.testing.small.architecture_sweep` tries all.
SAMPLE = ["arcee", "bloom", "camembert", "deepseek_v2", "doge", "lfm2", "llama4_text", "mamba", "mimo_v2_flash"]
TRIALS = {trial.model_type: trial for trial in read_results().trials}


def test_the_page_is_what_the_results_give() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(read_results())


def test_the_readme_says_how_many_work() -> None:
    readme = (PAGE.parents[1] / "README.md").read_text(encoding="utf-8")
    works = [trial for trial in TRIALS.values() if trial.status == "works"]
    assert re.findall(r"\[(\d+) architectures\]", readme) == [str(len(works))]


def test_nothing_is_wrong() -> None:
    statuses = [trial.status for trial in TRIALS.values()]
    assert "wrong" not in statuses
    assert "works" in statuses


@pytest.mark.skipif(transformers.__version__ != read_results().transformers, reason="made with another transformers")
def test_all_architectures_are_there() -> None:
    assert sorted(TRIALS) == causal_model_types()


@pytest.mark.parametrize("model_type", SAMPLE)
def test_an_architecture_ends_as_the_page_says(model_type: str, tmp_path: Path) -> None:
    trial = try_architecture(model_type, tmp_path)
    expected = TRIALS[model_type]
    assert (trial.status, trial.reason) == (expected.status, expected.reason)


def test_an_architecture_that_cannot_be_made_small_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("no such key")

    monkeypatch.setattr("octavo.testing.small.architecture_trial.tiny_config", fail)
    assert try_architecture("opt", tmp_path) == Trial(
        "opt", "OPTForCausalLM", "untried", reason="KeyError: 'no such key'"
    )
