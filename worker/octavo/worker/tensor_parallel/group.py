"""The interface between the parts of a model and the ranks that share it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    # Modules that start without torch name a group of one.
    from torch import Tensor


class ShardGroup(Protocol):
    """The ranks 0 to `size` - 1 that compute one model together; this process is `rank`.

    Every call is a collective: all ranks make the same calls in the same order.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: "Tensor") -> "Tensor":
        """Returns the sum over ranks, in the place of `tensor` (contiguous, of one shape on all ranks).

        All ranks get the same bits. On a CPU an element's terms are added in the order of the ranks, whatever lies
        around it.
        """

    def gather_columns(self, part: "Tensor", sizes: Sequence[int]) -> "Tensor | None":
        """Returns each rank's `part` ([rows, sizes[rank]]) side by side, [rows, sum(sizes)], on rank 0; None on the
        others."""

    def exchange(self, number: int) -> list[int]:
        """Returns the numbers that the ranks gave, in their order."""


class SingleRank:
    """A group of one rank, which waits for nothing."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: "Tensor") -> "Tensor":
        return tensor

    def gather_columns(self, part: "Tensor", sizes: Sequence[int]) -> "Tensor | None":
        return part

    def exchange(self, number: int) -> list[int]:
        return [number]


SINGLE = SingleRank()
