"""Times work on a device: contenders take turns in one process, and are replayed from CUDA graphs where that can be."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from octavo.bench.gpu.cases import Samples
from octavo.worker.gpu.graphs import waiting_refused

Call = Callable[[], object]
# By name: a call for each set of inputs, or what makes these calls.
Contenders = Mapping[str, Sequence[Call] | Callable[[], Sequence[Call]]]
# One round of a contender takes at least so long: then neither events nor launches count.
_ROUND_S = 5e-3
_MOST_ROUNDS, _HOST_ROUNDS = 200, 7


@dataclass(frozen=True)
class Race:
    """Seconds of one call of each contender, why others are `missing`, and which could not be captured in a graph."""

    samples: dict[str, Samples]
    missing: dict[str, str] = field(default_factory=dict)
    eager: list[str] = field(default_factory=list)

    def best(self, *names: str) -> str | None:
        """Returns the fastest of the named contenders that ran; of all if none is named."""
        ran = [name for name in names or self.samples if name in self.samples]
        return min(ran, key=lambda name: self.samples[name].median, default=None)


@dataclass
class _Contender:
    name: str
    run: Call
    num_calls: int
    captured: bool


def race(
    contenders: Contenders,
    device: torch.device,
    *,
    seconds: float = 0.5,
    least_rounds: int = 7,
    graphs: bool = True,
) -> Race:
    """Runs each contender's calls, one for each set of inputs, one after the other, and all contenders in turns, for
    about so many `seconds` each, and for at least so many rounds.

    The first contender must run; one of the others that raises is missing.
    """
    made, missing = list[_Contender](), dict[str, str]()
    for place, (name, calls) in enumerate(contenders.items()):
        try:
            made.append(_contender(name, calls() if callable(calls) else calls, device, graphs=graphs))
        except Exception as error:
            if place == 0:
                raise
            missing[name] = f"{type(error).__name__}: {error}"
    times = _in_turns(made, device, seconds, least_rounds)
    eager = [each.name for each in made if not each.captured]
    return Race({name: Samples.of(values) for name, values in times.items()}, missing, eager)


def _contender(name: str, calls: Sequence[Call], device: torch.device, *, graphs: bool) -> _Contender:
    """Warms a contender up: it is compiled, and has all memory that it takes."""

    def run() -> None:
        for call in calls:
            call()

    for _ in range(3):
        run()
    synchronize(device)
    graph = _captured(run) if graphs and device.type == "cuda" else None
    return _Contender(name, graph.replay if graph else run, len(calls), graph is not None)


def _captured(run: Call) -> "torch.cuda.CUDAGraph | None":
    """Captures calls in a graph. Returns None if they cannot be captured."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        # Before CUDA refuses to wait, which would end the capture.
        with torch.cuda.graph(graph), waiting_refused():
            run()
    except RuntimeError:
        _recover(stream)
        return None
    return graph


def _recover(stream: "torch.cuda.Stream") -> None:
    """A capture that CUDA has ended leaves torch on the stream of captures, and its random numbers in one for good."""
    torch.cuda.set_stream(stream)
    torch.cuda.synchronize()
    make_generator: Callable[..., Any] = torch.Generator
    torch.cuda.default_generators[stream.device_index].graphsafe_set_state(make_generator(device=stream.device))


def _in_turns(
    contenders: Sequence[_Contender], device: torch.device, seconds: float, least_rounds: int
) -> dict[str, list[float]]:
    """Runs the contenders in turns and returns the seconds of one call, round by round."""
    times: dict[str, list[float]] = {each.name: [] for each in contenders}
    repeats = {each.name: _repeats(each, device) for each in contenders}
    began = time.perf_counter()
    for round_number in range(_MOST_ROUNDS):
        if round_number >= least_rounds and time.perf_counter() - began > seconds * len(contenders):
            break
        for each in contenders:
            taken = elapsed_s(each.run, device, repeats[each.name])
            times[each.name].append(taken / (repeats[each.name] * each.num_calls))
    return times


def _repeats(contender: _Contender, device: torch.device) -> int:
    """Returns how often to run `contender` in a round."""
    once = max(elapsed_s(contender.run, device), 1e-7)
    return max(1, min(1000, round(_ROUND_S / once)))


def elapsed_s(run: Call, device: torch.device, times: int = 1) -> float:
    """Seconds on the device, from the first call's begin to the last one's end."""
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(times):
            run()
        return time.perf_counter() - began
    make_event: Callable[..., torch.cuda.Event] = torch.cuda.Event
    begin, end = (make_event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def host_s(run: Call, device: torch.device, times: int) -> Iterator[float]:
    """Seconds of the host for one call, which only begins work; a few times over."""
    for _ in range(_HOST_ROUNDS):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(times):
            run()
        yield (time.perf_counter() - began) / times
    synchronize(device)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
