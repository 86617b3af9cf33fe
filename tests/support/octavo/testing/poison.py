"""Workers of a `Cluster` that crash whenever they compute a certain request, and come back."""

from itertools import count

from octavo.scheduler.core.events import LossCause, StepAnswered
from octavo.testing.cluster import Cluster, ended


class Poison:
    """Kills workers over the request `request_id`. `deaths` names what each was computing, in the step and the next."""

    def __init__(self, cluster: Cluster, request_id: str) -> None:
        self.deaths: list[set[str]] = []
        self._cluster = cluster
        self._request_id = request_id
        self._incarnations = count(1000)

    def step(self) -> None:
        """Plans; then every replica answers its oldest plan, or dies of it and registers anew."""
        cluster = self._cluster
        for _ in range(cluster.core.config.max_steps_in_flight):
            cluster.schedule()
        cluster.now += 0.01
        for incarnation, replica in list(cluster.replicas.items()):
            if self._request_id in computed(cluster, incarnation, 1):
                self.deaths.append(computed(cluster, incarnation))
                cluster.leave(incarnation, LossCause.UNREACHABLE)
                word = ended(replica.hello.process)
                cluster.join(next(self._incarnations), worker_id=replica.hello.worker_id, predecessor=word)
            elif replica.plans:
                cluster.handle(StepAnswered(incarnation, replica.execute()))

    def run(self, max_steps: int = 2000) -> None:
        """Steps until nothing is held."""
        for _ in range(max_steps):
            if not self._cluster.core.groups:
                return
            self.step()
        raise AssertionError(f"{len(self._cluster.core.groups)} requests still held after {max_steps} steps")


def computed(cluster: Cluster, incarnation: int, num_steps: int | None = None) -> set[str]:
    """Returns the requests in a replica's outstanding steps, or in the first `num_steps` of them."""
    steps = list(cluster.core.replicas[incarnation].outstanding)[:num_steps]
    return {group.request_id for step in steps for group in step.groups}
