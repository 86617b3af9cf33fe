"""Finds the token that a number falls on among those that cuts leave of a row, by falling probability, without sorting
the row.

Floats are ordered as integers are, by their bits: a cut is the key of the least probable value kept, and how many of
the tokens that have it. It is found by trying several keys in each pass. All sums are in fp64 and in an order that the
row alone decides.
"""

import triton
import triton.language as tl

from octavo.kernels.triton.sampling.stats import relative_masses

# The key of -inf.
LEAST_KEY = tl.constexpr(-0x7F800001)
_MOST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def keys_of(values):
    """Returns int32 keys that order fp32 `values` by size; equal values have equal keys."""
    # -0.0 becomes 0.0, its equal.
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """Returns the fp32 value of an int32 key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def search(
    values, size, low, high, goal, largest, temperature, BY: tl.constexpr, CHUNK: tl.constexpr, WAYS: tl.constexpr
):
    """Returns the highest key from `low` to `high` (that of the largest value) such that the tokens with this key or a
    higher one are at least `goal` (`BY` "count"), have at least that mass ("mass"), or more than that ("excess"); `low`
    if there is none. The row has `size` elements from `values` on."""
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        step = (high - low + WAYS + 1) // (WAYS + 1)
        # Beyond the highest there is nothing, which is too little.
        tried = tl.minimum(low + step * (1 + tl.arange(0, WAYS)), high + 1).to(tl.int32)
        sums = tl.zeros([WAYS], tl.float64)
        for start in range(0, size, CHUNK):
            places = start + tl.arange(0, CHUNK)
            chunk = tl.load(values + places, mask=places < size, other=float("-inf")).to(tl.float32)
            if BY == "count":
                weights = (places < size).to(tl.float64)
            else:
                weights = relative_masses(chunk, largest, temperature).to(tl.float64)
            sums += tl.sum(tl.where(keys_of(chunk)[None, :] >= tried[:, None], weights[None, :], 0.0), 1)
        enough = sums > goal
        if BY != "excess":
            enough = sums >= goal
        passed = tl.sum(enough.to(tl.int64), 0)
        low += step * passed
        high = tl.minimum(high, low + step - 1)
    return low.to(tl.int32)


@triton.jit
def tally(values, size, key, largest, temperature, CHUNK: tl.constexpr):
    """Returns the number of tokens with a higher key than `key`, the sum of their masses, and the number of tokens with
    `key` itself."""
    above, ties = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    mass = tl.full([], 0.0, tl.float64)
    for start in range(0, size, CHUNK):
        places = start + tl.arange(0, CHUNK)
        chunk = tl.load(values + places, mask=places < size, other=float("-inf")).to(tl.float32)
        keys = tl.where(places < size, keys_of(chunk), LEAST_KEY - 1)
        weights = relative_masses(chunk, largest, temperature).to(tl.float64)
        above += tl.sum((keys > key).to(tl.int32), 0)
        ties += tl.sum((keys == key).to(tl.int32), 0)
        mass += tl.sum(tl.where(keys > key, weights, 0.0), 0)
    return above, mass, ties


@triton.jit
def place_of(values, size, key, number, CHUNK: tl.constexpr):
    """Returns the place of the token with this key that has `number` tokens with the same key before it."""
    place, seen = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for start in range(0, size, CHUNK):
        places = start + tl.arange(0, CHUNK)
        chunk = tl.load(values + places, mask=places < size, other=float("-inf")).to(tl.float32)
        ties = ((places < size) & (keys_of(chunk) == key)).to(tl.int32)
        found = tl.sum(ties, 0)
        if (seen <= number) & (number < seen + found):
            order = seen + tl.cumsum(ties, 0) - 1
            place = tl.max(tl.where((ties > 0) & (order == number), places, 0), 0)
        seen += found
    return place


@triton.jit
def gather(
    values,
    size,
    wanted_spans,
    num_wanted,
    least_key,
    least,
    few_values,
    few_ids,
    largest,
    temperature,
    WIDTH: tl.constexpr,
    FEW: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Writes the values and ids, by rising id, of the possible tokens with `least_key` or a higher one and a scaled
    logit of `least` or more, unless they are more than `FEW`. How many they are, and the lowest of their keys. They are
    looked for in the `num_wanted` spans of `WIDTH` ids that `wanted_spans` (rising) holds."""
    count, lowest = tl.full([], 0, tl.int32), tl.full([], _MOST, tl.int32)
    for start in range(0, num_wanted * WIDTH, CHUNK):
        order = start + tl.arange(0, CHUNK)
        inside = order < num_wanted * WIDTH
        ids = tl.load(wanted_spans + order // WIDTH, mask=inside, other=0) * WIDTH + order % WIDTH
        loaded = tl.load(values + ids, mask=inside & (ids < size), other=float("-inf"))
        chunk = loaded.to(tl.float32)
        keys = keys_of(chunk)
        wanted = (keys >= least_key) & ((chunk - largest) / temperature >= least)
        wanted = wanted & (relative_masses(chunk, largest, temperature) > 0)
        found = tl.sum(wanted.to(tl.int32), 0)
        if found > 0:
            targets = count + tl.cumsum(wanted.to(tl.int32), 0) - 1
            tl.store(few_values + targets, loaded, mask=wanted & (targets < FEW))
            tl.store(few_ids + targets, ids, mask=wanted & (targets < FEW))
            lowest = tl.minimum(lowest, tl.min(tl.where(wanted, keys, _MOST), 0))
            count += found
    # Each thread of the program is to read what the others have written.
    tl.debug_barrier()
    return count, lowest


@triton.jit
def pick(
    values,
    size,
    count,
    lowest,
    top_k,
    top_p,
    whole,
    uniform,
    largest,
    temperature,
    CHUNK: tl.constexpr,
    WAYS: tl.constexpr,
):
    """Returns the place of the token that `uniform` falls on among the kept tokens, in falling order of their keys.

    Kept are the first `top_k` of the `count` tokens that have the key `lowest` or a higher one, and of these the first
    that reach `top_p` of `whole`, or of their own mass where `whole` is 0.
    """
    highest = keys_of(largest)
    # Kept are the tokens above the floor, and of those on it the first `limit`.
    floor = lowest
    if top_k < count:
        floor = search(values, size, lowest, highest, top_k, largest, temperature, "count", CHUNK, WAYS)
    above, mass, ties = tally(values, size, floor, largest, temperature, CHUNK)
    limit = tl.minimum(ties, top_k - above)
    kept = mass + limit * relative_masses(value_of(floor), largest, temperature).to(tl.float64)
    if top_p < 1:
        goal = top_p * tl.where(whole > 0, whole, kept)
        cut = search(values, size, floor, highest, goal, largest, temperature, "mass", CHUNK, WAYS)
        above, mass, ties = tally(values, size, cut, largest, temperature, CHUNK)
        one = relative_masses(value_of(cut), largest, temperature).to(tl.float64)
        limit = tl.where(cut == floor, limit, ties)
        limit = tl.minimum(limit.to(tl.float64), tl.maximum(tl.ceil((goal - mass) / one), 1.0)).to(tl.int32)
        kept = mass + limit * one
        floor = cut
    target = uniform * kept
    key = search(values, size, floor, highest, target, largest, temperature, "excess", CHUNK, WAYS)
    above, mass, ties = tally(values, size, key, largest, temperature, CHUNK)
    one = relative_masses(value_of(key), largest, temperature).to(tl.float64)
    last = tl.where(key == floor, limit, ties) - 1
    number = tl.minimum(last.to(tl.float64), tl.maximum(tl.floor((target - mass) / one), 0.0)).to(tl.int32)
    return place_of(values, size, key, number, CHUNK)
