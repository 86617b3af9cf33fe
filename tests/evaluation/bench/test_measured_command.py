"""The experiments on the real engine as a whole, on a tiny model and tiny loads."""

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.measured.__main__ import main
from octavo.testbed.models import write_tiny_model
from octavo.testbed.tiny_model import VOCAB_SIZE, write_byte_model

SIZES = [8, 16, 32]


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
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    write_tiny_model(directory, config)
    return directory


def run(model: Path, directory: Path, experiment: str) -> None:
    options = ["--quick", "--model", str(model), "--dtype", "float32", "--threads", "1", "--json", str(directory)]
    assert main([experiment, *options]) == 0


def figure(directory: Path, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Its settings and rows."""
    found = json.loads((directory / f"measured_{name}.json").read_bytes())
    assert found["machine"]["threads"] == 1
    rows: list[dict[str, Any]] = found["rows"]
    assert all(value > 0 for row in rows for key, value in row.items() if key.endswith(("_ms", "_us", "_x", "_s")))
    return found["settings"], rows


def test_kernels_are_told_by_block_size(model: Path, tmp_path: Path) -> None:
    run(model, tmp_path, "kernel")
    _, rows = figure(tmp_path, "kernel")
    assert [row["block_size"] for row in rows] == [8, 16, 32, 64, 128, 256]
    assert rows[0]["kernel"] == "torch"


def test_latency_is_told_by_block_size_for_both_datasets(model: Path, tmp_path: Path) -> None:
    run(model, tmp_path, "block-sizes")
    settings, rows = figure(tmp_path, "block_sizes")
    assert [(row["dataset"], row["block_size"]) for row in rows] == [
        (dataset, size) for dataset in ("sharegpt", "alpaca") for size in SIZES
    ]
    assert [row["over_default_x"] for row in rows if row["block_size"] == 16] == [1, 1]
    assert settings["sharegpt_rate_per_s"] > 0
    assert settings["alpaca_rate_per_s"] > 0


def test_swapping_and_recomputing_are_told_alone_and_in_whole_runs(model: Path, tmp_path: Path) -> None:
    run(model, tmp_path, "preemption")
    _, overheads = figure(tmp_path, "preemption_overheads")
    assert [row["block_size"] for row in overheads] == SIZES
    _, rows = figure(tmp_path, "preemption")
    assert all(row["swap_preemptions"] and row["recompute_preemptions"] for row in rows)


def test_wider_searches_are_told_with_what_their_beams_share(model: Path, tmp_path: Path) -> None:
    run(model, tmp_path, "beams")
    _, rows = figure(tmp_path, "beams")
    assert [(row["dataset"], row["width"]) for row in rows] == [
        (dataset, width) for dataset in ("alpaca", "sharegpt") for width in (2, 4, 6)
    ]
    assert all(0 < row["saved_share"] < 1 - 1 / row["width"] for row in rows)


def test_prefixes_are_found_where_they_are_shared_and_only_there(model: Path, tmp_path: Path) -> None:
    run(model, tmp_path, "prefixes")
    _, rows = figure(tmp_path, "prefixes")
    cached = {(row["prefix_tokens"], row["variant"]): row["cached_share"] for row in rows}
    assert cached[80, "unshared"] == cached[341, "unshared"] == 0
    # The first request computes what the prefix cache then has; a pinned one is there before.
    assert 0 < cached[80, "cached"] < cached[80, "pinned"] < cached[341, "pinned"] < 1


@pytest.mark.system
def test_each_variant_of_real_processes_runs_beside_the_default(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # They start in a moment and compute nothing.
    monkeypatch.setenv("OCTAVO_DEVICE", "fake")
    run(model, tmp_path, "ablations")
    _, (default, swap) = figure(tmp_path, "ablations")
    assert (default["setting"], default["throughput_x"], default["latency_x"]) == ("default", 1, 1)
    assert (swap["ablation"], swap["setting"], swap["rounds"]) == ("preemption", "swap", 1)
    assert default["rate_per_s"] == swap["rate_per_s"]


def test_an_unknown_experiment_is_refused_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["kernels"])
    assert "there is no experiment kernels; there are kernel, block-sizes" in capsys.readouterr().err
