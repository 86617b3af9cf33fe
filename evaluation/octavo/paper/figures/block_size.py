"""Fig. 18: what a block costs to read, and which size of blocks is best."""

from typing import Final

from octavo.paper.figure import Figure, How, Panel, Row, Series
from octavo.paper.figures.common import ALPACA, SHAREGPT, TITLES
from octavo.paper.lab import Lab
from octavo.paper.setups import BLOCK_COST_TOKENS
from octavo.paper.systems import VLLM
from octavo.paper.trial import Trial

BLOCK_SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# 70 and 80 % of what is sustained with blocks of 16. The paper's are not known.
_RATES: Final = {SHAREGPT: 1.7, ALPACA: 36.0}
_SECONDS: Final = {SHAREGPT: 900.0, ALPACA: 300.0}
# A size counts as good if the latency is at most so many times the least.
_GOOD: Final = 1.1


def fig18a(_: Lab) -> Figure:
    """Of a kernel, and so nothing to simulate."""
    return Figure(name="fig18a", title="Figure 18 (a): attention over blocks against contiguous memory")


def fig18b(lab: Lab) -> Figure:
    """At a fixed rate."""
    series, rows = [], []
    for dataset, rate in _RATES.items():
        trials = [
            Trial(VLLM, "opt-13b", dataset, rate, _SECONDS[dataset], block_size=size, blockwise_reads=True)
            for size in BLOCK_SIZES
        ]
        latencies = [result.normalised_latency_s for result in lab.run(trials)]
        series.append(
            Series(f"{TITLES[dataset]}, {rate:g} requests/s", latencies, [float(size) for size in BLOCK_SIZES])
        )
        rows.append(_row(dataset, latencies))
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
            " rates are not the paper's, which it does not give: nearer to saturation smaller ones are good (ShareGPT"
            " at 2.1 requests/s: 32 to 64), far from it larger ones are (Alpaca at 26: 64 to 128)."
        ],
        panels=[panel],
        rows=rows,
    )


def good_sizes(latencies: list[float]) -> str:
    """Those whose latency is near the least, one for each of `BLOCK_SIZES`."""
    good = [size for size, each in zip(BLOCK_SIZES, latencies, strict=True) if each <= _GOOD * min(latencies)]
    return f"{good[0]} to {good[-1]}" if len(good) > 1 else f"{good[0]}"


def _row(dataset: str, latencies: list[float]) -> Row:
    return Row(
        digit=f"fig18b/{dataset}",
        text=good_sizes(latencies),
        how=How.SIMULATED,
        on="production scheduler, OPT-13B on one A100-40GB",
        why=f"within {100 * (_GOOD - 1):.0f} % of the least latency; what small blocks cost to read is assumed",
    )
