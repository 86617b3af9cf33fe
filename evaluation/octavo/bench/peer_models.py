"""Keeps what peers make of a model in their own environment. Only the standard library is used here."""

import hashlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path


def kept(model: Path, name: str, make: Callable[[Path], None]) -> Path:
    """Returns the file or directory `name` of `model`, which `make` has written to the path that it was given, now or
    in another call; a model with other weights has other files."""
    digest = hashlib.sha256((model / "config.json").read_bytes())
    for weights in sorted(model.glob("*.safetensors")):
        digest.update(f"{weights.resolve()} {weights.stat().st_size} {weights.stat().st_mtime_ns}".encode())
    path = Path(sys.prefix) / "octavo-models" / digest.hexdigest()[:16] / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        make(partial)
        partial.rename(path)
    return path
