"""Questions to a process of its own, and what becomes of its faults."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.bench import systems
from octavo.bench.child import ChildError, MeasuredChild

SCRIPT = """
import os, sys
sys.path[:0] = {paths!r}
from octavo.bench.child import serve

def answers():
    print("loading")
    return {{"double": lambda x: (print("computing"), 2 * x)[1], "exit": lambda status: os._exit(status)}}

{begin}
sys.exit(serve(answers))
"""


def command(directory: Path, begin: str = "") -> list[str | Path]:
    script = directory / "script.py"
    script.write_text(SCRIPT.format(paths=[path for path in sys.path if path.endswith("evaluation")], begin=begin))
    return [sys.executable, script]


@pytest.fixture
def child(tmp_path: Path) -> Iterator[MeasuredChild]:
    child = MeasuredChild(command(tmp_path), tmp_path / "log", MEANING="42")
    yield child
    child.close()


def test_a_child_answers_whatever_it_prints_meanwhile(child: MeasuredChild, tmp_path: Path) -> None:
    assert child.ask("double", 21) == 42
    assert child.ask("double", "ab") == "abab"
    assert child.start_s > 0
    child.close()
    assert (tmp_path / "log").read_text().split() == ["loading", "computing", "computing"]


def test_an_error_comes_back_and_the_child_lives_on(child: MeasuredChild) -> None:
    with pytest.raises(ChildError, match="TypeError"):
        child.ask("double", None)
    with pytest.raises(ChildError, match="KeyError: 'triple'"):
        child.ask("triple")
    assert child.ask("double", 1) == 2


def test_a_child_that_ends_is_an_error_every_time(child: MeasuredChild) -> None:
    for _ in range(2):
        with pytest.raises(ChildError, match="ended early: loading"):
            child.ask("exit", 3)


def test_a_child_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(ChildError, match="no such luck"):
        MeasuredChild(command(tmp_path, "raise RuntimeError('no such luck')"), tmp_path / "log")


@pytest.mark.parametrize("script", ["openvino_peer.py", "llama_cpp_peer.py"])
def test_a_peer_starts_without_octavo_in_its_environment(script: str, tmp_path: Path) -> None:
    for package in ("numpy", "openvino", "openvino_genai"):
        (tmp_path / f"{package}.py").write_text("")
    peer = Path(systems.__file__).with_name(script)
    code = f"import runpy, sys; sys.path.append(sys.argv[1]); runpy.run_path({str(peer)!r}, run_name='peer')"
    # -I and -S leave the standard library alone, as far as Octavo goes.
    command = [sys.executable, "-I", "-S", "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
