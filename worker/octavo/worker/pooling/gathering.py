"""What a pooling needs of a text's hidden states, gathered while the text is computed in steps.

Sums are of fp64 and go from token to token, so that a text's output is the same to the last bit however it was cut into
steps.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

States = npt.NDArray[np.float32]
# The mode that needs no state but that of the last token.
LAST: Final = "lasttoken"


class _Gathered(Protocol):
    """Holds what one mode needs of the states that were added."""

    def add(self, states: States, start: int) -> None:
        """Adds the states, [tokens, hidden_size], of the tokens from position `start` on."""

    def pooled(self, num_tokens: int) -> States:
        """Returns what the mode gives of all `num_tokens` states, [hidden_size]."""


class _First:
    def __init__(self) -> None:
        self._state: States | None = None

    def add(self, states: States, start: int) -> None:
        if not start:
            self._state = states[0].copy()

    def pooled(self, num_tokens: int) -> States:
        assert self._state is not None, "a text is gathered from its first token on"
        return self._state


class _Last:
    def __init__(self) -> None:
        self._state = np.empty(0, np.float32)

    def add(self, states: States, start: int) -> None:
        self._state = states[-1].copy()

    def pooled(self, num_tokens: int) -> States:
        return self._state


class _Largest:
    def __init__(self) -> None:
        self._largest: States | None = None

    def add(self, states: States, start: int) -> None:
        largest = states.max(0)
        self._largest = largest if self._largest is None else np.maximum(self._largest, largest)

    def pooled(self, num_tokens: int) -> States:
        assert self._largest is not None, "a text has a token"
        return self._largest


class _Sum:
    """The sum of states, times their positions counted from 1 if it `weighs` them, over a divisor."""

    def __init__(self, divisor: Callable[[int], float], *, weighs: bool = False) -> None:
        self._divisor = divisor
        self._weighs = weighs
        self._sum: npt.NDArray[np.float64] | None = None

    def add(self, states: States, start: int) -> None:
        rows = states.astype(np.float64)
        if self._weighs:
            rows *= np.arange(start + 1, start + 1 + len(rows))[:, None]
        if self._sum is not None:
            rows = np.concatenate([self._sum[None], rows])
        # Along the rows numpy adds one to the next; only along neighbours in memory does it add pairs.
        self._sum = np.add.reduce(rows, axis=0)

    def pooled(self, num_tokens: int) -> States:
        assert self._sum is not None, "a text has a token"
        return (self._sum / self._divisor(num_tokens)).astype(np.float32)


_MODES: Final[Mapping[str, Callable[[], _Gathered]]] = MappingProxyType(
    {
        "cls": _First,
        "max": _Largest,
        "mean": lambda: _Sum(float),
        "mean_sqrt_len": lambda: _Sum(math.sqrt),
        "weightedmean": lambda: _Sum(lambda count: count * (count + 1) / 2, weighs=True),
        LAST: _Last,
    }
)


class GatheredText:
    """Gathers what `modes` need of the states of one text, of which `num_tokens` tokens were added."""

    def __init__(self, modes: Sequence[str]) -> None:
        self._gathered = [_MODES[mode]() for mode in modes]
        self.num_tokens = 0

    def add(self, states: Tensor, start: int) -> None:
        """Adds the states, [tokens, hidden_size] fp32, of the tokens from position `start` on."""
        rows = states.numpy()
        for each in self._gathered:
            each.add(rows, start)
        self.num_tokens = start + len(rows)

    def parts(self) -> list[Tensor]:
        """Returns what each mode gives, [hidden_size] fp32."""
        return [torch.from_numpy(each.pooled(self.num_tokens)) for each in self._gathered]


def gathers(modes: Sequence[str]) -> bool:
    """Tells whether `modes` need any state but that of the last token."""
    return any(mode != LAST for mode in modes)
