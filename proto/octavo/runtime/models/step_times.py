"""Models the time that steps take on a worker: `octavo calibrate` writes the model to a file, and a simulation reads
it."""

from bisect import bisect_left
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from octavo.wire.base import Count, Name
from octavo.wire.costs import Seconds, StepCosts


class StepShape(Struct, frozen=True, gc=False):
    """Describes a step by the quantities on which its time depends.

    `num_tokens` are computed and `num_sampled` rows of logits are made. Decodes, which compute one token each, read the
    KV of `context_tokens` tokens together; all others, guesses beside a decode included, attend over `prefill_pairs`
    pairs (`octavo.wire.costs`). Blocks move out of the device, into it, and within it (`copies`).
    """

    num_tokens: int = 0
    num_sampled: int = 0
    context_tokens: int = 0
    prefill_pairs: float = 0.0
    blocks_out: int = 0
    blocks_in: int = 0
    copies: int = 0


class TokenTime(Struct, frozen=True, forbid_unknown_fields=True):
    """Gives the time of a step that computes `num_tokens` tokens, without attention, sampling and moves."""

    num_tokens: Annotated[int, Meta(ge=1)]
    seconds: Seconds


class StepTimeModel(Struct, frozen=True, forbid_unknown_fields=True):
    """Computes a step's seconds from its quantities.

    Between `token_times`, in rising order of their tokens, time is linear; below the first it is that of the first, and
    beyond the last it goes on as between the last two. `sampling_s` is for any rows of logits, and `moves_s` for each
    kind of move, however many there are.
    """

    token_times: Annotated[list[TokenTime], Meta(min_length=1)]
    sampling_s: Seconds
    sampled_s: Seconds
    context_token_s: Seconds
    pair_s: Seconds
    moves_s: Seconds
    block_out_s: Seconds
    block_in_s: Seconds
    copy_s: Seconds

    def __post_init__(self) -> None:
        if any(one.num_tokens >= other.num_tokens for one, other in pairwise(self.token_times)):
            raise ValueError("token_times must be in rising order of their tokens")

    def seconds(self, shape: StepShape) -> float:
        """Returns the seconds that a step of this shape takes."""
        moves = bool(shape.blocks_out) + bool(shape.blocks_in) + bool(shape.copies)
        return (
            (self._token_seconds(shape.num_tokens) if shape.num_tokens else 0.0)
            + (self.sampling_s if shape.num_sampled else 0.0)
            + shape.num_sampled * self.sampled_s
            + shape.context_tokens * self.context_token_s
            + shape.prefill_pairs * self.pair_s
            + moves * self.moves_s
            + shape.blocks_out * self.block_out_s
            + shape.blocks_in * self.block_in_s
            + shape.copies * self.copy_s
        )

    def slowed(self, step_s: float, sampled_s: float) -> "StepTimeModel":
        """Returns the model of a worker that takes `step_s` longer for each step that computes, and `sampled_s` longer
        for each row of logits, because other processes use its cores meanwhile."""
        times = [TokenTime(each.num_tokens, each.seconds + step_s) for each in self.token_times]
        return replace(self, token_times=times, sampled_s=self.sampled_s + sampled_s)

    def _token_seconds(self, num_tokens: int) -> float:
        times = self.token_times
        place = bisect_left(times, num_tokens, key=lambda each: each.num_tokens)
        if place == 0 or len(times) == 1:
            return times[0].seconds
        low, high = times[min(place, len(times) - 1) - 1 : min(place, len(times) - 1) + 1]
        slope = (high.seconds - low.seconds) / (high.num_tokens - low.num_tokens)
        return low.seconds + slope * (num_tokens - low.num_tokens)


class Calibration(Struct, frozen=True, forbid_unknown_fields=True):
    """Describes a worker as a simulation needs it: its sizes, how long its steps take, and how far that is from what
    was measured (`error`: the median of the relative differences). `costs` are what the worker would report to a
    scheduler; `kv_bytes_per_token` is that of all KV groups together, 0 in older files."""

    model: Name
    device: Name
    dtype: Name
    max_model_len: Annotated[int, Meta(ge=1)]
    vocab_size: Annotated[int, Meta(ge=1)]
    block_size: Annotated[int, Meta(ge=1)]
    num_blocks: Annotated[int, Meta(ge=1)]
    num_cpu_blocks: Count
    times: StepTimeModel
    error: Annotated[float, Meta(ge=0.0)]
    costs: StepCosts | None = None
    kv_bytes_per_token: Count = 0

    def write(self, path: Path) -> None:
        """Writes the calibration to `path` as JSON that people can read. Raises `OSError`."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")


class CalibrationError(ValueError):
    """Says why no calibration can be read from a file."""


def read_calibration(path: Path) -> Calibration:
    """Reads a file that `octavo calibrate` has written. Raises `CalibrationError`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Calibration)
    except OSError as error:
        raise CalibrationError(f"cannot read {path}: {error.strerror or error}") from error
    except msgspec.MsgspecError as error:
        raise CalibrationError(f"{path} is no calibration: {error}; write one with `octavo calibrate`") from error
