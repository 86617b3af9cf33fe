"""Writes the generated code beside the .proto files; `--check` only says whether it is current."""

import sys
import tempfile
from pathlib import Path

PACKAGE = Path(__file__).parent
IMPORT_ROOT = PACKAGE.parents[1]


def main() -> int:
    """Exit status 0, or 1 if `--check` found a difference."""
    if sys.argv[1:] == ["--check"]:
        return _check()
    _generate(IMPORT_ROOT)
    return 0


def _check() -> int:
    with tempfile.TemporaryDirectory() as directory:
        _generate(Path(directory))
        fresh = {path.name: path.read_bytes() for path in (Path(directory) / "octavo" / "v1").iterdir()}
    committed = {path.name: path.read_bytes() for path in PACKAGE.glob("*_pb2*.py*")}
    if fresh == committed:
        return 0
    stale = sorted(name for name in fresh | committed if fresh.get(name) != committed.get(name))
    print(f"not what the .proto files generate: {', '.join(stale)}; run `make proto`", file=sys.stderr)
    return 1


def _generate(output: Path) -> None:
    # A development dependency, and slow to import.
    from grpc_tools import protoc

    sources = [str(path.relative_to(IMPORT_ROOT)) for path in sorted(PACKAGE.glob("*.proto"))]
    well_known = Path(protoc.__file__).parent / "_proto"
    flags = [f"--{kind}_out={output}" for kind in ("python", "pyi", "grpc_python")]
    if protoc.main(["protoc", f"-I{IMPORT_ROOT}", f"-I{well_known}", *flags, *sources]) != 0:
        raise SystemExit("protoc failed")


if __name__ == "__main__":
    raise SystemExit(main())
