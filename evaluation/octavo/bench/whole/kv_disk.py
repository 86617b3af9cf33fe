"""Measures what a worker's disk gains and costs: `python -m octavo.bench.whole.kv_disk`.

* Restart: a worker serves a prompt, is killed (-9) and started again, and gets the prompt again. Its first token is
  compared with that of other prompts of the same length, which nobody has served.
* Mirror: many requests at once, with a mirror and without one, by turns: requests a second.

Real processes and the bundled model. Of each figure the median of the rounds.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from octavo.bench.table import keep
from octavo.testbed.stack import Stack, collect, token_request
from octavo.worker.loading.prepare import prepare_bundled_model

_NUM_IDS: Final = 250
_ENVIRONMENT: Final = {"OCTAVO_DEVICE": "cpu", "OCTAVO_NUM_BLOCKS": "2048", "OCTAVO_NUM_CPU_BLOCKS": "2048"}


@dataclass(frozen=True)
class RestartRow:
    """Holds seconds until the first token of a prompt of so many tokens: of one that nobody had served, of one that a
    worker's last life had, and of the same once more, which is on the device by then; and tokens found for the
    second."""

    prompt_tokens: int
    cold_s: float
    restarted_s: float
    warm_s: float
    found: int

    def to_text(self) -> str:
        share = 100 * self.restarted_s / self.cold_s
        return (
            f"restart, {self.prompt_tokens} tokens: first token cold {self.cold_s:.3f} s, after a restart"
            f" {self.restarted_s:.3f} s ({share:.1f} % of cold; {self.found} tokens found), warm {self.warm_s:.3f} s"
        )


@dataclass(frozen=True)
class MirrorRow:
    """Holds requests a second without a disk, with one, and with a mirror on it, and the medians of the ratios to the
    first within a round."""

    without: float
    disk: float
    mirror: float
    disk_ratio: float
    mirror_ratio: float

    def to_text(self) -> str:
        return (
            f"requests a second: {self.without:.2f} without a disk, {self.disk:.2f} with one ({self.disk_ratio:.3f}),"
            f" {self.mirror:.2f} with a mirror ({self.mirror_ratio:.3f})"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for each part, and writes JSON where asked."""
    options = _options(arguments)
    rows: list[RestartRow | MirrorRow] = []
    with tempfile.TemporaryDirectory(prefix="octavo-", dir=options.directory) as parent:
        if "restart" in options.parts:
            rows.append(measure_restart(Path(parent) / "restart", options.prompt_tokens, options.rounds))
            print(rows[-1].to_text(), flush=True)
        if "mirror" in options.parts:
            rows.append(measure_mirror(Path(parent) / "mirror", options.requests, options.rounds))
            print(rows[-1].to_text(), flush=True)
    keep(rows, options.json)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="octavo.bench.whole.kv_disk", description=__doc__)
    parser.add_argument("parts", nargs="*", default=["restart", "mirror"], help="restart, mirror")
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="on the disk to be measured (default: that of temporary files)")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def measure_restart(directory: Path, prompt_tokens: int, rounds: int) -> RestartRow:
    """Kills a worker so many times, and asks for what it had served."""
    prompts = random.Random(0)
    cold, restarted, warm, found = list[float](), list[float](), list[float](), list[int]()
    directory.mkdir(parents=True)
    environment = {**_ENVIRONMENT, **_disk(directory, mirror=True)}
    with Stack(prepare_bundled_model(), directory / "run", environment) as stack:
        stack.start_all()
        first_token(stack, prompts.choices(range(_NUM_IDS), k=prompt_tokens))
        for _ in range(rounds):
            prompt = prompts.choices(range(_NUM_IDS), k=prompt_tokens)
            cold.append(first_token(stack, prompt)[0])
            stack.wait_idle()
            # What was written behind is with the system by now.
            time.sleep(1.0)
            stack.kill("worker-0")
            stack.wait_for(lambda: not stack.load().workers)
            stack.start_named("worker-0")
            stack.wait_for(lambda: bool(stack.load().workers), 60.0)
            first_token(stack, prompts.choices(range(_NUM_IDS), k=64))
            seconds, num_found = first_token(stack, prompt)
            restarted.append(seconds)
            found.append(num_found)
            warm.append(first_token(stack, prompt)[0])
    return RestartRow(prompt_tokens, median(cold), median(restarted), median(warm), min(found))


def first_token(stack: Stack, prompt: list[int]) -> tuple[float, int]:
    """Returns the seconds until the first token of a prompt, and how many of its tokens were found computed."""
    began = time.perf_counter()
    stream = stack.stream(token_request(prompt, 2))
    told, first = [], 0.0
    for response in stream:
        told.append(response)
        if response.HasField("delta") and not first:
            first = time.perf_counter() - began
    return first, collect(told).usage.cached_prompt_tokens


def measure_mirror(directory: Path, requests: int, rounds: int) -> MirrorRow:
    """Serves as many requests at once by turns: without a disk, with one, and with a mirror."""
    directory.mkdir(parents=True)
    kinds = {
        "without": dict[str, str](),
        "disk": _disk(directory / "kept", mirror=False),
        "mirror": _disk(directory / "mirrored", mirror=True),
    }
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(rounds):
        for kind, disk in kinds.items():
            with Stack(prepare_bundled_model(), directory / f"{kind}-{number}", {**_ENVIRONMENT, **disk}) as stack:
                stack.start_all()
                rates[kind].append(_rate(stack, requests, random.Random(number)))
    without = rates["without"]
    disk_ratio, mirror_ratio = (
        median(rate / base for rate, base in zip(rates[kind], without, strict=True)) for kind in ("disk", "mirror")
    )
    return MirrorRow(median(without), median(rates["disk"]), median(rates["mirror"]), disk_ratio, mirror_ratio)


def _rate(stack: Stack, requests: int, prompts: random.Random) -> float:
    stack.generate(token_request(prompts.choices(range(_NUM_IDS), k=128), 16))
    asked = [token_request(prompts.choices(range(_NUM_IDS), k=128), 64) for _ in range(requests)]
    began = time.perf_counter()
    stack.generate_all(asked, 600.0)
    return requests / (time.perf_counter() - began)


def _disk(directory: Path, *, mirror: bool) -> dict[str, str]:
    return {"OCTAVO_KV_DISK": str(directory / "kv"), "OCTAVO_KV_MIRROR": str(int(mirror))}


if __name__ == "__main__":
    sys.exit(main())
