"""Runs the tests that docs/known_pains.md names: all of them, or that of one row.

`python -m tests.known_pains [NAME]` is what `make pain` calls.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "known_pains.md"
_ISSUE_ROW: Final = re.compile(r"^\| `([a-z-]+)` \| \[", re.MULTILINE)
_TEST_ROW: Final = re.compile(r"^\| `([a-z-]+)` \| `(tests/[^`]+)` \|$", re.MULTILINE)


def named() -> list[str]:
    """Returns the names of the pains, in the order of the page."""
    return _ISSUE_ROW.findall(PAGE.read_text(encoding="utf-8"))


def commands() -> dict[str, list[str]]:
    """Returns what is handed to pytest for each pain, by its name."""
    rows: list[tuple[str, str]] = _TEST_ROW.findall(PAGE.read_text(encoding="utf-8"))
    return {name: shlex.split(arguments) for name, arguments in rows}


def run(arguments: Sequence[str], *options: str) -> subprocess.CompletedProcess[str]:
    """Runs pytest on what a row names, and returns how that went, with its output if `options` ask for nothing else."""
    command = [sys.executable, "-m", "pytest", "-q", *options, *arguments]
    return subprocess.run(command, cwd=ROOT, text=True, check=False, capture_output=bool(options))


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: 0, or 1 if a test fails, or 2 for a name that the page has not."""
    found = commands()
    if unknown := set(arguments) - found.keys():
        print(f"no pain is called {min(unknown)!r}; there are {', '.join(found)}", file=sys.stderr)
        return 2
    failed = []
    for name in arguments or found:
        print(f"-- {name}: {shlex.join(found[name])}", flush=True)
        if run(found[name]).returncode:
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
