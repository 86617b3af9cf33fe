"""Makes Figs. 14 to 17: parallel sampling and beam search, prompts that begin alike, and long conversations."""

from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from octavo.paper.digits import DIGITS
from octavo.paper.figure import Figure, Panel, Row, Table
from octavo.paper.figures.common import (
    ALPACA,
    ORACLE,
    ORCAS,
    SHAREGPT,
    TITLES,
    bars,
    curves,
    guess,
    rates_of,
    simulated,
    span,
    times,
)
from octavo.paper.lab import Lab
from octavo.paper.setups import WMT16
from octavo.paper.systems import VLLM
from octavo.paper.trial import Trial

# -- many sequences ---------------------------------------------------------------------------------------------------


WIDTHS: Final = (2, 4, 6)
_SYSTEMS: Final = (*ORCAS, VLLM)
_SECONDS: Final = 180.0
_ON: Final = "production scheduler, OPT-13B on one A100-40GB"


@dataclass(frozen=True)
class _Way:
    """Describes a way to have several sequences; `vllm`: about what vLLM sustains then on Alpaca."""

    name: str
    n: int
    beam_width: int
    vllm: float

    @property
    def title(self) -> str:
        return f"beam width {self.beam_width}" if self.beam_width else f"{self.n} samples"

    def trial(self, system: str, rate: float, dataset: str = ALPACA, seconds: float = _SECONDS) -> Trial:
        return Trial(system, "opt-13b", dataset, rate, seconds, n=self.n, beam_width=self.beam_width)


_PARALLEL: Final = [_Way(f"parallel{width}", width, 0, rate) for width, rate in zip(WIDTHS, (21, 10, 7), strict=True)]
_BEAMS: Final = [_Way(f"beam{width}", 1, width, rate) for width, rate in zip(WIDTHS, (21, 11, 8), strict=True)]
_BASIC: Final = _Way("basic", 1, 0, 42.0)


def fig14(lab: Lab) -> Figure:
    """Makes the figure of OPT-13B on Alpaca."""
    ways = [*_PARALLEL, *_BEAMS]
    trials = [way.trial(system, guess(system, way.vllm)) for way in [_BASIC, *ways] for system in _SYSTEMS]
    knees = lab.search(trials)
    panels, ratios, rows = [], {}, []
    for number, way in enumerate([_BASIC, *ways]):
        part = slice(number * len(_SYSTEMS), (number + 1) * len(_SYSTEMS))
        rates = rates_of(trials[part], knees[part])
        ratios[way.name] = rates[VLLM] / rates[ORACLE]
        rows.append([way.title, *(f"{rates[system]:.3g}" for system in _SYSTEMS), times(ratios[way.name])])
        if way is not _BASIC:
            panels.append(curves(way.title, trials[part], knees[part]))
    return Figure(
        name="fig14",
        title="Figure 14: parallel sampling and beam search, OPT-13B on Alpaca",
        notes=[f"Traces of {_SECONDS / 60:g} minutes. Orca has a chunk for each sequence, and copies one that forks."],
        panels=panels,
        rows=[_fig14_row(name, ratios[name]) for name in ("basic", "beam6")],
        tables=[Table("Requests per second that are sustained", ["", *_SYSTEMS, f"{VLLM} over {ORACLE}"], rows)],
    )


def _fig14_row(name: str, ratio: float) -> Row:
    return simulated(f"fig14/{name}", ratio, times(ratio), f"{_ON}, Alpaca", "memory, sharing, and how long steps take")


# Rates that memory just holds, by dataset: what is saved hardly depends on them.
_RATES: Final = {ALPACA: 4.0, SHAREGPT: 0.4}
_SHARING_S: Final = {ALPACA: 900.0, SHAREGPT: 3600.0}
_SIGMAS: Final = (0.7, 1.0, 1.15, 1.3)
_GAPS: Final = (0.5, 1.0, 2.0, 4.0)


def fig15(lab: Lab) -> Figure:
    """Makes the figure by lengths alone (a), and by how soon beams meet (b)."""
    panels: list[Panel] = []
    rows: list[Row] = []
    for dataset in (ALPACA, SHAREGPT):
        for kind, ways in (("parallel", _PARALLEL), ("beam", _BEAMS)):
            saved = dict(zip(WIDTHS, _saved(lab, [_sharing(way, dataset) for way in ways]), strict=True))
            panels.append(_saved_panel(kind, dataset, saved))
            rows += [_fig15_row(kind, dataset, width, share) for width, share in saved.items()]
    return Figure(
        name="fig15",
        title="Figure 15: blocks that sharing saves, OPT-13B",
        notes=[
            "Blocks saved over those that would be taken without sharing, over time. The likeliest next token of a"
            " simulated beam has a logprob of minus an exponential variable of mean 1, each further one is less"
            " likely by another: an assumption, on which (b) depends."
        ],
        panels=panels,
        rows=[row for row in rows if row.digit in DIGITS],
        tables=[_by_sigma(lab), _by_gap(lab)],
    )


def _sharing(way: _Way, dataset: str) -> Trial:
    return way.trial(VLLM, _RATES[dataset] * 2 / max(way.n, way.beam_width), dataset, _SHARING_S[dataset])


def _saved(lab: Lab, trials: list[Trial]) -> list[float]:
    """Returns the shares of blocks saved, in percent."""
    return [100 * (result.saved or 0.0) for result in lab.run(trials)]


def _saved_panel(kind: str, dataset: str, saved: dict[int, float]) -> Panel:
    name = "samples" if kind == "parallel" else "beam width"
    digits = [f"fig15/{dataset}/{kind}/{width}" for width in saved]
    title = f"({'a' if kind == 'parallel' else 'b'}) {TITLES[dataset]}, {name}"
    return bars(title, "blocks saved, %", {str(width): share for width, share in saved.items()}, digits)


def _fig15_row(kind: str, dataset: str, width: int, saved: float) -> Row:
    why = (
        "lengths alone, and so their assumed spread (see the table below)"
        if kind == "parallel"
        else "how soon beams meet, which is assumed"
    )
    return simulated(f"fig15/{dataset}/{kind}/{width}", saved, f"{saved:.1f} %", _ON, why)


def _by_sigma(lab: Lab) -> Table:
    """Shows how much (a) depends on the assumed spread."""
    trials = [replace(_sharing(way, ALPACA), sigma=sigma) for sigma in _SIGMAS for way in _PARALLEL]
    saved = iter(_saved(lab, trials))
    rows = [[f"sigma × {sigma:g}", *(f"{next(saved):.1f} %" for _ in _PARALLEL)] for sigma in _SIGMAS]
    return Table("Blocks saved by samples on Alpaca, by spread", ["", *(way.title for way in _PARALLEL)], rows)


def _by_gap(lab: Lab) -> Table:
    """Shows how much (b) depends on the assumption."""
    trials = [replace(_sharing(way, ALPACA), beam_gap=gap) for gap in _GAPS for way in _BEAMS]
    saved = iter(_saved(lab, trials))
    rows = [[f"{gap:g}", *(f"{next(saved):.1f} %" for _ in _BEAMS)] for gap in _GAPS]
    title = "Blocks saved by beams on Alpaca, by the mean gap between a beam's likeliest token and those that follow"
    return Table(title, ["gap", *(way.title for way in _BEAMS)], rows)


# -- prompts ----------------------------------------------------------------------------------------------------------


# By prefix: about what vLLM sustains.
_PREFIXES: Final = {80: 25.0, 341: 25.0}
_PREFIX_S: Final = 180.0
_CHAT_S: Final = 900.0
_CHAT_RATE: Final = 0.7
_LLAMA: Final = "production scheduler, LLaMA-13B on one A100-40GB, assumed lengths"
_OPT: Final = "production scheduler, OPT-13B on one A100-40GB"
_PREFIX_SYSTEMS: Final = (ORACLE, VLLM)
_CHAT_SYSTEMS: Final = (*ORCAS, VLLM)


def fig16(lab: Lab) -> Figure:
    """Compares vLLM, which keeps the prefix computed, with Orca, which computes and stores it for each request."""
    trials = [
        Trial(
            system, "llama-13b", WMT16.name, guess(system, rate), _PREFIX_S, prefix_tokens=tokens, pinned=system == VLLM
        )
        for tokens, rate in _PREFIXES.items()
        for system in _PREFIX_SYSTEMS
    ]
    knees = lab.search(trials)
    panels, rows = [], []
    for number, tokens in enumerate(_PREFIXES):
        part = slice(number * 2, number * 2 + 2)
        panels.append(curves(f"({'ab'[number]}) prefix of {tokens} tokens", trials[part], knees[part]))
        rates = rates_of(trials[part], knees[part])
        rows.append(_prefix_row(tokens, rates[VLLM] / rates[ORACLE]))
    return Figure(
        name="fig16",
        title="Figure 16: a shared prefix, LLaMA-13B on WMT16 English to German",
        notes=[
            f"The sentences' lengths are assumed: on average {WMT16.inputs.mean:g} tokens, and {WMT16.outputs.mean:g}"
            f" of their translations (lognormal, sigma 0.55). Traces of {_PREFIX_S / 60:g} minutes."
        ],
        panels=panels,
        rows=rows,
    )


def _prefix_row(tokens: int, ratio: float) -> Row:
    why = "memory for the prefix, its computation, and how long steps take; the sentences' lengths are assumed"
    return simulated(f"fig16/{tokens}", ratio, times(ratio), _LLAMA, why)


def fig17(lab: Lab) -> Figure:
    """Takes prompts of the last 1,024 tokens, at most 1,024 out; nothing is kept from round to round."""
    trials = [
        Trial(system, "opt-13b", "chatbot", _CHAT_RATE if system == VLLM else _CHAT_RATE / 2, _CHAT_S)
        for system in _CHAT_SYSTEMS
    ]
    knees = lab.search(trials)
    rates = rates_of(trials, knees)
    ratios = [rates[VLLM] / rates[system] for system in ORCAS]
    why = "half of the slots of Orca (Max) are of prompts that fill them; depends on the assumed rounds and spread"
    return Figure(
        name="fig17",
        title="Figure 17: chatbot, OPT-13B",
        notes=[
            "Conversations of 1 to 8 rounds of ShareGPT's lengths (assumed); the last answer is generated."
            f" Traces of {_CHAT_S / 60:g} minutes."
        ],
        panels=[curves("", trials, knees)],
        rows=[simulated("fig17", max(ratios), span(ratios), _OPT, why)],
        tables=[
            Table("Requests per second that are sustained", list(rates), [[f"{rate:.3g}" for rate in rates.values()]])
        ],
    )
