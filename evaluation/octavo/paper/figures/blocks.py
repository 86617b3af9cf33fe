"""Makes Figs. 18 and 19: what a block costs to read, which size of blocks is best, and recomputing what was preempted
against swapping it."""

from typing import Final

from octavo.paper.figure import Figure, How, Panel, Row, Series
from octavo.paper.figures.common import ALPACA, SHAREGPT, TITLES, simulated, times
from octavo.paper.lab import Lab
from octavo.paper.setups import BLOCK_COST_TOKENS, SETUPS
from octavo.paper.systems import VLLM
from octavo.paper.trial import Trial
from octavo.runtime.models.step_times import StepShape
from octavo.scheduler.core.config import Preemption
from octavo.simulator.hardware import PAPER_OVERHEAD
from octavo.wire.costs import attended_pairs

# -- the size of blocks -----------------------------------------------------------------------------------------------


BLOCK_SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# The paper's are not known, and much depends on them: about 60 to 70, and 85 % of what vLLM sustains in Fig. 12.
_RATES: Final = {SHAREGPT: (1.7, 2.1), ALPACA: (26.0, 36.0)}
_SECONDS: Final = {SHAREGPT: 900.0, ALPACA: 300.0}
# A size counts as good if the latency is at most so many times the least.
_GOOD: Final = 1.1


def fig18a(_: Lab) -> Figure:
    """Returns the frame of a figure of a kernel: there is nothing to simulate."""
    return Figure(name="fig18a", title="Figure 18 (a): attention over blocks against contiguous memory")


def fig18b(lab: Lab) -> Figure:
    """Makes the figure at fixed rates, a lower and a higher one."""
    series, rows = [], []
    for dataset, rates in _RATES.items():
        good = []
        for rate in rates:
            latencies = _latencies(lab, dataset, rate)
            label = f"{TITLES[dataset]}, {rate:g} requests/s"
            series.append(Series(label, latencies, [float(size) for size in BLOCK_SIZES]))
            good.append(f"{good_sizes(latencies)} at {rate:g} req/s")
        rows.append(_row(dataset, "; ".join(good)))
    panel = Panel(
        title="",
        x_label="block size, tokens",
        y_label="normalised latency, s/token",
        series=series,
        x_log=True,
        y_log=True,
        falls=True,
    )
    return Figure(
        name="fig18b",
        title="Figure 18 (b): latency by block size, OPT-13B",
        notes=[
            f"Reading a block is assumed to cost as much as {BLOCK_COST_TOKENS:g} tokens more: blocks of 16 are read"
            " 25 % slower than contiguous memory, as in the paper's Figure 18 (a). Large blocks cost memory alone. The"
            " paper does not give its rates; which sizes are best depends on them, so there are two for each dataset."
        ],
        panels=[panel],
        rows=rows,
    )


def _latencies(lab: Lab, dataset: str, rate: float) -> list[float]:
    trials = [
        Trial(VLLM, "opt-13b", dataset, rate, _SECONDS[dataset], block_size=size, blockwise_reads=True)
        for size in BLOCK_SIZES
    ]
    return [result.normalised_latency_s for result in lab.run(trials)]


def good_sizes(latencies: list[float]) -> str:
    """Returns the block sizes whose latency is near the least; `latencies` has one for each of `BLOCK_SIZES`."""
    good = [size for size, each in zip(BLOCK_SIZES, latencies, strict=True) if each <= _GOOD * min(latencies)]
    return f"{good[0]} to {good[-1]}" if len(good) > 1 else f"{good[0]}"


def _row(dataset: str, text: str) -> Row:
    return Row(
        digit=f"fig18b/{dataset}",
        text=text,
        how=How.SIMULATED,
        on="production scheduler, OPT-13B on one A100-40GB",
        why=f"within {100 * (_GOOD - 1):.0f} % of the least latency; what small blocks cost to read is assumed",
    )


# -- preemption -------------------------------------------------------------------------------------------------------


# Of the sequence that the micro-benchmark moves or recomputes.
_TOKENS: Final = 256
_RATE: Final = 2.0
_PREEMPTING_S: Final = 600.0
_COMPARABLE: Final = (16, 32, 64)
_ON: Final = "OPT-13B on one A100-40GB, PCIe 4.0"


def fig19(lab: Lab) -> Figure:
    """Shows the cost of one sequence (a), and a trace (b)."""
    micro = {name: [_micro_ms(name, size) for size in BLOCK_SIZES] for name in ("recompute", "swap in", "swap out")}
    both = [one + other for one, other in zip(micro["swap in"], micro["swap out"], strict=True)]
    whole = {mode.value: _preempting_latencies(lab, mode) for mode in (Preemption.RECOMPUTE, Preemption.SWAP)}
    return Figure(
        name="fig19",
        title="Figure 19: recomputing against swapping, OPT-13B",
        notes=[
            f"(a): a sequence of {_TOKENS} tokens; every layer's keys, and its values, of a block are a transfer of"
            f" their own, with an assumed cost. (b): ShareGPT at {_RATE:g} requests/s, {_PREEMPTING_S / 60:g} minutes."
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


def _preempting_latencies(lab: Lab, mode: Preemption) -> list[float]:
    trials = [
        Trial(VLLM, "opt-13b", SHAREGPT, _RATE, _PREEMPTING_S, block_size=size, preemption=mode) for size in BLOCK_SIZES
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
