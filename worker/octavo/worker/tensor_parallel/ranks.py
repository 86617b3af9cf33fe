"""One rank of a replica from its start to its end, the first one with those it starts beside it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from octavo.runtime.transport.endpoints import runtime_directory
from octavo.worker.config import LOCAL_SCHEME, WorkerConfig
from octavo.worker.health import Liveness
from octavo.worker.runner import Runner
from octavo.worker.step.model_runner import ModelRunner
from octavo.worker.tensor_parallel.distributed import DistributedGroup, RankLostError
from octavo.worker.tensor_parallel.follower import Follower
from octavo.worker.tensor_parallel.launch import (
    LocalRanks,
    die_with_first_rank,
    ended_by_ctrl_c,
    leave_signals_to_first_rank,
)
from octavo.worker.tensor_parallel.leader import NO_FOLLOWERS, Followers, Leader
from octavo.worker.tensor_parallel.rendezvous import connect

logger = logging.getLogger(__name__)

# A rank that has read its weights waits for those that still do.
_LOADING_PATIENCE_S = 1800.0
# Beats come many times as often, and ranks compute the same at the same time.
PATIENCE_S = 60.0


class Ranks:
    """All ranks of the replica, as this one of them sees them."""

    def __init__(self, group: DistributedGroup) -> None:
        self.group = group
        self._leader = None if group.rank else Leader(group)

    @property
    def followers(self) -> Followers:
        return self._leader or NO_FOLLOWERS

    def loaded(self) -> None:
        """From now on a rank that keeps the others waiting is lost."""
        self.group.exchange(0)
        self.group.set_patience(PATIENCE_S)

    def beat(self) -> None:
        """The first rank's, at every heartbeat."""
        if self._leader:
            self._leader.beat()

    def follow(self, runner: Runner, liveness: Liveness) -> None:
        """Computes what the first rank says, until that ends."""
        assert isinstance(runner, ModelRunner), "only models are shared"
        Follower(runner.paged_model, self.group).run(liveness)

    def end(self) -> None:
        """The first rank's last word."""
        if self._leader:
            self._leader.end()


@contextmanager
def joined(config: WorkerConfig) -> Iterator[Ranks]:
    """The replica of which `config` makes this process a rank. Raises `RendezvousError`, `RankLostError`."""
    if config.device == "cuda" and config.cuda_graphs:
        logger.info("with --tp steps are not captured as CUDA graphs")
    if config.tp_rank is None:
        with LocalRanks(config.tp, runtime_directory()) as local, _met(config, 0, local.rendezvous) as ranks:
            if config.device == "cpu":
                # GPUs meet later, over the same file.
                local.forget_meeting()
            try:
                yield ranks
            except RankLostError:
                local.await_failure()
                raise
            finally:
                # However it ends: the others learn of it before this process has.
                local.expect_end()
            ranks.end()
        return
    if config.is_local_follower:
        die_with_first_rank()
    assert config.tp_rendezvous is not None, "a rank is given with where it meets the others"
    with _met(config, config.tp_rank, config.tp_rendezvous) as ranks:
        if config.tp_rank:
            leave_signals_to_first_rank()
        yield ranks
        ranks.end()


@contextmanager
def _met(config: WorkerConfig, rank: int, rendezvous: str) -> Iterator[Ranks]:
    # Ranks that are started one by one may wait long for each other.
    with nullcontext() if rendezvous.startswith(LOCAL_SCHEME) else ended_by_ctrl_c():
        group = connect(rendezvous, rank, config.tp, patience_s=_LOADING_PATIENCE_S, cuda=config.device == "cuda")
    try:
        yield Ranks(group)
    finally:
        group.close()
