"""Measures the worker alone by every instruction set that this machine has, beside torch: `make bench
ARGS=--instruction-sets`.

Ours is set against a torch that is held to the same instructions, as on a CPU that has no others.
"""

import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from octavo.bench.figures import CaseFigure, CaseWork
from octavo.bench.report import Runs
from octavo.bench.table import line
from octavo.kernels.native.library import VARIANT_VARIABLE, load

_TORCH = {VARIANT_VARIABLE: "none"}


@dataclass(frozen=True)
class Contender:
    """Describes a worker started with `environment`. `peer` names the torch to compare it with; "" stands for torch
    itself."""

    name: str
    environment: dict[str, str] = field(hash=False)
    peer: str = ""


def _held_to(aten: str, onednn: str) -> dict[str, str]:
    """Returns the environment that limits torch's own kernels, oneDNN and MKL to an instruction set."""
    return _TORCH | {"ATEN_CPU_CAPABILITY": aten, "ONEDNN_MAX_CPU_ISA": onednn, "MKL_ENABLE_INSTRUCTIONS": onednn}


_CONTENDERS = (
    Contender("torch", _TORCH),
    Contender("amx", {VARIANT_VARIABLE: "amx"}, "torch"),
    Contender("avx512_bf16", {VARIANT_VARIABLE: "avx512_bf16"}, "torch"),
    Contender("avx512", {VARIANT_VARIABLE: "avx512"}, "torch"),
    Contender("torch, AVX2", _held_to("avx2", "AVX2")),
    Contender("avx2", {VARIANT_VARIABLE: "avx2"}, "torch, AVX2"),
    Contender("torch, SSE", _held_to("default", "SSE41")),
    Contender("portable", {VARIANT_VARIABLE: "portable"}, "torch, SSE"),
)


def contenders(*, bf16: bool) -> list[Contender]:
    """Lists the instruction sets that this machine has, each after the torch it is compared with; in `bf16`, which
    torch without AVX-512 computes many times more slowly than all others, with the unbound torch only. Raises
    `NativeUnavailable` (`octavo.kernels.native.library`)."""
    variants = runnable(load().functions)
    if "avx2" not in variants:
        # No x86: torch has one way.
        return [_CONTENDERS[0], Contender("portable", {VARIANT_VARIABLE: "portable"}, "torch")]
    mine = [one for one in _CONTENDERS if one.name in variants]
    peers = {"torch"} if bf16 else {one.peer for one in mine} | {"torch"}
    return [one for one in _CONTENDERS if one in mine or one.name in peers]


def runnable(functions: ctypes.CDLL) -> list[str]:
    """Lists the variants that this CPU runs."""
    best = functions.octavo_choose(None)
    names = [one.environment[VARIANT_VARIABLE] for one in _CONTENDERS if one.peer]
    found = [name for name in names if functions.octavo_choose(name.encode()) is not None]
    functions.octavo_choose(best)
    return found


_WIDTHS = (40, 16, 16, 12)


def table(
    several: list[Contender], work: dict[str, CaseWork], figures: Iterable[CaseFigure], runs: dict[str, Runs]
) -> Iterator[str]:
    """Formats a row for each figure and contender: the best run, and how many times as fast as torch it is."""
    yield line(("", "best", "of its torch", "of torch"), _WIDTHS)
    for figure in figures:
        best = {one.name: figure.seconds(runs[one.name].best(figure)) for one in several}
        for place, one in enumerate(several):
            seconds = best[one.name]
            shown = figure.shown(seconds, work[figure.case].case)
            head = f"{figure.case}, {figure.name}" if place == 0 else ""
            peer = f"{best[one.peer] / seconds:.2f}" if one.peer in best else ""
            cells = (f"{head:24}{one.name}", f"{shown:.1f} {figure.unit}", peer, f"{best['torch'] / seconds:.2f}")
            yield line(cells, _WIDTHS)
