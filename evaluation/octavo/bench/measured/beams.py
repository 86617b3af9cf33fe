"""Paper Fig. 15b: how many blocks the beams of a real model share, on prompts of real text."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from tokenizers import Tokenizer

from octavo.bench.measured.figure import Figure, Value
from octavo.bench.measured.live import Live, summed_up
from octavo.bench.measured.loads import scaled
from octavo.bench.measured.options import DEFAULT_BLOCK_SIZE, Options
from octavo.bench.measured.texts import prompts
from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.core.replica import Replica
from octavo.scheduler.core.sequence import SequenceGroup
from octavo.worker.step.model_runner import ModelRunner
from octavo.workload.arrivals import AtOnce
from octavo.workload.synthetic import Workload

_WIDTHS = (2, 4, 6)
_SLOTS = 1 << 15
# Of each dataset: the scale of its lengths, and requests.
_LOADS = {"alpaca": (1.0, 16), "sharegpt": (0.5, 8)}
_QUICK_LOADS = {"alpaca": (0.3, 2), "sharegpt": (0.04, 2)}
_CONFIG = SchedulerConfig(max_steps_in_flight=1, prefix_caching=False)


@dataclass
class BlockCount:
    """Summed over all steps: blocks that are `taken`, and that there would be `unshared`."""

    taken: int = 0
    unshared: int = 0

    def add(self, replica: Replica) -> None:
        """As they are after a step."""
        self.taken += replica.kv.num_blocks - replica.kv.num_free
        self.unshared += sum(unshared_blocks(replica, group) for group in replica.running)

    @property
    def saved(self) -> float:
        """The share of blocks that need not be there."""
        return 1.0 - self.taken / self.unshared


def unshared_blocks(replica: Replica, group: SequenceGroup) -> int:
    """What as many sequences would hold without any sharing. A beam search is one sequence at first; its copies would
    be there from the start."""
    held = [len(replica.kv.block_table(sequence.leader or sequence)[0]) for sequence in group.live]
    return sum(held) * group.parallel // len(held)


def measure(options: Options) -> Iterator[Figure]:
    """Both datasets, at three widths."""
    runner = options.runner(DEFAULT_BLOCK_SIZE, _SLOTS)
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    loads = _QUICK_LOADS if options.quick else _LOADS
    yield Figure(
        name="beams",
        title="Blocks that beams share, over those of unshared sequences (paper Fig. 15b)",
        machine=options.machine,
        settings={
            "model": options.model_name,
            "block_size": DEFAULT_BLOCK_SIZE,
            **{f"{name}_scale": scale for name, (scale, _) in loads.items()},
        },
        notes=["Prompts are English text, cut to the lengths drawn; no search ends before the output length drawn."],
        rows=[_row(runner, tokenizer, name, *load, width=width) for name, load in loads.items() for width in _WIDTHS],
    )


def _row(
    runner: ModelRunner, tokenizer: Tokenizer, dataset: str, scale: float, num_requests: int, *, width: int
) -> dict[str, Value]:
    jobs = Workload(scaled(dataset, scale), AtOnce(), num_requests=num_requests, beam_width=width).jobs(seed=0)
    live, count = Live(runner, _CONFIG), BlockCount()
    token_ids = prompts(tokenizer, [job.prompt_tokens for job in jobs])
    run = live.serve(jobs, token_ids, lambda: count.add(live.engine.replica))
    summed_up(run)
    print(f"beams, {dataset}, width {width}: {run.seconds:.1f} s", file=sys.stderr, flush=True)
    return {
        "dataset": dataset,
        "width": width,
        "requests": num_requests,
        "mean_prompt": sum(job.prompt_tokens for job in jobs) / num_requests,
        "mean_output": sum(job.output_tokens for job in jobs) / num_requests,
        "saved_share": count.saved,
    }
