"""What becomes of a preempted group's KV: moved to CPU memory and back, or computed again; by rule or by cost."""

from octavo.scheduler.config import Preemption
from octavo.scheduler.replica import Replica
from octavo.scheduler.sequence import SequenceGroup
from octavo.wire.costs import PrefillCosts, SwapCosts, attended_pairs


def prefers_swapping(replica: Replica, group: SequenceGroup) -> bool:
    """Whether a running group that could be swapped out should be."""
    preemption, costs = replica.config.preemption, replica.hello.costs
    if preemption is Preemption.MEASURED and costs is not None:
        return swap_seconds(replica, group, costs.swap) < recompute_seconds(replica, group, costs.prefill)
    return preemption is Preemption.SWAP or (preemption is not Preemption.RECOMPUTE and group.parallel > 1)


def swap_seconds(replica: Replica, group: SequenceGroup, costs: SwapCosts) -> float:
    """To move all that the group holds out, and in again what others do not hold."""
    kv, holders = replica.kv, replica.holders(group)
    return (
        2 * costs.moves_s
        + kv.swapper.num_to_swap(holders) * costs.block_out_s
        + kv.swapper.num_own(holders) * costs.block_in_s
    )


def recompute_seconds(replica: Replica, group: SequenceGroup, costs: PrefillCosts) -> float:
    """To compute again what will be lost of the group: in steps that decode others as well, so that a step as such
    costs only where the group fills all of it."""
    spans = replica.kv.swapper.lost_by(replica.holders(group), blocks_taken_meanwhile(replica, group))
    windows = [group.window for group in replica.hello.kv_groups]
    num_tokens = sum(span.num_tokens for span in spans)
    num_pairs = sum(attended_pairs(span.context, span.num_tokens, windows) for span in spans)
    return num_tokens * costs.token_s + num_pairs * costs.pair_s + num_tokens // replica.token_budget * costs.step_s


def blocks_taken_meanwhile(replica: Replica, group: SequenceGroup) -> int:
    """Of those that the group gives up, how many are taken before it comes back: what the others grow by until the
    first of them must have ended; all, if swapped groups come first."""
    others = [other for other in replica.running if other is not group]
    if replica.swapped or not others:
        return replica.kv.num_blocks
    num_steps = min(max(other.longest - sequence.num_known for sequence in other.live) for other in others)
    return sum(other.parallel for other in others) * replica.kv.blocks_for(num_steps)
