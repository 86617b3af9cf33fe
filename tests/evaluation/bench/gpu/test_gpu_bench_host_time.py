"""`python -m octavo.bench.gpu.host_time`, in its smallest size."""

import os
import subprocess
import sys

import pytest
import torch

from octavo.bench.gpu import host_time

SMALLEST = ["--sequences", "1", "--chunks", "0", "5", "--layers", "1", "--repeats", "1"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device: the interpreter is off")
def test_it_measures_decodes_and_chunks_of_prompts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In Triton's interpreter, which computes each kernel, over a short context: that all of it fits together."""
    monkeypatch.setattr(host_time, "_CONTEXT", 120)
    monkeypatch.setattr(host_time, "_WARM_UPS", 0)
    # What no product has written may be no numbers, of which the interpreter warns.
    monkeypatch.setattr(
        host_time, "_no_product", lambda inputs, weight, bias=None: inputs.new_zeros(len(inputs), len(weight))
    )
    host_time.main(SMALLEST)
    _check(capsys.readouterr().out)


@pytest.mark.deep
def test_as_it_is_called_it_compiles_what_it_does_not_launch() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "octavo.bench.gpu.host_time", *SMALLEST]
    environment["PYTHONPATH"] = ":".join(filter(None, sys.path))
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    _check(process.stdout)


def _check(printed: str) -> None:
    head, *lines = printed.splitlines()
    assert head.split(" | ")[0] == "sequences"
    found = [[float(field) for field in line.split(" | ")] for line in lines]
    assert [fields[:2] for fields in found] == [[1, 0], [1, 5]]
    for _, _, captured_us, layer_us in found:
        assert captured_us > 0 < layer_us
