"""Makes Fig. 19: recomputing what was preempted against swapping it."""

from typing import Final

from octavo.paper.figure import Figure, Panel, Row, Series
from octavo.paper.figures.block_size import BLOCK_SIZES
from octavo.paper.figures.common import SHAREGPT, simulated, times
from octavo.paper.lab import Lab
from octavo.paper.setups import SETUPS
from octavo.paper.systems import VLLM
from octavo.paper.trial import Trial
from octavo.runtime.models.step_times import StepShape
from octavo.scheduler.core.config import Preemption
from octavo.simulator.roofline import PAPER_OVERHEAD
from octavo.wire.costs import attended_pairs

# Of the sequence that the micro-benchmark moves or recomputes.
_TOKENS: Final = 256
_RATE: Final = 2.0
_SECONDS: Final = 600.0
_COMPARABLE: Final = (16, 32, 64)
_ON: Final = "OPT-13B on one A100-40GB, PCIe 4.0"


def fig19(lab: Lab) -> Figure:
    """Shows the cost of one sequence (a), and a trace (b)."""
    micro = {name: [_micro_ms(name, size) for size in BLOCK_SIZES] for name in ("recompute", "swap in", "swap out")}
    both = [one + other for one, other in zip(micro["swap in"], micro["swap out"], strict=True)]
    whole = {mode.value: _latencies(lab, mode) for mode in (Preemption.RECOMPUTE, Preemption.SWAP)}
    return Figure(
        name="fig19",
        title="Figure 19: recomputing against swapping, OPT-13B",
        notes=[
            f"(a): a sequence of {_TOKENS} tokens; every layer's keys, and its values, of a block are a transfer of"
            f" their own, with an assumed cost. (b): ShareGPT at {_RATE:g} requests/s, {_SECONDS / 60:g} minutes."
        ],
        panels=[
            _panel("(a) one sequence", "milliseconds", {**micro, "swap in + out": both}),
            _panel("(b) end to end", "normalised latency, s/token", whole),
        ],
        rows=_rows(micro["recompute"], both, whole),
    )


def _micro_ms(name: str, block_size: int) -> float:
    """Returns the milliseconds without what a step costs of itself."""
    latency, blocks = SETUPS["opt-13b"].spec(block_size).latency, -(-_TOKENS // block_size)
    shape = {
        "recompute": StepShape(_TOKENS, 1, 0, attended_pairs(0, _TOKENS, (0,)), 0, 0, 0),
        "swap in": StepShape(0, 0, 0, 0.0, 0, blocks, 0),
        "swap out": StepShape(0, 0, 0, 0.0, blocks, 0, 0),
    }[name]
    own = PAPER_OVERHEAD.step_s if shape.num_tokens else 0.0
    return 1000 * (latency.seconds(shape) - own)


def _latencies(lab: Lab, mode: Preemption) -> list[float]:
    trials = [
        Trial(VLLM, "opt-13b", SHAREGPT, _RATE, _SECONDS, block_size=size, preemption=mode) for size in BLOCK_SIZES
    ]
    return [result.normalised_latency_s for result in lab.run(trials)]


def _panel(title: str, y_label: str, by_name: dict[str, list[float]]) -> Panel:
    sizes = [float(size) for size in BLOCK_SIZES]
    return Panel(
        title=title,
        x_label="block size, tokens",
        y_label=y_label,
        series=[Series(name, values, sizes) for name, values in by_name.items()],
        x_log=True,
        y_log=True,
        falls=True,
    )


def _rows(recompute: list[float], both: list[float], whole: dict[str, list[float]]) -> list[Row]:
    worst = max(one / other for one, other in zip(recompute, both, strict=True))
    steep = both[0] / both[-1]
    ends = [
        whole["recompute"][BLOCK_SIZES.index(size)] / whole["swap"][BLOCK_SIZES.index(size)] for size in _COMPARABLE
    ]
    text = f"recompute flat; swap {steep:.0f}× as long at blocks of 1 as at 256"
    why = "a link at 80 % of its data sheet, which many small copies hardly reach; a prompt that is computed alone"
    return [
        simulated("fig19/micro", worst, times(worst), _ON, why),
        simulated("fig19/steep", steep, text, _ON, "each transfer has a fixed cost"),
        simulated(
            "fig19/end", max(ends), f"{min(ends):.2f} to {max(ends):.2f}×", _ON, "how often requests are preempted"
        ),
    ]
