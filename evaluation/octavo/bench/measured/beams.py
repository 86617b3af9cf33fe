"""Counts the blocks that the beams of a real model share on prompts of real text (paper Fig. 15b)."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from octavo.bench.measured.experiment import DEFAULT_BLOCK_SIZE, Findings, Options, Value
from octavo.bench.measured.live import Live, scaled, summed_up
from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.core.replica import Replica
from octavo.scheduler.core.sequence import SequenceGroup
from octavo.worker.step.model_runner import ModelRunner
from octavo.workload.synthetic import AtOnce, Workload

_PARAGRAPHS = (
    "Explain how a lighthouse keeper of two hundred years ago spent an ordinary winter night, and what could go wrong.",
    "List five things that a family should take along on a three-day walk through hills without shops or roads.",
    "Describe the way bread rises, and why a cold kitchen makes a baker wait longer than a warm one does.",
    "Write a short letter to a neighbour whose dog barks every morning, polite but clear about what you would like.",
    "What is the difference between weather and climate? Give an example that a child of ten would understand.",
    "Summarise the following: the bridge was closed in spring, because a crack had been found in one of its pillars. "
    "Engineers worked through the summer, and the first train crossed it again in October, a month before the date "
    "that had been promised. The town paid a third of the bill, the railway the rest.",
    "Tell me the steps for planting an apple tree: when to dig, how deep, and how much water it needs at first.",
    "Compare a bicycle and a bus as ways to get to work in a small city. Think of cost, time, rain and health.",
    "A tank holds forty litres and loses three every hour. How long does it take until less than ten litres are left?",
    "Give advice to someone who must speak in front of a large audience for the first time and cannot sleep.",
    "The museum opens at nine. On Mondays only the garden can be visited, and children pay nothing. Rewrite this as a "
    "notice for the door, in at most three lines.",
    "How do sailors find their way at night when no land is in sight? Mention stars, clocks and charts.",
    "Turn this into a question: the library will lend each reader no more than six books at a time.",
    "Why do leaves change colour in autumn? Answer in one paragraph, without words that only a botanist would know.",
    "Continue the story: when the last ferry had left, she saw that the island was not as empty as she had been told.",
    "Name the parts of a clock that is driven by a weight, and say in one sentence what each of them is there for.",
)


def prompts(tokenizer: Tokenizer, lengths: Sequence[int]) -> list[list[int]]:
    """Returns token ids of a text for each length, cut to that length. Each begins with another paragraph, as long as
    there are."""
    return [_prompt(tokenizer, index, length) for index, length in enumerate(lengths)]


def _prompt(tokenizer: Tokenizer, index: int, length: int) -> list[int]:
    first = index % len(_PARAGRAPHS)
    text = "\n\n".join((*_PARAGRAPHS[first:], *_PARAGRAPHS[:first]))
    token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    # What is longer than all of the text goes on with its beginning.
    return (token_ids * -(-length // len(token_ids)))[:length]


_WIDTHS = (2, 4, 6)
_SLOTS = 1 << 15
# Of each dataset: the scale of its lengths, and requests.
_LOADS = {"alpaca": (1.0, 16), "sharegpt": (0.5, 8)}
_QUICK_LOADS = {"alpaca": (0.3, 2), "sharegpt": (0.04, 2)}
_CONFIG = SchedulerConfig(max_steps_in_flight=1, prefix_caching=False)


@dataclass
class BlockCount:
    """Sums over all steps the blocks that are `taken`, and those that there would be `unshared`."""

    taken: int = 0
    unshared: int = 0

    def add(self, replica: Replica) -> None:
        """Adds the blocks that `replica` holds after a step."""
        self.taken += replica.kv.num_blocks - replica.kv.num_free
        self.unshared += sum(unshared_blocks(replica, group) for group in replica.running)

    @property
    def saved(self) -> float:
        """Returns the share of blocks that need not be there."""
        return 1.0 - self.taken / self.unshared


def unshared_blocks(replica: Replica, group: SequenceGroup) -> int:
    """Returns how many blocks as many sequences would hold without any sharing. A beam search is one sequence at first;
    its copies would be there from the start."""
    held = [len(replica.kv.block_table(sequence.placement.leader or sequence)[0]) for sequence in group.live]
    return sum(held) * group.parallel // len(held)


def measure(options: Options) -> Iterator[Findings]:
    """Measures both datasets, at three widths."""
    runner = options.runner(DEFAULT_BLOCK_SIZE, _SLOTS)
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    loads = _QUICK_LOADS if options.quick else _LOADS
    yield Findings(
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
