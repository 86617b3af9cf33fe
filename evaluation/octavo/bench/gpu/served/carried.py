"""Carries the packages that a machine with a GPU lacks: `python -m octavo.bench.gpu.served.carried fetch`, then
`unpack`.

Such a machine often has a CUDA build of torch, Triton and transformers, and no way to the network. `fetch` downloads
what else Octavo's tests and benches of a GPU need, where there is a network, in the versions of constraints.txt; the
folder is carried over. `unpack` lays the packages out there, for PYTHONPATH: beside what is installed, which stays.
"""

import argparse
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

# Both are ignored by git.
WHEELS, PACKAGES = Path("build/gpu-wheels"), Path("build/gpu-packages")
NAMES = (
    "gguf",
    "googleapis-common-protos",
    "grpcio",
    "grpcio-health-checking",
    "grpcio-reflection",
    "grpcio-status",
    "llguidance",
    "msgspec",
    "protobuf",
    "pytest-asyncio",
    "python-json-logger",
    "pyzmq",
    "starlette",
    "uvicorn",
)
PYTHON = "3.12"
# None of them alone has wheels of all.
_PLATFORMS = ("manylinux2014", "manylinux_2_17", "manylinux_2_26", "manylinux_2_28", "manylinux_2_31")
_CONSTRAINTS = Path(__file__).parents[5] / "constraints.txt"


class CarriedError(Exception):
    """Packages that cannot be had, or not be laid out."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="octavo.bench.gpu.served.carried", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    fetching = commands.add_parser("fetch", help="download the wheels")
    fetching.add_argument("--python", default=PYTHON, help=f"of the machine with the GPU (default {PYTHON})")
    fetching.add_argument("--machine", default="x86_64", help="its processor: x86_64 or aarch64")
    unpacking = commands.add_parser("unpack", help="lay them out")
    unpacking.add_argument("--into", type=Path, default=PACKAGES)
    for command in (fetching, unpacking):
        command.add_argument("--wheels", type=Path, default=WHEELS)
    options = parser.parse_args(arguments)
    try:
        if options.command == "fetch":
            found = fetch(options.wheels, options.python, options.machine)
            size = sum(wheel.stat().st_size for wheel in found) / 1e6
            print(f"{len(found)} wheels, {size:.1f} MB, in {options.wheels}")
        else:
            names = unpack(options.wheels, options.into)
            print(f"{len(names)} packages in {options.into}: put it on PYTHONPATH")
    except CarriedError as error:
        print(f"octavo.bench.gpu.served.carried: {error}", file=sys.stderr)
        return 1
    return 0


def fetch(into: Path, python: str = PYTHON, machine: str = "x86_64") -> list[Path]:
    """Downloads all wheels, instead of what is there. Raises `CarriedError` if one cannot be had."""
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    command = pip_command(into, requirements(_CONSTRAINTS.read_text(encoding="utf-8")), python, machine)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"pip ended with {done.returncode}"]
        raise CarriedError(said[-1])
    return sorted(into.glob("*.whl"))


def requirements(constraints: str) -> list[str]:
    """Lists each package with the version that `constraints` give it."""
    pinned = {_plain(line.partition("==")[0]): line.strip() for line in constraints.splitlines() if "==" in line}
    if missing := [name for name in NAMES if _plain(name) not in pinned]:
        raise CarriedError(f"constraints.txt has no {', '.join(missing)}")
    return [pinned[_plain(name)] for name in NAMES]


def pip_command(into: Path, wanted: list[str], python: str, machine: str) -> list[str]:
    """Makes pip's command, without what these packages depend on: torch and all else is there, in builds that fit each
    other."""
    tag = "cp" + python.replace(".", "")
    choices = [
        *(("--platform", f"{platform}_{machine}") for platform in _PLATFORMS),
        *(("--abi", abi) for abi in (tag, "abi3", "none")),
    ]
    return [
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--dest", str(into)),
        *("--only-binary", ":all:", "--implementation", "cp", "--python-version", python),
        *(word for choice in choices for word in choice),
        *wanted,
    ]


def misfit(wheels: Path) -> str | None:
    """Says why the wheels in the folder do not suit this Python, and what to do. Returns None if they do."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    found = [wheel.name for wheel in wheels.glob("*.whl")]
    if not found:
        return f"there are no wheels in {wheels}: `make gpu-wheels` fetches them where there is a network"
    if others := [name for name in found if "-cp" in name and f"-{tag}-" not in name and "-abi3-" not in name]:
        return f"{others[0]} and others are not for this Python, which is {tag}: fetch them with --python"
    return None


def unpack(wheels: Path, into: Path) -> list[str]:
    """Lays out what is in the folder `wheels`, instead of what is there: the names of the packages. Needs no pip.
    Raises `CarriedError` if there is none, one for another Python, or one that reaches outside."""
    if reason := misfit(wheels):
        raise CarriedError(reason)
    found = sorted(wheels.glob("*.whl"))
    shutil.rmtree(into, ignore_errors=True)
    for wheel in found:
        try:
            with zipfile.ZipFile(wheel) as archive:
                _lay_out(archive, into)
        except (zipfile.BadZipFile, OSError) as error:
            raise CarriedError(f"{wheel.name}: {error}") from error
    return [wheel.name.split("-")[0] for wheel in found]


def _lay_out(archive: zipfile.ZipFile, into: Path) -> None:
    for entry in archive.infolist():
        place = _place(entry.filename)
        if place is None or entry.is_dir():
            continue
        target = into / place
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(archive.read(entry))


def _place(name: str) -> PurePosixPath | None:
    """Returns where an entry of a wheel belongs among the packages; None means nowhere (scripts, headers). Raises
    `CarriedError` if the entry reaches outside."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise CarriedError(f"an entry reaches outside: {name}")
    if not path.parts[0].endswith(".data"):
        return path
    return PurePosixPath(*path.parts[2:]) if path.parts[1] in ("purelib", "platlib") else None


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", "-")


if __name__ == "__main__":
    sys.exit(main())
