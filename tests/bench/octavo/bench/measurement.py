"""What a run of a case yields, and how it is told: text for people, JSON for programs."""

import statistics
from dataclasses import asdict, dataclass, field

from octavo.bench.workloads import Case


@dataclass
class Stream:
    """When a request's tokens came, in seconds since the case began."""

    first: float = 0.0
    last: float = 0.0
    num_tokens: int = 0

    def arrived(self, num_tokens: int, at: float) -> None:
        if num_tokens and not self.num_tokens:
            self.first = at
        self.num_tokens += num_tokens
        self.last = at


@dataclass(frozen=True)
class Measurement:
    """One run. Times in seconds unless named otherwise; `stages` are shares of the wall time, `cpu_s` by process."""

    case: str
    title: str
    path: str
    wall_s: float
    output_tokens_per_s: float
    ms_per_token: float
    ttft_ms: float
    ttft_ms_worst: float
    steps: int
    stages: dict[str, float]
    cpu_s: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    def to_text(self) -> str:
        shares = "  ".join(f"{name} {share:.1%}" for name, share in self.stages.items())
        lines = [
            f"case {self.case} ({self.title}), {self.path}",
            f"  {self.output_tokens_per_s:8.1f} output tokens/s   {self.ms_per_token:6.2f} ms/token   wall"
            f" {self.wall_s:.2f} s in {self.steps} steps",
            f"  TTFT median {self.ttft_ms:.0f} ms, worst {self.ttft_ms_worst:.0f} ms",
            f"  time by stage: {shares}",
        ]
        if self.cpu_s:
            lines.append("  CPU seconds:   " + "  ".join(f"{name} {s:.2f}" for name, s in self.cpu_s.items()))
        return "\n".join(lines)


def measured(
    case: Case,
    path: str,
    wall_s: float,
    streams: list[Stream],
    steps: int,
    stage_s: dict[str, float],
    cpu_s: dict[str, float] | None = None,
) -> Measurement:
    """Sums up a run. Raises `RuntimeError` if a request got another number of tokens than it asked for."""
    for job, stream in zip(case.jobs, streams, strict=True):
        if stream.num_tokens != job.num_tokens:
            raise RuntimeError(
                f"case {case.name}: {stream.num_tokens} tokens came where {job.num_tokens} were asked for"
            )
    stages = {name: seconds / wall_s for name, seconds in stage_s.items()}
    stages["other"] = 1.0 - sum(stages.values())
    gaps = [(stream.last - stream.first) / (stream.num_tokens - 1) for stream in streams if stream.num_tokens > 1]
    return Measurement(
        case=case.name,
        title=case.title,
        path=path,
        wall_s=wall_s,
        output_tokens_per_s=case.num_output_tokens / wall_s,
        ms_per_token=1000 * statistics.median(gaps),
        ttft_ms=1000 * statistics.median(stream.first for stream in streams),
        ttft_ms_worst=1000 * max(stream.first for stream in streams),
        steps=steps,
        stages=stages,
        cpu_s=cpu_s or {},
    )
