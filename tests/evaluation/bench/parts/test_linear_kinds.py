"""The table of linear layers by Octavo's kernels and by oneDNN."""

import pytest
import torch

from octavo.bench.parts.linear_kinds import main
from octavo.testing.native import loaded, threads
from octavo.worker.models.linear import prepacking_available


def test_each_size_has_a_line_for_each_number_of_rows(capsys: pytest.CaptureFixture[str]) -> None:
    library = loaded()
    if not prepacking_available(torch.bfloat16):
        pytest.skip("this torch or CPU does not prepack bfloat16")
    arguments = ["--sizes", "output", "qkv", "--rows", "1", "3", "--threads", "1", "--rounds", "1", "--weights", "1"]
    with threads(1):
        main(arguments)
    head, *lines = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head[1].rstrip(",") == library.variant
    assert [cells[:2] for cells in lines] == [["output", "1"], ["output", "3"], ["qkv", "1"], ["qkv", "3"]]
    for _, _, ours, theirs, _ in lines:
        assert float(ours) > 0
        assert float(theirs) > 0
