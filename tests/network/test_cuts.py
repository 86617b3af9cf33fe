"""Links between hosts fail: every stream gets what it would have got, and goes on soon after."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.chaos.network.cuts import ALL, named
from octavo.testbed.netns import unavailable
from octavo.testing.depth import deep

pytestmark = pytest.mark.system


# After the second the frontend has given the connection up, and its client must find that out.
FEW = ["scheduler/worker:both:2", "client/frontend:back:3.4"]


@pytest.mark.parametrize("cuts", [FEW, *deep([*FEW, "frontend/scheduler:both:1", "scheduler/worker:back:1"])], ids=len)
def test_streams_survive_links_that_are_cut(cuts: list[str], tmp_path: Path) -> None:
    if why := unavailable():
        pytest.skip(why)
    # How soon they go on, `make test-long` measures; here only that they do.
    arguments = ["--patience", "60", "--json", str(tmp_path / "report.json")]
    command = [sys.executable, "-m", "octavo.chaos.network", "cuts", *cuts, *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads((tmp_path / "report.json").read_text())["cuts"]
    assert report["faults"] == []
    assert report["whole"] > 0
    for cut in cuts:
        assert report["figures"][f"{cut} streams"] > 0, "a cut that nobody feels proves nothing"


def test_every_cut_has_a_name_of_its_own() -> None:
    assert [named(str(cut)) for cut in ALL] == ALL
    assert len({str(cut) for cut in ALL}) == len(ALL)


@pytest.mark.parametrize("name", ["", "frontend/scheduler", "frontend/worker:both:1", "client/frontend:up:1"])
def test_a_cut_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is no cut"):
        named(name)
