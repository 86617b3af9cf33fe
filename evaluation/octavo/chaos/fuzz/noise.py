"""What is wrong with a message: its bytes, or the values in it. Everything is drawn from a `random.Random`."""

from collections.abc import Callable
from random import Random
from typing import Any, Final

_NUMBERS: Final = (0, 1, -1, 255, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 1e308, 5e-324)
_TEXTS: Final = ("", "\0", "a\nb", "é" * 200, "<|im_start|>", "../../etc/passwd", "{{ 7 * 7 }}", "x" * 5000, "null")
_MAX_DEPTH: Final = 200


def garbage(rng: Random, most: int = 256) -> bytes:
    """Any bytes."""
    return rng.randbytes(rng.randrange(most))


def mutated(rng: Random, frame: bytes) -> bytes:
    """The bytes with one to four things done to them."""
    for _ in range(rng.randint(1, 4)):
        frame = rng.choice(_CHANGES)(rng, frame)
    return frame


def _flipped(rng: Random, frame: bytes) -> bytes:
    if not frame:
        return b"\xff"
    place = rng.randrange(len(frame))
    return frame[:place] + bytes([frame[place] ^ 1 << rng.randrange(8)]) + frame[place + 1 :]


def _cut(rng: Random, frame: bytes) -> bytes:
    return frame[: rng.randrange(len(frame) + 1)]


def _without(rng: Random, frame: bytes) -> bytes:
    start, end = _slice(rng, frame)
    return frame[:start] + frame[end:]


def _doubled(rng: Random, frame: bytes) -> bytes:
    start, end = _slice(rng, frame)
    return frame[:end] + frame[start:end] * rng.randint(1, 3) + frame[end:]


def _with_garbage(rng: Random, frame: bytes) -> bytes:
    place = rng.randrange(len(frame) + 1)
    return frame[:place] + garbage(rng, 16) + frame[place:]


def _slice(rng: Random, frame: bytes) -> tuple[int, int]:
    start = rng.randrange(len(frame) + 1)
    return start, min(len(frame), start + rng.randrange(64))


_CHANGES: Final[tuple[Callable[[Random, bytes], bytes], ...]] = (_flipped, _cut, _without, _doubled, _with_garbage)


def any_value(rng: Random) -> Any:
    """A value of JSON's kinds."""
    match rng.randrange(9):
        case 0:
            return None
        case 1:
            return rng.random() < 0.5
        case 2 | 3:
            return rng.choice(_NUMBERS)
        case 4:
            return rng.uniform(-1000, 1000)
        case 5:
            return rng.choice(_TEXTS)
        case 6:
            return "".join(map(chr, rng.choices(range(0xD7FF), k=rng.randrange(8))))
        case 7:
            return [any_value(rng) for _ in range(rng.randrange(4))]
        case _:
            return {str(any_value(rng))[:40]: any_value(rng) for _ in range(rng.randrange(4))}


def changed(rng: Random, value: Any) -> Any:
    """The value of JSON's kinds, with a part of it left out, doubled, wrapped or in favour of another."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {name: each for name, each in value.items() if name != key}
        return {**value, key: changed(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.85:
        place = rng.randrange(len(value))
        if rng.random() < 0.2:
            return value[:place] + value[place:] * rng.randint(0, 3)
        return [*value[:place], changed(rng, value[place]), *value[place + 1 :]]
    return _other(rng, value)


def _other(rng: Random, value: Any) -> Any:
    if rng.random() < 0.02:
        for _ in range(_MAX_DEPTH):
            value = [value]
        return value
    if isinstance(value, int | float) and rng.random() < 0.5:
        return rng.choice(_NUMBERS)
    return any_value(rng)
