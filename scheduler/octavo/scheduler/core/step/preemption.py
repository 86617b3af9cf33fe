"""Preemption: whether a group's KV is moved to CPU memory and back, or computed again; by rule or by cost."""

import sys
from collections.abc import Sequence as Ordered

from octavo.scheduler.core.config import Preemption
from octavo.scheduler.core.replica import Replica
from octavo.scheduler.core.sequence import SequenceGroup
from octavo.wire.costs import PrefillCosts, SwapCosts, attended_pairs

# For each place in a replica's order, of the groups that run before it (last: of all): the steps until the first of
# them must have ended, and the sequences that they run side by side.
GrowthBefore = list[tuple[int, int]]


def prefers_swapping(replica: Replica, group: SequenceGroup, growth: GrowthBefore) -> bool:
    """Tells whether a running group that could be swapped out should be.

    `growth` is empty at first, filled where it is wanted, and serves for all groups that one step preempts: they go
    from the end.
    """
    preemption, costs = replica.config.preemption, replica.hello.costs
    if preemption is Preemption.MEASURED and costs is not None:
        recompute_s = recompute_seconds(replica, group, costs.prefill, growth)
        return swap_seconds(replica, group, costs.swap) < recompute_s + kept_seconds(replica, group, costs.swap, growth)
    return preemption is Preemption.SWAP or (preemption is not Preemption.RECOMPUTE and group.parallel > 1)


def swap_seconds(replica: Replica, group: SequenceGroup, costs: SwapCosts) -> float:
    """Returns the seconds to move all KV of the group out, and in again what others do not hold."""
    kv = replica.kv
    return 2 * costs.moves_s + kv.num_to_swap(group) * costs.block_out_s + kv.num_own(group) * costs.block_in_s


def recompute_seconds(
    replica: Replica, group: SequenceGroup, costs: PrefillCosts, growth: GrowthBefore | None = None
) -> float:
    """Returns the seconds to compute again what will be lost of the group: in steps that decode others as well, so that
    a step as such costs only where the group fills all of it."""
    num_taken = blocks_taken_meanwhile(replica, group, growth)
    lost = replica.kv.lost_by(group, num_taken)
    windows = [group.window for group in replica.hello.kv_groups]
    num_tokens = sum(run.num_tokens for run in lost)
    num_pairs = sum(attended_pairs(run.context, run.num_tokens, windows) for run in lost)
    return num_tokens * costs.token_s + num_pairs * costs.pair_s + num_tokens // replica.token_budget * costs.step_s


def kept_seconds(replica: Replica, group: SequenceGroup, costs: SwapCosts, growth: GrowthBefore | None = None) -> float:
    """Returns the seconds to move out, and in again, what will be taken of the group but not be lost."""
    num_kept = replica.kv.num_kept(group, blocks_taken_meanwhile(replica, group, growth))
    return num_kept * (costs.block_out_s + costs.block_in_s)


def blocks_taken_meanwhile(replica: Replica, group: SequenceGroup, growth: GrowthBefore | None = None) -> int:
    """Returns how many of the blocks that the group gives up are taken before it comes back: as many as the groups
    before it grow by until the first of them must have ended; all, if swapped groups come first."""
    place = replica.place(group)
    if (replica.swapped and replica.swapped[0].order < group.order) or place == 0:
        return replica.kv.num_blocks
    growth = [] if growth is None else growth
    if not growth:
        growth += growth_before(replica.running)
    num_steps, num_sequences = growth[place]
    return num_sequences * replica.kv.blocks_for(num_steps)


def growth_before(running: Ordered[SequenceGroup]) -> GrowthBefore:
    """Returns the growth before each place in `running`, in one walk."""
    found, num_steps, num_sequences = [(0, 0)], sys.maxsize, 0
    for group in running:
        live = group.live
        num_steps = min(num_steps, max(group.longest - sequence.num_known for sequence in live))
        num_sequences += group.parallel
        found.append((num_steps, num_sequences))
    return found
