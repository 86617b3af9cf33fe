"""Reductions over rows of logits: largest values, argmax, and likelihoods with their sums in double precision."""

import math

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.native.argmax import argmax as native_argmax
from octavo.kernels.native.library import NativeUnavailable, find
from octavo.kernels.native.sampling import SPAN as SPAN
from octavo.kernels.native.sampling import weigh

# The number of neighbouring ids whose largest is found together.
_SPAN = 256


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the largest of each row of `logits` ([rows, vocab_size] fp32) and its id, [rows] each.

    Of equal ones the lowest id is returned. A NaN counts as the largest of all.
    """
    library = find()
    if logits.device.type == "cpu" and logits.is_contiguous() and not isinstance(library, NativeUnavailable):
        return native_argmax(library, logits)
    size = logits.shape[1]
    span = _span_maxima(logits, _SPAN).argmax(dim=-1, keepdim=True)
    # Beyond the end the last id is repeated: the first of equals is taken.
    tokens = (span * _SPAN + torch.arange(_SPAN, device=logits.device)).clamp_max_(size - 1)
    inside = logits.gather(1, tokens)
    token = tokens.gather(1, inside.argmax(dim=-1, keepdim=True))
    return logits.gather(1, token).squeeze(1), token.squeeze(1)


def largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the `count` largest of each row of `logits` ([rows, vocab_size] fp32) and their ids, [rows, count] each.

    They come in falling order, equal ones by rising id; a row with fewer than `count` gives all. Among logits of -inf
    the choice is open.
    """
    count = min(count, logits.shape[1])
    values, tokens = _top(*_pool(logits, count + 1), count + 1)
    if values.shape[1] > count:
        _settle_ties(logits, values, tokens)
        values, tokens = values[:, :count], tokens[:, :count]
    tokens, order = tokens.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, tokens.gather(1, order)


def ranked(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns what `largest` does for any fp32 `values` ([rows, n]), without the host reading them.

    The operations are the same whatever the values are. They take twice as much memory again. Among values of -inf the
    lowest ids come first.
    """
    keys = _ranking(values)
    count = min(count, values.shape[1])
    # Keys are distinct, so that which columns hold the largest, and which those are, is never open.
    found = _pool(keys, count)[0].topk(count, dim=-1).values
    tokens = values.shape[1] - 1 - (found & 0xFFFFFFFF)
    return values.gather(1, tokens), tokens


def _top(values: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
    found, places = values.topk(min(count, values.shape[1]), dim=-1)
    return found, tokens.gather(1, places)


def _pool(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns, for each row, some logits and their ids, [rows, n] each, among which are its `count` largest.

    A row is read as columns of ids that are far apart. The columns with the `count` largest maxima hold `count` logits
    that are not below anything in the other columns. (Columns, because the maxima of many of them are found side by
    side.)
    """
    rows, size = logits.shape
    height = _height(size, count)
    width = size // height
    columns = logits[:, : height * width].view(rows, height, width)
    chosen = columns.amax(dim=1).topk(min(count, width), dim=-1, sorted=False).indices
    inside = chosen[:, None] + width * torch.arange(height, device=logits.device)[:, None]
    rest = torch.arange(height * width, size, device=logits.device).expand(rows, -1)
    tokens = torch.cat((inside.flatten(1), rest), dim=1)
    return logits.gather(1, tokens), tokens


def _height(size: int, count: int) -> int:
    """Returns the height of a column: the power of two that makes about as many columns as `count` of them have ids."""
    height = 1
    while 4 * height * height * count <= size:
        height *= 2
    return height


def _settle_ties(logits: Tensor, values: Tensor, tokens: Tensor) -> None:
    """Settles ties at the end of `values` ([rows, n], each row's largest) in favour of the lowest ids, in place.

    Where the last value equals the one before it, it is open which of the equal logits belong to the n - 1 first: in
    these rows `tokens` gets those with the lowest ids.
    """
    tied = ((values[:, -1] == values[:, -2]) & (values[:, -1] > -torch.inf)).nonzero().squeeze(1)
    if len(tied):
        tokens[tied] = _ranking(logits.index_select(0, tied)).topk(values.shape[1], dim=-1).indices


def _span_maxima(logits: Tensor, width: int) -> Tensor:
    """Returns [rows, spans]: the largest of every `width` consecutive ids; the last span may be shorter."""
    rows, size = logits.shape
    whole = size // width * width
    maxima = logits[:, :whole].view(rows, size // width, width).amax(dim=-1)
    if whole == size:
        return maxima
    return torch.cat((maxima, logits[:, whole:].amax(dim=-1, keepdim=True)), dim=1)


def _ranking(values: Tensor) -> Tensor:
    """Returns distinct int64 keys that order fp32 `values` ([rows, n]) by size and equal ones by falling place.

    The upper half of a key is the value's bits, whose integers order positive floats; those of negative ones are
    inverted. The lower half is the distance from the end. (A selection by value alone would leave open which of several
    equal ones it takes.)
    """
    bits = (values + 0.0).view(torch.int32)  # -0.0 becomes 0.0, its equal.
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    size = values.shape[1]
    return (ordered.long() << 32) + torch.arange(size - 1, -1, -1, device=values.device)


def weights(logits: Tensor, largest: Tensor, divisors: Tensor) -> tuple[Tensor, Tensor]:
    """Returns e^((logit - largest) / divisor) of each of `logits`, [rows, n] fp32, and its sums over every `SPAN`
    neighbours, [rows, spans] fp64.

    No logit is above its row's `largest`; `largest` and `divisors` are [rows] fp32. Octavo's own kernel gives the same
    bits on every instruction set. (One long sum would be less exact, and torch adds it up in another order for a single
    row than for several.)
    """
    library = find()
    if logits.device.type == "cpu" and not isinstance(library, NativeUnavailable):
        return weigh(library, logits.contiguous(), largest.contiguous(), divisors.contiguous())
    found = (logits - largest[:, None]).div_(divisors[:, None]).exp_()
    rows, size = found.shape
    whole = size // SPAN * SPAN
    sums = found[:, :whole].view(rows, size // SPAN, SPAN).sum(dim=-1)
    if whole < size:
        sums = torch.cat((sums, found[:, whole:].sum(dim=-1, keepdim=True)), dim=1)
    return found, sums.double()


def total_weight(logits: Tensor, largest: Tensor, divisors: Tensor) -> Tensor:
    """Returns [rows, 1] fp64: the sum of all of a row's `weights`, one after the other."""
    return weights(logits, largest, divisors)[1].cumsum(dim=-1)[:, -1:]


# The logarithm of an m between sqrt(1/2) and sqrt(2) is a series in (m - 1) / (m + 1); what is left out is below a
# double's last bit.
_LOGARITHM = tuple(2.0 / (2 * n + 1) for n in range(11))


def logarithms(values: Tensor) -> Tensor:
    """Returns the natural logarithms of `values` (fp64, positive and finite), on a CPU the same bits on every one:
    products, sums and quotients, one by one."""
    if values.device.type != "cpu":
        return values.log()
    mantissas, exponents = np.frexp(values.numpy())
    low = mantissas < math.sqrt(0.5)
    mantissas, exponents = np.where(low, 2 * mantissas, mantissas), exponents - low
    ratio = (mantissas - 1.0) / (mantissas + 1.0)
    square, series = ratio * ratio, np.full_like(ratio, _LOGARITHM[-1])
    for factor in reversed(_LOGARITHM[:-1]):
        series = series * square + factor
    return torch.from_numpy(series * ratio + exponents * math.log(2))
