"""The benchmark as a whole, on a tiny model and tiny cases."""

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.__main__ import main
from octavo.bench.workloads import NAMES
from octavo.testbed.models import write_tiny_model
from octavo.testbed.tiny_model import VOCAB_SIZE, write_byte_model
from octavo.testing.depth import deep

SYSTEMS = ["worker alone", "all processes"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights and a tokenizer."""
    from transformers import LlamaConfig

    directory = tmp_path_factory.mktemp("model")
    write_byte_model(directory)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    write_tiny_model(directory, config)
    return directory


@pytest.mark.system
@pytest.mark.parametrize("cases", deep("ab", "abcde"))
def test_every_case_runs_everywhere_and_is_reported(
    cases: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [name for name in NAMES if name[0] in cases]
    path = tmp_path / "report.json"
    options = ["--model", str(model), "--formats", "fp32", "--threads", "1", "--repeat", "2", "--quick", "--profile"]
    assert main([*options, "--cases", *cases, "--json", str(path)]) == 0
    text, progress = capsys.readouterr()
    assert progress.count("round 2:") == len(names) * len(SYSTEMS)
    for name in ("a, time per token", "a, first token", "b, output", "c, prompts", "d, all", "d-warm, all", "e, all"):
        assert (f"\n{name} (" in text) == (name.partition(",")[0] in names)
    assert "a decode step, profiled" in text
    assert "\ngRPC, 64 streams, steps of 40 ms" in text
    check_report(json.loads(path.read_bytes()), names)


def check_report(report: dict[str, Any], names: list[str]) -> None:
    assert [(runs["name"], runs["threads"]) for runs in report["runs"]] == [(name, 1) for name in SYSTEMS]
    alone, whole = report["runs"]
    for runs in (alone, whole):
        assert {name: len(several) for name, several in runs["measurements"].items()} == dict.fromkeys(names, 2)
        assert runs["start_s"] > 0
        assert runs["memory"]["peak"] > alone["memory"]["kv"] > 0
    # What the worker did is what had been planned; the second round began with a cache that was no help.
    for name, steps in report["steps"].items():
        assert {run["steps"] for run in alone["measurements"][name]} == {len(steps)}
    # So few tokens may take less than the kernel counts.
    assert [cost["load"]["streams"] for cost in report["token_costs"]] == [1, 64]
    assert all(cost["scheduler_wake_ups"] > 0 and cost["token_ms"] > 0 for cost in report["token_costs"])
    assert all(row["over_floor"] > 0 for figure in report["figures"] for row in figure["rows"])
    assert len(report["yardsticks"]["1"]) == 2
