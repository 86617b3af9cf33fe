"""Random numbers as a pure function of a key, by Philox-4x32-10: a replayed token draws the same number again.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011).
"""

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def uniforms(seeds: list[int], sequence_indices: list[int], positions: list[int]) -> npt.NDArray[np.float64]:
    """Returns one number in [0, 1) with 53 random bits per row, a function of that row's three integers alone.

    A seed has 64 bits, an index and a position 32. `positions` count a sequence's generated tokens.
    """
    key = np.array(seeds, dtype=np.uint64)
    zeros = np.zeros_like(key)
    counter = (np.array(positions, dtype=np.uint64), np.array(sequence_indices, dtype=np.uint64), zeros, zeros)
    high, low, _, _ = philox4x32(counter, (key & _LOW, key >> _SHIFT))
    mantissa = (high << np.uint64(21)) | (low >> np.uint64(11))
    return mantissa.astype(np.float64) * 2.0**-53


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Returns four arrays of random 32-bit words for four of counter words and two of key words, all in uint64."""
    first, second, third, fourth = counter
    key0, key1 = key
    for _ in range(_ROUNDS):
        product0, product1 = first * _MULTIPLIERS[0], third * _MULTIPLIERS[1]
        first, second, third, fourth = (
            (product1 >> _SHIFT) ^ second ^ key0,
            product1 & _LOW,
            (product0 >> _SHIFT) ^ fourth ^ key1,
            product0 & _LOW,
        )
        key0, key1 = (key0 + _KEY_STEPS[0]) & _LOW, (key1 + _KEY_STEPS[1]) & _LOW
    return first, second, third, fourth
