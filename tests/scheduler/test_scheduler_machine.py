"""Any order of submissions, aborts, steps, failures and losses: no block leaks, no token changes, all requests end."""

import atexit
import shutil
import tempfile
from pathlib import Path

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from octavo.scheduler.events import LeaseRenewed, StepAnswered
from octavo.testing.cluster import FRONTEND, Cluster, make_request, reference_tokens, write_fake_model
from octavo.wire.requests import Lease, Renewed, Request

# Hypothesis makes the machine itself, so no fixture can hand it a directory.
_MODEL = write_fake_model(Path(tempfile.mkdtemp(prefix="octavo-model-")))
atexit.register(shutil.rmtree, _MODEL)


class SchedulerMachine(RuleBasedStateMachine):
    """One frontend and up to three small replicas; `Cluster` checks the invariants after every event."""

    cluster: Cluster

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, Request] = {}
        self.incarnations = 0
        self.submissions = 0

    @initialize(in_flight=st.integers(1, 2), budget=st.integers(1, 12), seqs=st.integers(1, 5), caching=st.booleans())
    def start(self, in_flight: int, budget: int, seqs: int, caching: bool) -> None:
        # No step may fail often enough to be given up: this machine expects every request to finish.
        self.cluster = Cluster(
            _MODEL,
            max_steps_in_flight=in_flight,
            max_num_batched_tokens=budget,
            max_num_seqs=seqs,
            max_failed_steps=10**6,
            prefix_caching=caching,
        )
        self.join(num_blocks=12)

    @precondition(lambda self: len(self.cluster.replicas) < 3)
    @rule(num_blocks=st.integers(12, 30))
    def join(self, num_blocks: int) -> None:
        self.incarnations += 1
        self.cluster.join(self.incarnations, num_blocks=num_blocks, block_size=2)

    @rule(prompt=st.integers(1, 20), shared=st.integers(0, 20), output=st.integers(1, 30), stop=st.booleans())
    def submit(self, prompt: int, shared: int, output: int, stop: bool) -> None:
        self.submissions += 1
        name, shared = f"r{self.submissions}", min(shared, prompt)
        request = make_request(name, prompt, output, shared=shared)
        if stop:
            tokens = reference_tokens(request)
            request = make_request(name, prompt, output, shared=shared, stop_token_ids=(tokens[len(tokens) // 2],))
        self.requests[request.request_id] = request
        self.cluster.now += 0.001
        self.cluster.submit(request)
        if self.cluster.rejected.pop(request.request_id, None):
            assert prompt + output > self.cluster.core.status().capacity_tokens
            del self.requests[request.request_id]

    @precondition(lambda self: self.cluster.groups)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.cluster.groups)))
        del self.requests[request_id]
        self.cluster.abort(request_id)

    @rule()
    def schedule(self) -> None:
        self.cluster.schedule()

    @precondition(lambda self: self._busy())
    @rule(data=st.data(), fail=st.sampled_from([False, False, False, True]))
    def answer(self, data: st.DataObject, fail: bool) -> None:
        incarnation = data.draw(st.sampled_from(self._busy()))
        self.cluster.handle(StepAnswered(incarnation, self.cluster.replicas[incarnation].execute(fail=fail)))

    @precondition(lambda self: len(self.cluster.replicas) > 1)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.cluster.leave(data.draw(st.sampled_from(sorted(self.cluster.replicas))))

    @rule(forget=st.booleans())
    def renew(self, forget: bool) -> None:
        """The frontend renews; with `forget`, after the scheduler lost all it knew of one request."""
        live = [request for request in self.requests.values() if request.request_id not in self.cluster.finished]
        if forget and live and live[0].request_id in self.cluster.groups:
            self.cluster.abort(live[0].request_id)
        self.cluster.handle(LeaseRenewed(FRONTEND, [Lease(r.request_id, r.attempt) for r in live]))
        answer = self.cluster.to_frontend[-1]
        assert isinstance(answer, Renewed)
        for entry in answer.unknown:
            request = self.requests[entry.request_id]
            tokens = list(self.cluster.tokens[entry.request_id])
            again = msgspec.structs.replace(
                request, attempt=request.attempt + 1, resubmitted=True, generated_token_ids=tokens
            )
            self.requests[entry.request_id] = again
            self.cluster.submit(again)

    def _busy(self) -> list[int]:
        return sorted(incarnation for incarnation, replica in self.cluster.replicas.items() if replica.plans)

    def teardown(self) -> None:
        if not hasattr(self, "cluster"):
            return
        # Whatever waits for a replica that was lost finds one.
        self.join(num_blocks=30)
        self.cluster.run()
        assert not self.cluster.rejected
        for request_id, request in self.requests.items():
            assert self.cluster.tokens[request_id] == reference_tokens(request)
        for replica in self.cluster.core.replicas.values():
            assert replica.kv.num_free == replica.kv.num_blocks


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=200, stateful_step_count=40, derandomize=True, deadline=None)
