"""What our arithmetic adds to the loss of a format, on the bundled model."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from octavo.quality.cli import evaluate
from octavo.testing.native import loaded

WINDOWS = 6
# 8 bits for each activation cost a divergence of 0.003 and one top token in 27 here, more than the 0.002 and one in 100
# that are wanted: docs/quantization.md says where it is lost. These find whatever adds to it.
MOST_DIVERGENCE, LEAST_SAME_TOP = 0.004, 0.95


@pytest.mark.deep
@pytest.mark.parametrize("quantization", ["q8_0", "q4_0", "q4_1"])
def test_quantised_weights_predict_nearly_what_they_do_as_numbers(
    quantization: str, bundled_model: Path, tmp_path: Path
) -> None:
    loaded()
    figures = tmp_path / "figures.json"
    options = ["--model", str(bundled_model), "--quantization", quantization, "--windows", str(WINDOWS)]
    result = CliRunner().invoke(evaluate, [*options, "--json", str(figures)])
    assert result.exit_code == 0, result.output
    model, *_ = json.loads(figures.read_bytes()).values()
    own, before = model["distances"]
    assert 0 < own["divergence"]["mean"] <= MOST_DIVERGENCE
    assert own["same_top"]["mean"] >= LEAST_SAME_TOP
    # The bundled weights come from a file in q4_1, so that only a narrower format loses much.
    assert (before["divergence"]["mean"] > 5 * MOST_DIVERGENCE) == (quantization == "q4_0")
