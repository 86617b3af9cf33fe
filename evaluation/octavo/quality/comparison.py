"""Compares what a model and its references predict, position by position."""

from collections.abc import Callable, Sequence

import torch

from octavo.quality.forced import ForcedModel
from octavo.quality.measures import Quality, Tally, predictions

# Positions whose predictions are held at a time: those of a window would be larger than many a model.
_POSITIONS = 64


def compare(
    models: Sequence[ForcedModel], windows: Sequence[Sequence[int]], tell: Callable[[int, int], None]
) -> list[Quality]:
    """Returns the quality of the first model, with its distances from the others, then the others'.

    The tokens of the second half of each window are predicted, but for the first. `tell` hears how many windows are
    done, of how many.
    """
    tally = Tally(len(models) - 1)
    for done, window in enumerate(windows, start=1):
        first = len(window) // 2
        hidden = [model.hidden(window, first) for model in models]
        tokens = torch.tensor(window[first + 1 :])
        for start in range(0, len(tokens), _POSITIONS):
            few = slice(start, start + _POSITIONS)
            # A model may give all its logits in the same memory.
            predicted = [predictions(model.logits(states[few])) for model, states in zip(models, hidden, strict=True)]
            tally.add(predicted[0], predicted[1:], tokens[few])
        tell(done, len(windows))
    return tally.qualities()
