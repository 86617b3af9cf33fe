"""Tries every architecture that transformers calls a causal language model, and writes down how each ends.

`python -m octavo.testing.small.architecture_sweep --write docs/models.json`: all of them, a few per process, so that
one that crashes or hangs takes no other with it. `--only NAME ...`: these, here, as JSON lines.
"""

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import transformers

from octavo.testing.small.architecture_trial import Trial, try_architecture
from octavo.testing.small.tiny_configs import causal_model_types

_PER_PROCESS, _SECONDS_EACH = 12, 120


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="try these, in this process")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write all results here, as JSON")
    arguments = parser.parse_args()
    if arguments.only:
        for trial in _here(arguments.only):
            print(json.dumps(asdict(trial)), flush=True)
        return
    trials = list(sweep(causal_model_types()))
    print(
        {status: sum(trial.status == status for trial in trials) for status in ("works", "refused", "wrong", "untried")}
    )
    if arguments.write:
        content = {"transformers": transformers.__version__, "trials": [asdict(trial) for trial in trials]}
        arguments.write.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def sweep(names: list[str]) -> Iterator[Trial]:
    """Tries `names` in processes of their own; one that takes its process down is tried alone."""
    for first in range(0, len(names), _PER_PROCESS):
        chunk = names[first : first + _PER_PROCESS]
        done = {trial.model_type: trial for trial in _elsewhere(chunk)}
        for name in chunk:
            if name not in done:
                done.update((trial.model_type, trial) for trial in _elsewhere([name]))
            yield done.get(name, Trial(name, "", "untried", reason="its process died or took too long"))
            print(name, done[name].status if name in done else "died", file=sys.stderr, flush=True)


def _elsewhere(names: list[str]) -> list[Trial]:
    command = [sys.executable, "-W", "ignore", "-m", "octavo.testing.small.architecture_sweep", "--only", *names]
    try:
        output = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=_SECONDS_EACH * len(names), check=False
        ).stdout
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
    return [msgspec.json.decode(line, type=Trial) for line in output.splitlines() if line.endswith(b"}")]


def _here(names: list[str]) -> Iterator[Trial]:
    transformers_logging: Any = transformers.utils.logging
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    for name in names:
        with tempfile.TemporaryDirectory() as directory:
            yield try_architecture(name, Path(directory))


if __name__ == "__main__":
    main()
