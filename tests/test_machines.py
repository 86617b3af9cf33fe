"""The tests under other machines' arithmetic: what is run, and what is told of it."""

from pathlib import Path

import pytest

from octavo.testing import machines
from octavo.testing.machines import SETTINGS, Setting, main, outcomes

SEEN = """
import os

def test_blas():
    assert os.environ.get("OPENBLAS_CORETYPE") in (None, "SkylakeX")

def test_others():
    assert os.environ.get("ONEDNN_MAX_CPU_ISA") != "SSE41"

def test_threads():
    assert os.environ["OMP_NUM_THREADS"] == "1"
"""


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of a suite with a test that fails under other kernels of OpenBLAS than SkylakeX."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    Path("pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    Path("test_seen.py").write_text(SEEN, encoding="utf-8")
    return "test_seen.py"


def test_a_test_that_fails_under_one_setting_is_named_with_it(
    suite: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machines, "cpu_flags", lambda: frozenset({"avx2", "fma"}))
    only = ["as it is", "OPENBLAS_CORETYPE=Haswell", "OPENBLAS_CORETYPE=SkylakeX"]
    assert main(["--only", *only, "--", suite]) == 1
    head, plain, haswell, failed, skylake = capsys.readouterr().out.splitlines()
    assert head.split() == ["passed", "failed", "seconds"]
    assert plain.split()[3:5] == ["3", "0"]
    assert haswell.split()[1:3] == ["2", "1"]
    assert failed.strip() == "test_seen::test_blas"
    assert skylake.endswith("skipped: this CPU has no avx512bw, avx512dq, avx512f, avx512vl")


def test_all_passing_is_success(suite: str) -> None:
    assert main(["--only", "as it is", "--", suite]) == 0


def test_what_pytest_cannot_run_is_no_success(suite: str) -> None:
    [outcome] = outcomes([Setting()], ["no_such_folder"], frozenset())
    assert not outcome.good
    assert outcome.trouble


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(SystemExit):
        main(["--only", "OPENBLAS_CORETYPE=Nehalem"])


def test_settings_differ() -> None:
    assert len({str(setting) for setting in SETTINGS}) == len(SETTINGS)
