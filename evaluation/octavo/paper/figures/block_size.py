"""Makes Fig. 18: what a block costs to read, and which size of blocks is best."""

from typing import Final

from octavo.paper.figure import Figure, How, Panel, Row, Series
from octavo.paper.figures.common import ALPACA, SHAREGPT, TITLES
from octavo.paper.lab import Lab
from octavo.paper.setups import BLOCK_COST_TOKENS
from octavo.paper.systems import VLLM
from octavo.paper.trial import Trial

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
