"""Makes Table 1 and Figs. 2 and 13: how much memory there is, what it holds, and how many requests it lets run."""

from collections.abc import Callable
from typing import Final

from octavo.paper.accounting import Shares
from octavo.paper.figure import Figure, How, Kind, Panel, Row, Series, Table
from octavo.paper.figures.common import ALPACA, MODELS, ORCAS, SHAREGPT, SIGMAS, TITLES, bars, simulated
from octavo.paper.lab import Lab
from octavo.paper.setups import SETUPS
from octavo.paper.systems import VLLM
from octavo.paper.trial import Trial, TrialResult

_BATCHED: Final = (*ORCAS, VLLM)
_ON: Final = "production scheduler, OPT-13B on one A100-40GB, 15.7K slots"
_HOUR_S: Final = 3600.0
# Alpaca's requests are so short that the batches of an hour are those of a quarter of it.
_SECONDS: Final = {SHAREGPT: _HOUR_S, ALPACA: _HOUR_S / 4}
_RATES: Final = {SHAREGPT: 2.0, ALPACA: 30.0}
_SENSITIVITY_S: Final = _HOUR_S / 4
_WHY_MEMORY: Final = {
    "Orca (Max)": "2,048 slots for each request, whatever it uses",
    "Orca (Pow2)": "depends on the assumed spread: how far outputs are below their power of two",
    "Orca (Oracle)": "depends on the assumed spread; what the buddy allocator rounds up is external",
    VLLM: "only the last block of a sequence has empty slots",
}
_WHY_BATCHED: Final = {
    (SHAREGPT, VLLM): "set by how long steps take; the overhead of a step was fitted to this",
    (ALPACA, VLLM): "at 30 requests/s set by how long steps take",
    (ALPACA, "Orca (Oracle)"): "between memory and time: set by both",
}


def table1(_: Lab) -> Figure:
    """Computes the table by arithmetic."""
    return Figure(
        name="table1",
        title="Table 1: models and servers",
        notes=["The simulations use the paper's numbers of slots; for LLaMA-13B, which is not in the table, ours."],
        rows=[_slots(name) for name in ("opt-13b", "opt-66b", "opt-175b")],
        tables=[Table("", ["server", "weights, GiB", "KV per token, KiB", "KV slots"], [_server(n) for n in SETUPS])],
    )


def _slots(name: str) -> Row:
    slots = SETUPS[name].computed_slots / 1000
    return Row(
        digit=f"table1/{name}",
        value=slots,
        text=f"{slots:.1f}K",
        how=How.COMPUTED,
        on="sizes of the model and of the GPU's memory",
        why="what is neither weights nor KV is one assumed reserve per GPU",
    )


def _server(name: str) -> list[str]:
    setup = SETUPS[name]
    weights, per_token = setup.model.weight_bytes / 2**30, setup.model.kv_bytes_per_token / 2**10
    return [MODELS[name], f"{weights:.1f}", f"{per_token:,.0f}", f"{setup.computed_slots:,}"]


def _trial(system: str, dataset: str, sigma: float = 1.0, seconds: float | None = None) -> Trial:
    return Trial(system, "opt-13b", dataset, _RATES[dataset], seconds or _SECONDS[dataset], sigma=sigma, drained=False)


def fig2(lab: Lab) -> Figure:
    """Draws the memory's shares while requests wait."""
    results = dict(zip(_BATCHED, lab.run([_trial(system, SHAREGPT) for system in _BATCHED]), strict=True))
    memory = {system: _memory(result) for system, result in results.items()}
    return Figure(
        name="fig2",
        title="Figure 2: what KV memory holds",
        notes=[f"OPT-13B, ShareGPT at {_RATES[SHAREGPT]:g} requests/s, averaged over the time in which requests wait."],
        panels=[_stack(memory)],
        rows=[
            simulated(f"fig2/{system}", 100 * each.tokens, f"{100 * each.tokens:.1f} %", _ON, _WHY_MEMORY[system])
            for system, each in memory.items()
        ],
        tables=[_sensitivity(lab, SHAREGPT, "KV memory that holds tokens, by spread", _useful)],
    )


def _memory(result: TrialResult) -> Shares:
    """Returns the memory's shares while requests waited for it."""
    if result.memory is None:
        raise ValueError("no request ever waited for memory: the trace is too short, or the rate too low")
    return result.memory


def _stack(memory: dict[str, Shares]) -> Panel:
    parts = {
        "tokens": "tokens",
        "reserved": "reserved, will be used",
        "internal": "internal fragmentation",
        "external": "external fragmentation and free",
    }
    return Panel(
        title="",
        x_label="",
        y_label="share of KV slots, %",
        kind=Kind.STACKED,
        categories=list(memory),
        series=[
            Series(label, [100 * getattr(each, part) for each in memory.values()]) for part, label in parts.items()
        ],
    )


def fig13(lab: Lab) -> Figure:
    """Draws the batched requests; the trials of Fig. 2 are among its own."""
    panels, rows, tables = [], [], []
    for dataset in (SHAREGPT, ALPACA):
        results = lab.run([_trial(system, dataset) for system in _BATCHED])
        batched = {system: result.batched for system, result in zip(_BATCHED, results, strict=True)}
        digits = [f"fig13/{dataset}/{system}" for system in _BATCHED]
        title = f"{TITLES[dataset]}, {_RATES[dataset]:g} requests/s"
        panels.append(bars(title, "batched requests", batched, digits))
        rows += [_batched_row(dataset, *each) for each in batched.items()]
        tables.append(_sensitivity(lab, dataset, f"Batched requests by spread, {TITLES[dataset]}", _batched))
    return Figure(
        name="fig13",
        title="Figure 13: mean number of batched requests, OPT-13B",
        panels=panels,
        rows=rows,
        tables=tables,
    )


def _batched_row(dataset: str, system: str, value: float) -> Row:
    why = _WHY_BATCHED.get((dataset, system), "set by how much memory a request reserves")
    return simulated(f"fig13/{dataset}/{system}", value, f"{value:.2f}", _ON, why)


def _sensitivity(lab: Lab, dataset: str, title: str, show: Callable[[TrialResult], str]) -> Table:
    """Shows a result by the assumed spread, from shorter traces."""
    trials = [_trial(system, dataset, sigma, _SENSITIVITY_S) for system in _BATCHED for sigma in SIGMAS]
    shown = iter([show(result) for result in lab.run(trials)])
    rows = [[system, *(next(shown) for _ in SIGMAS)] for system in _BATCHED]
    return Table(f"{title} ({_SENSITIVITY_S / 60:g} minutes)", ["", *(f"sigma × {sigma:g}" for sigma in SIGMAS)], rows)


def _useful(result: TrialResult) -> str:
    return "nothing waited" if result.memory is None else f"{100 * result.memory.tokens:.1f} %"


def _batched(result: TrialResult) -> str:
    return f"{result.batched:.2f}"
