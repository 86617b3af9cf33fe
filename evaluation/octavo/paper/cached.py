"""Trials whose results are known already are not run again."""

import hashlib
import os
from functools import cache
from pathlib import Path

import msgspec

from octavo.paper.trial import Result, Trial, run

_EVALUATION = Path(__file__).parents[1]
_ROOT = Path(__file__).parents[3]
# What decides a result.
_CODE = (
    _ROOT / "proto" / "octavo" / "wire",
    _ROOT / "scheduler" / "octavo" / "scheduler",
    _EVALUATION / "workload",
    _EVALUATION / "simulator",
    _EVALUATION / "paper" / "baselines",
    *(_EVALUATION / "paper" / name for name in ("systems.py", "setups.py", "sharing.py", "trial.py")),
)


def run_once(trial: Trial, directory: Path) -> Result:
    """Reads the result if the same trial of the same code is known in the directory; otherwise runs it and writes the
    result there."""
    key = hashlib.sha256(_code() + msgspec.json.encode(trial)).hexdigest()[:24]
    path = directory / f"{key}.json"
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=Result)
    result = run(trial)
    # Others may write the same at the same time.
    written = path.with_suffix(f".{os.getpid()}")
    written.write_bytes(msgspec.json.encode(result))
    written.rename(path)
    return result


@cache
def _code() -> bytes:
    """A digest of the code that runs trials."""
    files = sorted(file for each in _CODE for file in ([each] if each.is_file() else each.rglob("*.py")))
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.digest()
