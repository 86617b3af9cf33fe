"""The clients of a run: they come, lose patience, come again, and are served or told why not."""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from octavo.frontend.errors import Reason
from octavo.scheduler.core.faults.poison import UNEXPLAINED_TO_CONVICT
from octavo.testing.simulation.client import Client
from octavo.testing.simulation.processes.frontend import FrontendProcess
from octavo.testing.simulation.scenario import PATIENT_S
from octavo.testing.simulation.workload import ClientPlan

if TYPE_CHECKING:
    from octavo.testing.simulation.simulation import Simulation

_RETRY_S = 0.3


class Crowd:
    """Manages all clients. `num_open` of them are still to come, or to be served."""

    def __init__(self, simulation: "Simulation") -> None:
        self.num_open = len(simulation.scenario.clients)
        self._simulation = simulation

    def come(self, plan: ClientPlan) -> None:
        frontend = self._simulation.frontends[f"frontend-{plan.frontend}"]
        if frontend.alive:
            frontend.knocking.append(plan)
            frontend.run_at(self._simulation.clock.now, partial(self._submit, frontend, plan))
        else:
            self._simulation.clock.after(_RETRY_S, partial(self.come, plan))

    def _submit(self, frontend: FrontendProcess, plan: ClientPlan) -> None:
        frontend.knocking.remove(plan)
        simulation, key = self._simulation, (frontend.session.frontend_id, plan.request_id)
        simulation.note(frontend.name, f"{plan.request_id} comes")
        simulation.watch.counts["clients"] += 1
        client = Client(plan, simulation.scenario.model, simulation.clock.now, key, simulation.watch)
        frontend.submit(client)
        if plan.cancel_after is not None:
            self._simulation.clock.after(plan.cancel_after, partial(self._leave, frontend, client))

    def _leave(self, frontend: FrontendProcess, client: Client) -> None:
        """The client goes; its frontend notices once it does not stand still."""
        if client in frontend.clients:
            self._simulation.watch.went(frontend.session.frontend_id, client.plan.request_id)
            frontend.run_at(self._simulation.clock.now, partial(self._let_go, frontend, client))

    def _let_go(self, frontend: FrontendProcess, client: Client) -> None:
        if client in frontend.clients:
            self._simulation.note(frontend.name, f"{client.plan.request_id} is cancelled")
            self._simulation.watch.counts["cancelled"] += 1
            frontend.release(client)
            self._end_or_come_again(client.plan)

    def _end_or_come_again(self, plan: ClientPlan) -> None:
        """Some clients ask for something else at once, under the same id, and wait longer."""
        assert plan.cancel_after is not None
        if self._simulation.random.random() < 0.3:
            prompt = plan.prompt_token_ids[::-1]
            again = replace(plan, prompt_token_ids=prompt, cancel_after=2 * plan.cancel_after)
            self._simulation.clock.after(self._simulation.random.choice((0.0, 0.5)), partial(self.come, again))
        else:
            self.num_open -= 1

    def lose(self, frontend: FrontendProcess) -> None:
        """A frontend has died; its clients ask the next one, all over again."""
        for client in frontend.clients:
            self._simulation.watch.went(frontend.session.frontend_id, client.plan.request_id)
        for plan in (*frontend.knocking, *(client.plan for client in frontend.clients)):
            self._simulation.clock.after(_RETRY_S, partial(self.come, plan))

    def ended(self, frontend: FrontendProcess, client: Client) -> None:
        plan, failure = client.plan, client.failure
        if failure is None:
            self._count_served(client)
        else:
            self._simulation.watch.counts[f"failed: {failure.reason.value}"] += 1
            assert self._may_fail(plan, failure.reason), f"{plan.request_id} failed: {failure}"
        self._simulation.watch.went(frontend.session.frontend_id, plan.request_id)
        if failure and failure.reason is Reason.QUARANTINED and not plan.insists:
            # Under another id, as a client that tries again.
            again = replace(plan, request_id=f"{plan.request_id}-again", insists=True)
            self._simulation.clock.after(_RETRY_S, partial(self.come, again))
        else:
            self.num_open -= 1

    def _count_served(self, client: Client) -> None:
        counts, journal, kind = self._simulation.watch.counts, client.journal, client.plan.kind
        counts[f"served: {kind}"] += 1
        counts[f"served after a preemption: {kind}"] += journal.preemptions > 0
        counts[f"served after a swap: {kind}"] += journal.swaps > 0
        counts["served with prompt logprobs"] += journal.prompt_logprobs is not None
        counts["served with a prefix hit"] += journal.cached_prompt_tokens > 0

    def _may_fail(self, plan: ClientPlan, reason: Reason) -> bool:
        counts, scenario = self._simulation.watch.counts, self._simulation.scenario
        match reason:
            case Reason.STEP_FAILED:
                return counts["steps failed"] >= scenario.config.max_failed_steps
            case Reason.LOGITS_NOT_FINITE:
                return self._simulation.watch.harm.was_spoiled(plan.prompt_token_ids, plan.sampling.seed)
            case Reason.QUARANTINED:
                # Kills from outside accuse nobody, unless nobody knows of many that they were that.
                return (
                    self._is_poison(plan, "die", "hang")
                    or counts["replicas lost by chance over a step"] > 0
                    or counts["replicas lost by chance"] >= UNEXPLAINED_TO_CONVICT
                )
            case Reason.OUT_OF_MEMORY:
                return plan.sampling.parallel > self._simulation.watch.harm.least_memory
            case Reason.NEVER_FITS_KV:
                return not all(hardware.can_hold(plan, scenario.prefixes) for hardware in scenario.workers)
            case Reason.QUEUE_TIMEOUT:
                return plan.max_queue_s is not None
            case Reason.QUEUE_FULL:
                # One that has left may be held for a while, also beside the same that has come again.
                return counts["clients"] > scenario.config.max_waiting
            case Reason.SCHEDULER_UNREACHABLE:
                return scenario.grace_s < PATIENT_S
        return False

    def _is_poison(self, plan: ClientPlan, *kinds: str) -> bool:
        return any(fault.kind in kinds and plan.is_hurt_by(fault) for fault in self._simulation.scenario.poisons)
