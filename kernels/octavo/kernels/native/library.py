"""Loads the compiled kernels once, or says why they cannot be loaded."""

import ctypes
import functools
import os
import re
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

# Before the library, which takes the OpenMP runtime that torch brings, and with it one team of threads.
import torch  # noqa: F401

from octavo.kernels.native import structs
from octavo.kernels.native.build import LIBRARY, source_hash

# Names a variant to use instead of the CPU's best, or `none`.
VARIANT_VARIABLE = "OCTAVO_CPU_KERNELS"

# GCC's, and Intel's, which has its symbols too.
_RUNTIME = re.compile(r"lib(gomp|iomp5)\b.*\.so")

# Why they are not used although they could be; None: they are.
_aside: str | None = None

_BUILD = "run `python -m octavo.kernels.native.build` with a C++ compiler installed (on Debian or Ubuntu: g++)"


class NativeUnavailable(Exception):
    """Says why there are no compiled kernels to use, and what to do about it."""


@dataclass(frozen=True)
class NativeLibrary:
    """Holds the loaded functions of `src/library.cpp`; `variant` is the instruction set that they use."""

    variant: str
    functions: ctypes.CDLL


def load() -> NativeLibrary:
    """Returns the library for this CPU, or the variant that `OCTAVO_CPU_KERNELS` names. Raises `NativeUnavailable`."""
    found = find()
    if isinstance(found, NativeUnavailable):
        raise found
    return found


@functools.cache
def find() -> NativeLibrary | NativeUnavailable:
    """Returns the library of `load`, or the error that `load` raises; looks for the library once."""
    try:
        return _load()
    except NativeUnavailable as error:
        return error


def set_aside(reason: str | None) -> None:
    """Makes `load` refuse for `reason` in this process from now on; None ends that. Objects made before go on."""
    global _aside
    _aside = reason
    find.cache_clear()


def _load() -> NativeLibrary:
    if _aside is not None:
        raise NativeUnavailable(_aside)
    wanted = os.environ.get(VARIANT_VARIABLE) or None
    if wanted == "none":
        raise NativeUnavailable(f"{VARIANT_VARIABLE}=none turns them off")
    if not LIBRARY.is_file():
        raise NativeUnavailable(f"they were not compiled when Octavo was installed; {_BUILD}")
    try:
        ctypes.CDLL(openmp_runtime(os.fsdecode(Path("/proc/self/maps").read_bytes())), mode=ctypes.RTLD_GLOBAL)
        functions = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise NativeUnavailable(f"{LIBRARY} cannot be loaded ({error}); {_BUILD}") from error
    functions.octavo_sources.restype = c_char_p
    if functions.octavo_sources().decode() != source_hash():
        raise NativeUnavailable(f"they were compiled from other sources than these; {_BUILD}")
    _declare(functions)
    variant = functions.octavo_choose(wanted.encode() if wanted else None)
    if variant is None:
        raise NativeUnavailable(f"{VARIANT_VARIABLE}={wanted} is no variant that this CPU runs")
    return NativeLibrary(variant.decode(), functions)


def openmp_runtime(maps: str) -> str:
    """Returns the file of the OpenMP runtime in a process of these `maps` (those of Linux' /proc), else GCC's own name.

    The library names no runtime: wheels of torch carry one under a name of their own, such as libgomp-a34b3233.so.1,
    and a second one beside it would mean a second team of threads.
    """
    mapped = (line.split(maxsplit=5)[-1] for line in maps.splitlines())
    return next((path for path in mapped if _RUNTIME.match(Path(path).name)), "libgomp.so.1")


def _declare(library: ctypes.CDLL) -> None:
    for name, result, arguments in (
        ("octavo_choose", c_char_p, [c_char_p]),
        ("octavo_pack_weight", None, [c_void_p, c_void_p, c_int64, c_int64, c_int32]),
        ("octavo_linear", None, [POINTER(structs.LinearOp), c_void_p, c_void_p, c_int64, c_int32, c_int32]),
        ("octavo_quantized_format", c_int32, [POINTER(structs.WeightFormat)]),
        ("octavo_quantized_panel_bytes", c_int64, [c_int32, c_int64, c_int64]),
        ("octavo_quantized_rows_bytes", c_int64, [c_int64, c_int64]),
        ("octavo_pack_quantized", None, [c_int32, POINTER(structs.QuantizedTensors), c_void_p, c_void_p, c_int64]),
        ("octavo_unpack_quantized", None, [c_int32, POINTER(structs.QuantizedTensors), c_void_p, c_void_p, c_int64]),
        (
            "octavo_quantized_linear",
            None,
            [
                POINTER(structs.QuantizedLinearOp),
                POINTER(structs.QuantizeOp),
                c_void_p,
                c_void_p,
                c_int64,
                c_int32,
                c_int32,
            ],
        ),
        ("octavo_norm", None, [POINTER(structs.NormOp), c_void_p, c_void_p, c_int64, c_int32, c_int32]),
        (
            "octavo_write",
            None,
            [
                *(c_void_p, c_void_p, c_int64, c_int64),
                *(POINTER(structs.LayerCachePointers), POINTER(structs.GroupStep)),
                *(c_int64, c_int64, c_int64, c_int32, c_int32),
            ],
        ),
        (
            "octavo_attend",
            None,
            [
                *(POINTER(structs.AttentionOp), c_void_p, c_void_p),
                *(POINTER(structs.GroupStep), POINTER(structs.LayerCachePointers)),
                *(c_int32, c_int32),
            ],
        ),
        ("octavo_plan", None, [POINTER(structs.GroupStep), c_int64, c_int64, c_int64, c_void_p, c_void_p]),
        ("octavo_argmax", None, [c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int32]),
        ("octavo_weigh", None, [c_void_p, c_int64, c_int64, *[c_void_p] * 4, c_int32]),
        ("octavo_softcap", None, [c_void_p, c_int64, c_float, c_int32]),
        ("octavo_move_blocks", None, [c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int32]),
        ("octavo_run", None, [POINTER(structs.Run)]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
