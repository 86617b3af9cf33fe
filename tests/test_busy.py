"""Tests run as on a busy machine: what judges by turns of an event loop or by seconds shows."""

from pathlib import Path

import pytest

from octavo.testing.busy import main

# A worker thread is quicker than an event loop that rests, and a process may be stopped meanwhile.
SUITE = """
import asyncio, subprocess, sys, time

def test_by_seconds():
    for _ in range(20):
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", "import time; time.sleep(0.05)"], check=True)
        assert time.monotonic() - began < {limit_s}

def test_by_turns():
    async def count():
        began, turns = time.monotonic(), 0
        while time.monotonic() - began < 1.0:
            await asyncio.sleep(0)
            turns += 1
        return turns
    assert asyncio.run(count()) < {most_turns}
"""


def run(directory: Path, limit_s: float, most_turns: int) -> int:
    (directory / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    (directory / "test_hasty.py").write_text(SUITE.format(limit_s=limit_s, most_turns=most_turns), encoding="utf-8")
    return main(["--seed", "1", "-q", "-p", "no:cacheprovider", f"--rootdir={directory}", str(directory)])


@pytest.mark.deep
def test_what_judges_by_seconds_fails_and_what_does_not_passes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, limit_s=3600.0, most_turns=5000) == 0
    assert "2 passed" in capfd.readouterr().out
    assert run(tmp_path, limit_s=0.2, most_turns=5000) == 1
    said = capfd.readouterr().out
    assert "1 failed, 1 passed" in said
    assert "test_by_seconds" in said
