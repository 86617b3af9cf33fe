"""Makes Figs. 16 and 17: prompts that begin alike, and those of a long conversation."""

from typing import Final

from octavo.paper.figure import Figure, Row, Table
from octavo.paper.figures.common import ORACLE, ORCAS, curves, guess, rates_of, simulated, span, times
from octavo.paper.lab import Lab
from octavo.paper.setups import WMT16
from octavo.paper.systems import VLLM
from octavo.paper.trial import Trial

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
