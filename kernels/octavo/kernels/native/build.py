"""Compiles the CPU kernels: `python -m octavo.kernels.native.build`, and a step of installing from source.

Needs a C++17 compiler with OpenMP, and nothing else: it runs before Octavo is installed. On x86-64 every instruction
set that the kernels know is compiled; which one runs is decided by the CPU at start.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
# In a folder of its own: beside modules its suffix would make it one.
LIBRARY = Path(__file__).parent / "lib" / "liboctavo_kernels.so"

_FLAGS = [
    *("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-Wno-psabi"),
    # Products are added as they are multiplied by every compiler; one of them takes it to be the user's decision.
    "-ffp-contract=fast",
    # On aarch64 GCC would read far ahead for its loops, into registers that sums then have to leave.
    *("-fno-schedule-insns", "-Wno-ignored-optimization-argument"),
]
_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
_AVX512 = [*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
_AVX512_BF16 = [*_AVX512, "-mavx512vnni", "-mavx512bf16"]
_VARIANTS = {
    "x86_64": {
        "portable": [],
        "avx2": _AVX2,
        "avx_vnni": [*_AVX2, "-mavxvnni"],
        "avx512": _AVX512,
        "avx512_vnni": [*_AVX512, "-mavx512vnni"],
        "avx512_bf16": _AVX512_BF16,
        "amx": [*_AVX512_BF16, "-mamx-tile", "-mamx-bf16"],
    },
    "aarch64": {"portable": [], "dotprod": ["-march=armv8.2-a+dotprod"]},
}
_EXACT = ["-ffp-contract=off", "-DOCTAVO_EXACT"]
# What adds instructions for whole numbers only, to which other variant.
_WHOLE_NUMBERS = {"avx_vnni": "avx2", "avx512_vnni": "avx512", "dotprod": "portable"}
# What adds products of bf16 only, and what computes the same bits everywhere has none of those.
_BF16 = ("avx512_bf16", "amx")
# What is compiled for the variants, the longest first, with which flags besides; and which variants another's serves.
_VARIANT_SOURCES: dict[str, tuple[list[str], dict[str, str]]] = {
    "exact.cpp": (_EXACT, dict.fromkeys(_BF16, "avx512_vnni")),
    "variant.cpp": ([], _WHOLE_NUMBERS),
    "exact_floats.cpp": (_EXACT, {**_WHOLE_NUMBERS, **dict.fromkeys(_BF16, "avx512")}),
}
# What is the same whatever the instruction set.
_COMMON = ("library.cpp", "plan.cpp", "quantized_pack.cpp")
_COMPILERS = ("g++", "c++", "clang++")


class BuildError(Exception):
    """The kernels cannot be compiled here, with what to do about it."""


def source_hash() -> str:
    """Identifies what a library was compiled from, and for what kind of machine."""
    digest = hashlib.sha256(repr((platform.machine(), _FLAGS, _variants(), _VARIANT_SOURCES)).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def is_current(library: Path = LIBRARY) -> bool:
    """Returns whether `library` was compiled from the present sources."""
    return library.is_file() and source_hash().encode() in library.read_bytes()


def build(library: Path = LIBRARY) -> None:
    """Compiles the kernels into `library`, all or nothing. Raises `BuildError`."""
    compiler = find_compiler()
    library.parent.mkdir(exist_ok=True)
    # Before the compiler reads them: what is changed meanwhile must show.
    defines = [f'-DOCTAVO_SOURCES="{source_hash()}"']
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".build-") as folder:
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            variants = pool.map(lambda item: _compile_variant(compiler, item, Path(folder)), _variant_sources())
            common = pool.map(lambda source: _compile(compiler, source, defines, Path(folder, source)), _COMMON)
            parts = [*variants, *common]
        partial = Path(folder, library.name)
        _run([compiler, "-shared", *_openmp_flags(compiler), *map(str, parts), "-o", str(partial)])
        partial.rename(library)


def find_compiler() -> str:
    """Returns the compiler to use: `$CXX`, else the first of the usual names. Raises `BuildError` if there is none."""
    names = [chosen] if (chosen := os.environ.get("CXX")) else list(_COMPILERS)
    for name in names:
        if found := shutil.which(name):
            return found
    raise BuildError(
        f"no C++ compiler is found as {' or '.join(names)}; on Debian or Ubuntu: apt-get install"
        " g++, or name one in CXX"
    )


def _variants() -> dict[str, list[str]]:
    """Returns the compiler flags of each variant that this kind of machine may run."""
    return _VARIANTS.get(platform.machine(), {"portable": []})


def _openmp_flags(compiler: str) -> list[str]:
    """Returns what names an OpenMP runtime in the library.

    GCC's is left open: `library.py` finds it in the process, whatever torch's wheel calls its file. Clang's has other
    symbols than torch's, so it is named.
    """
    return ["-fopenmp"] if "clang" in _run([compiler, "--version"]) else []


def _variant_sources() -> list[tuple[str, str]]:
    """Returns each variant with each of its sources. Those that take longest come first: the last variants have the
    widest registers."""
    return [
        (variant, source)
        for source, (_, served) in _VARIANT_SOURCES.items()
        for variant in reversed(_variants())
        if variant not in served
    ]


def _compile_variant(compiler: str, item: tuple[str, str], folder: Path) -> Path:
    """Compiles one source of one variant, and returns the object."""
    variant, source = item
    flags, floats = _VARIANT_SOURCES[source][0], _VARIANT_SOURCES["exact_floats.cpp"][1].get(variant, variant)
    # What several sources compile must not pass for each other's.
    space = {"variant.cpp": variant, "exact.cpp": f"{variant}_exact", "exact_floats.cpp": f"{variant}_floats"}[source]
    defines = [f"-DOCTAVO_VARIANT={space}", f"-DOCTAVO_FLOATS={floats}_floats"]
    return _compile(
        compiler, source, [*_variants()[variant], *flags, *defines], folder / f"{Path(source).stem}_{variant}"
    )


def _compile(compiler: str, source: str, flags: list[str], target: Path) -> Path:
    """Compiles one source, and returns the object."""
    target = target.with_name(f"{target.name}.o")
    _run([compiler, *_FLAGS, *flags, "-c", str(SOURCES / source), "-o", str(target)])
    return target


def _run(command: list[str]) -> str:
    """Runs a command, and returns what it printed. Raises `BuildError` with its complaints."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise BuildError(f"{' '.join(command)} failed:\n{result.stderr.strip()[-4000:]}")
    return result.stdout


def not_compiled(error: Exception) -> str:
    """Returns the message for whoever installs Octavo where `build` raises `error`: one line, and the compiler's words
    if there are any."""
    return f"Octavo's CPU kernels are not compiled, and without them models run slower on a CPU: {error}"


def main() -> None:
    """Compiles and says so; one line on standard error and status 1 if that cannot be."""
    try:
        build()
    except (BuildError, OSError) as error:
        sys.exit(not_compiled(error))
    print(f"compiled {LIBRARY}")


if __name__ == "__main__":
    main()
