"""What our arithmetic adds to the loss of a format, on the bundled model."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from octavo.quality.cli import evaluate
from octavo.testing.native import loaded

WINDOWS = 6
# Of 100 top tokens 99 are wanted, and three are lost: docs/quantization.md says what they would cost.
MOST_DIVERGENCE, LEAST_SAME_TOP = 0.002, 0.96


@pytest.mark.deep
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("quantization", ["q8_0", "q4_0", "q4_1"])
def test_quantised_weights_predict_nearly_what_they_do_as_numbers(
    quantization: str, kv_cache_dtype: str, bundled_model: Path, tmp_path: Path
) -> None:
    loaded()
    figures = tmp_path / "figures.json"
    options = ["--model", str(bundled_model), "--quantization", quantization, "--windows", str(WINDOWS)]
    options += ["--kv-cache-dtype", kv_cache_dtype]
    result = CliRunner().invoke(evaluate, [*options, "--json", str(figures)])
    assert result.exit_code == 0, result.output
    model, *_ = json.loads(figures.read_bytes()).values()
    own, before = model["distances"]
    assert 0 < own["divergence"]["mean"] <= MOST_DIVERGENCE
    assert own["same_top"]["mean"] >= LEAST_SAME_TOP
    # The bundled weights come from a file in q4_1, so that only a narrower format loses much.
    assert (before["divergence"]["mean"] > 5 * MOST_DIVERGENCE) == (quantization == "q4_0")
