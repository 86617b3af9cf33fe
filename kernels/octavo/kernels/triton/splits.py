"""Into how many stretches the keys of every sequence are split, so that a few sequences keep a whole GPU busy.

The answer follows from what the host knows, since a launch may be captured in a CUDA graph; each sequence is then split
evenly by its own length. The constants come from arithmetic and are to be replaced by measured ones.
"""

# The share of multiprocessors that programs in one pass must occupy: alone on a multiprocessor, one has 64 KiB under
# way, twice what saturates memory, and a second kernel costs some 3 us.
_OCCUPIED = 0.75
# Programs of attention that a multiprocessor holds at once.
_PROGRAMS_PER_MULTIPROCESSOR = 2
# And of such as find nothing to do: where splits lie still, a graph that was captured for the longest context has most.
_PROGRAMS_OF_STILL_SPLITS = 8
# Keys for which another split is worth its part of the sums.
_LEAST_KEYS = 256
_MOST_SPLITS = 128


def num_splits(programs: int, max_keys: int, multiprocessors: int) -> int:
    """Splits for `programs` (tiles of queries x KV heads) that see up to `max_keys` keys each; 1: one pass.

    Never more programs in all than run at once, unless one pass has more.
    """
    if programs >= _OCCUPIED * multiprocessors:
        return 1
    wanted = _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors // max(1, programs)
    return max(1, min(wanted, max_keys // _LEAST_KEYS, _MOST_SPLITS))


def programs_of_splits(programs: int, num_splits: int, multiprocessors: int) -> int:
    """How many share the splits, which lie still, of each of `programs`. Few tiles keep a GPU busy by their splits;
    many need no more, and programs without a split take their time too."""
    wanted = -(-_PROGRAMS_OF_STILL_SPLITS * multiprocessors // max(1, programs))
    return max(1, min(wanted, num_splits))
