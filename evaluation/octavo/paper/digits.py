"""Lists the numbers of the vLLM paper (Kwon et al., SOSP 2023), figure by figure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Digit:
    """Holds a number of the paper, or a range from `low` to `high`; both are None where it says something else than
    one. `unit` is what stands behind it."""

    figure: str
    what: str
    low: float | None
    high: float | None = None
    unit: str = ""
    says: str = ""

    @property
    def text(self) -> str:
        """Returns the number as the paper has it."""
        if self.says or self.low is None:
            return self.says
        if self.high is None:
            return f"{self.low:g}{self.unit}"
        return f"{self.low:g} to {self.high:g}{self.unit}"

    def difference(self, ours: float) -> float | None:
        """Returns how far `ours` is from the paper's value, as a share of the paper's: 0 inside of its range."""
        if self.low is None:
            return None
        nearest = min(max(ours, self.low), self.low if self.high is None else self.high)
        return (ours - nearest) / nearest


_SYSTEMS = ("Orca (Max)", "Orca (Pow2)", "Orca (Oracle)", "vLLM")


def _by_system(key: str, figure: str, what: str, values: tuple[float, ...], unit: str = "") -> dict[str, Digit]:
    return {
        f"{key}/{system}": Digit(figure, f"{what}, {system}", value, unit=unit)
        for system, value in zip(_SYSTEMS, values, strict=True)
    }


def _by_width(key: str, figure: str, what: str, values: tuple[float, ...]) -> dict[str, Digit]:
    return {
        f"{key}/{width}": Digit(figure, f"{what} {width}", value, unit=" %")
        for width, value in zip((2, 4, 6), values, strict=True)
    }


DIGITS: dict[str, Digit] = {
    "table1/opt-13b": Digit("Table 1", "KV slots, OPT-13B on one A100-40GB", 15.7, unit="K"),
    "table1/opt-66b": Digit("Table 1", "KV slots, OPT-66B on four A100-40GB", 9.7, unit="K"),
    "table1/opt-175b": Digit("Table 1", "KV slots, OPT-175B on eight A100-80GB", 60.1, unit="K"),
    **_by_system("fig2", "2", "KV memory that holds tokens", (20.4, 26.8, 38.2, 96.3), " %"),
    "fig11/sharegpt/input": Digit("11", "mean input tokens, ShareGPT", 161.31),
    "fig11/sharegpt/output": Digit("11", "mean output tokens, ShareGPT", 337.99),
    "fig11/alpaca/input": Digit("11", "mean input tokens, Alpaca", 19.31),
    "fig11/alpaca/output": Digit("11", "mean output tokens, Alpaca", 58.45),
    "fig12/sharegpt/oracle": Digit("12 a-c", "rate sustained over Orca (Oracle), ShareGPT", 1.7, 2.7, "×"),
    "fig12/sharegpt/max": Digit("12 a-c", "rate sustained over Orca (Max), ShareGPT", 2.7, 8.0, "×"),
    "fig12/sharegpt/ft": Digit("12 a-c", "rate sustained over FasterTransformer, ShareGPT", 22.0, says="up to 22×"),
    "fig12/f": Digit(
        "12 f", "OPT-175B on Alpaca: rate sustained over Orca (Oracle)", None, says="less pronounced: compute-bound"
    ),
    **_by_system("fig13/sharegpt", "13 a", "mean batched requests, ShareGPT at 2 req/s", (7.00, 9.81, 13.62, 30.42)),
    **_by_system("fig13/alpaca", "13 b", "mean batched requests, Alpaca at 30 req/s", (7.00, 43.24, 72.75, 132.44)),
    "fig14/basic": Digit("14", "rate sustained over Orca (Oracle), basic sampling", 1.3, unit="×"),
    "fig14/beam6": Digit("14", "rate sustained over Orca (Oracle), beam width 6", 2.3, unit="×"),
    **_by_width("fig15/alpaca/parallel", "15 a", "blocks saved, Alpaca, samples:", (6.09, 8.53, 9.79)),
    **_by_width("fig15/alpaca/beam", "15 b", "blocks saved, Alpaca, beam width", (37.56, 53.13, 55.16)),
    "fig15/sharegpt/parallel/2": Digit("15 a", "blocks saved, ShareGPT, samples: 2", 16.2, unit=" %"),
    "fig15/sharegpt/parallel/6": Digit("15 a", "blocks saved, ShareGPT, samples: 6", 30.5, unit=" %"),
    "fig15/sharegpt/beam/2": Digit("15 b", "blocks saved, ShareGPT, beam width 2", 44.3, unit=" %"),
    "fig15/sharegpt/beam/6": Digit("15 b", "blocks saved, ShareGPT, beam width 6", 66.3, unit=" %"),
    "fig16/80": Digit("16 a", "rate sustained over Orca (Oracle), prefix of 80 tokens", 1.67, unit="×"),
    "fig16/341": Digit("16 b", "rate sustained over Orca (Oracle), prefix of 341 tokens", 3.58, unit="×"),
    "fig17": Digit("17", "rate sustained over each of the Orcas, chatbot", 2.0, unit="×"),
    "fig18a": Digit("18 a", "paged over contiguous attention, time of the kernel", 1.20, 1.26, "×"),
    "fig18b/sharegpt": Digit("18 b", "best block sizes, ShareGPT", None, says="16 to 128"),
    "fig18b/alpaca": Digit("18 b", "best block sizes, Alpaca", None, says="16 and 32"),
    "fig19/micro": Digit("19 a", "recomputing over swapping in and out, at worst", 1.2, says="at most 1.2×"),
    "fig19/steep": Digit("19 a", "by block size", None, says="recompute flat, swap steep at small blocks"),
    "fig19/end": Digit("19 b", "recompute over swap end to end, blocks of 16 to 64", 1.0, says="comparable"),
}
