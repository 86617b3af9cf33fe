"""`python -m octavo.bench.parts.cpu_tier`: counts the prompt tokens of conversations that are computed again, by how
many blocks CPU memory has, without a disk behind it and with one that has room for all.

The production core plans; nothing is computed. A turn's prompt is all that was said before and a new message. Between
two turns of one conversation all others have theirs, and their keys and values take four times the device's blocks.
"""

import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import click

from octavo.bench.parts.scheduler_alone import STEP_S, SchedulerAlone, make_request, plans
from octavo.bench.table import keep, line
from octavo.scheduler.core.config import SchedulerConfig
from octavo.scheduler.core.events import Effect
from octavo.scheduler.core.steps_in_flight import OutstandingStep
from octavo.wire.sampling import SamplingParams
from octavo.wire.steps import BlockContent, FurtherTokens, KVDisk, SampledToken, StepResult

_BLOCK_SIZE = 16
_PRESSURE = 4
_AT_A_TIME = 4
_WIDTHS = (12, 8, 12, 14, 12, 12, 12)


@dataclass(frozen=True)
class TierRow:
    """Counts, with `times` as many CPU blocks as the device has: tokens of prompts, those of them that were computed,
    the blocks that moved to CPU memory and back, and those that a disk has given, if there was one."""

    times: int
    has_disk: bool
    prompt_tokens: int
    computed: int
    stored: int
    loaded: int
    read: int


class Conversations(SchedulerAlone):
    """Remembers what was said in each conversation; a request's id begins with its number. A disk keeps all that it is
    given, and reads it between two steps."""

    def __init__(self, *, num_blocks: int, num_cpu_blocks: int, has_disk: bool) -> None:
        super().__init__(
            SchedulerConfig(max_num_batched_tokens=512),
            num_blocks=num_blocks,
            block_size=_BLOCK_SIZE,
            num_cpu_blocks=num_cpu_blocks,
            kv_disk=KVDisk() if has_disk else None,
        )
        self.said: defaultdict[int, list[int]] = defaultdict(list)
        self.num_read = 0
        self._on_disk: set[bytes] = set()
        self._fetches: dict[int, list[BlockContent]] = {}

    def schedule(self) -> list[Effect]:
        effects = super().schedule()
        for plan in plans(effects):
            if plan.disk is not None:
                self._on_disk.update(content.value for content in plan.disk.store)
                if plan.disk.fetch:
                    self._fetches[plan.step_id] = plan.disk.fetch
        return effects

    def accept(self, result: StepResult, seconds: float = STEP_S) -> list[Effect]:
        effects = super().accept(result, seconds)
        if wanted := self._fetches.pop(result.step_id, None):
            found = [content.value in self._on_disk for content in wanted]
            self.num_read += sum(found)
            self.answer_from_disk(result.step_id, found)
        return effects

    def chosen(self, step: OutstandingStep) -> tuple[list[SampledToken], list[FurtherTokens]]:
        sampled, further = super().chosen(step)
        for (group, _), token in zip(step.samplers, sampled, strict=True):
            self.said[int(group.request_id.partition(".")[0])].append(token.token_id)
        return sampled, further


def measure(
    times: int, *, conversations: int, turns: int, message: int, answer: int, has_disk: bool = False
) -> TierRow:
    """Plays all turns of all conversations, a few side by side, each round in another order."""
    rng = random.Random(1)
    num_blocks = conversations * (turns * (message + answer) // _BLOCK_SIZE + 1) // _PRESSURE
    alone = Conversations(num_blocks=num_blocks, num_cpu_blocks=times * num_blocks, has_disk=has_disk)
    prompt_tokens = planned = stored = loaded = 0
    for turn in range(turns):
        order = rng.sample(range(conversations), conversations)
        for first in range(0, conversations, _AT_A_TIME):
            for number in order[first : first + _AT_A_TIME]:
                alone.said[number] += alone.draw_tokens(message)
                prompt_tokens += len(alone.said[number])
                sampling = SamplingParams(max_tokens=answer)
                alone.submit(make_request(f"{number}.{turn}", list(alone.said[number]), sampling))
            for plan in (plan for planned_now in alone.run() for plan in planned_now):
                planned += sum(work.num_tokens for work in plan.work)
                stored += len(plan.moves.swap_out)
                loaded += len(plan.moves.swap_in)
    # The last token of an answer is never computed.
    computed = planned - conversations * turns * (answer - 1)
    return TierRow(times, has_disk, prompt_tokens, computed, stored, loaded, alone.num_read)


@click.command()
@click.option("--conversations", default=24, show_default=True)
@click.option("--turns", default=6, show_default=True)
@click.option("--message", default=96, show_default=True, help="Tokens of a new message.")
@click.option("--answer", default=32, show_default=True, help="Tokens of an answer.")
@click.option(
    "--times", default=(0, 1, 2, 4), multiple=True, show_default=True, help="CPU blocks for each of the device."
)
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the rows here too.")
def main(conversations: int, turns: int, message: int, answer: int, times: tuple[int, ...], path: Path | None) -> None:
    """Prints how many prompt tokens are computed, and their share of the first row's."""
    # What comes from a disk comes by way of CPU blocks.
    cases = [(each, has_disk) for each in times for has_disk in (False, True) if each or not has_disk]
    sizes = {"conversations": conversations, "turns": turns, "message": message, "answer": answer}
    rows = [measure(each, has_disk=has_disk, **sizes) for each, has_disk in cases]
    click.echo(line(("CPU blocks", "disk", "prompts", "computed", "stored", "loaded", "read"), _WIDTHS))
    for row in rows:
        share = f"{row.computed} ({row.computed / rows[0].computed:.0%})"
        disk = "yes" if row.has_disk else "no"
        moved = (str(row.stored), str(row.loaded), str(row.read))
        click.echo(line((f"{row.times} x", disk, str(row.prompt_tokens), share, *moved), _WIDTHS))
    keep(rows, path)


if __name__ == "__main__":
    main()
