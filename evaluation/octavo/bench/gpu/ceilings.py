"""Measures the rates that the machine gives at this moment: copies, matrix products, pinned transfers, launches. All
data are random."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from octavo.bench.gpu.cases import Samples
from octavo.bench.gpu.floors import Ceilings
from octavo.bench.gpu.machine import GpuMachine
from octavo.bench.gpu.timing import Call, host_s

_GIB = 1 << 30


def measure_ceilings(machine: GpuMachine) -> tuple[Ceilings, dict[str, Samples]]:
    """Measures the rates that floors are made of. Returns them, and everything that was measured, by what it is and its
    unit."""
    copy = _copy_rate(machine)
    gemm = _gemm_rate(machine)
    to_device, to_host = _pinned_rates(machine)
    found = {
        "device copy, read + written, TB/s": _scaled(copy, 1e-12),
        "bf16 matrix product, TFLOP/s": _scaled(gemm, 1e-12),
        "pinned to device, GB/s": _scaled(to_device, 1e-9),
        "device to pinned, GB/s": _scaled(to_host, 1e-9),
        "empty graph replay, us": _scaled(_graph_replay_s(machine), 1e6),
        "launch of a small operation, us of the host": _scaled(_launch_s(machine), 1e6),
    }
    return Ceilings(copy.median, gemm.median, to_device.median, to_host.median), found


def _copy_rate(machine: GpuMachine) -> Samples:
    """Measures copies on the device, in bytes per second, read and written."""
    size = (1 << 20) if machine.quick else 4 * _GIB
    buffers = [_random_bytes(size, machine.device) for _ in range(2)]
    # Back and forth: both are far larger than any cache.
    calls = [partial(buffers[0].copy_, buffers[1]), partial(buffers[1].copy_, buffers[0])]
    return _rate(machine, calls, 2 * size)


def _gemm_rate(machine: GpuMachine) -> Samples:
    """Measures matrix products in bf16, in operations per second."""
    size = 64 if machine.quick else 8192
    sets = [
        (_normal(size, machine), _normal(size, machine), torch.empty(size, size).to(machine.device, torch.bfloat16))
        for _ in range(3)
    ]
    calls = [partial(torch.matmul, a, b, out=out) for a, b, out in sets]
    return _rate(machine, calls, 2 * size**3)


def _normal(size: int, machine: GpuMachine) -> Tensor:
    return torch.randn(size, size, device=machine.device, dtype=torch.bfloat16)


def _pinned_rates(machine: GpuMachine) -> tuple[Samples, Samples]:
    """Measures pinned transfers, in bytes per second, to the device and to the host."""
    size = (1 << 20) if machine.quick else _GIB
    on_device = _random_bytes(size, machine.device)
    on_host = torch.empty(size, dtype=torch.uint8, pin_memory=machine.device.type == "cuda").copy_(on_device)
    to_device = _rate(machine, [partial(on_device.copy_, on_host, non_blocking=True)], size)
    to_host = _rate(machine, [partial(on_host.copy_, on_device, non_blocking=True)], size)
    return to_device, to_host


def _graph_replay_s(machine: GpuMachine) -> Samples:
    """Measures the replay of a graph with one kernel that does next to nothing, in seconds."""
    one = torch.randn(16, device=machine.device)
    return machine.race({"replay": [partial(one.mul_, -1.0)]}).samples["replay"]


def _launch_s(machine: GpuMachine) -> Samples:
    one = torch.randn(16, device=machine.device)
    return Samples.of(host_s(partial(one.mul_, -1.0), machine.device, times=200))


def _rate(machine: GpuMachine, calls: Sequence[Call], amount: float) -> Samples:
    """Measures `amount` per second of a call. Graphs are not used: a copy to the host may have no place in one."""
    times = machine.race({"": calls}, graphs=False).samples[""]
    return Samples(amount / times.median, amount / times.high, amount / times.low, times.count)


def _scaled(sample: Samples, factor: float) -> Samples:
    return Samples(sample.median * factor, sample.low * factor, sample.high * factor, sample.count)


def _random_bytes(size: int, device: torch.device) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
