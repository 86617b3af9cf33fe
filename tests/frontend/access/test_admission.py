"""What is let in, what is refused and for how long, and that the books are always right."""

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from octavo.frontend.access.access import Bounds
from octavo.frontend.access.admission import Admission, Ticket, estimated_work
from octavo.frontend.config import FrontendConfig
from octavo.frontend.errors import Overloaded, Reason
from octavo.frontend.request.chat import Chat, ChatMessage, Tool, ToolCall
from octavo.frontend.request.request import GenerationRequest
from octavo.wire.sampling import BeamSearch, EarlyStopping


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Middle(random.Random):
    """No jitter."""

    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2


@pytest.fixture
def clock() -> Clock:
    return Clock()


def admission(
    clock: Any, bounds: dict[str, Bounds] | None = None, rng: random.Random | None = None, **limits: int
) -> Admission:
    config = FrontendConfig(None, "m", "", (), **limits)  # type: ignore[arg-type]
    return Admission(config, bounds, clock=clock, rng=rng or Middle())


def ids(prompt: int, answer: int | None = 0, **fields: Any) -> GenerationRequest:
    return GenerationRequest([1] * prompt, max_new_tokens=answer, **fields)


def refusal(admission: Admission, request: GenerationRequest, tenant: str = "a") -> Overloaded:
    with pytest.raises(Overloaded) as caught:
        admission.admit(request, tenant)
    return caught.value


CHAT = Chat(
    (ChatMessage("user", "é" * 6), ChatMessage("assistant", "", tool_calls=(ToolCall("", "", "x" * 30),))),
    (Tool("", "d" * 30, "p" * 60),),
)
ESTIMATES: dict[str, tuple[GenerationRequest, int]] = {
    "ids": (ids(10, 5), 15),
    "text": (GenerationRequest("x" * 31, max_new_tokens=5), 16),
    "text beyond ASCII": (GenerationRequest("語" * 10, max_new_tokens=5), 15),
    "lone surrogate": (GenerationRequest("\ud800", max_new_tokens=5), 6),
    "chat": (GenerationRequest(CHAT, max_new_tokens=1), 53),
    "no limit": (ids(10, None), 1034),
    "several answers": (ids(10, 5, num_sequences=2, best_of=3), 25),
    "beams": (ids(10, 5, beam=BeamSearch(4, 1.0, EarlyStopping.OFF)), 30),
}


@pytest.mark.parametrize("name", ESTIMATES)
def test_work_is_estimated_from_the_form_alone(name: str) -> None:
    request, work = ESTIMATES[name]
    assert estimated_work(request) == work


def test_too_many_requests(clock: Clock) -> None:
    api = admission(clock, max_requests=2)
    first = api.admit(ids(1), "a")
    api.admit(ids(1), "b")
    error = refusal(api, ids(1))
    assert (error.reason, error.metadata["requests"]) == (Reason.TOO_MANY_REQUESTS, "2")
    first.release()
    assert api.admit(ids(1), "a")


def test_too_much_work(clock: Clock) -> None:
    api = admission(clock, max_work_tokens=100)
    ticket = api.admit(ids(40, 30), "a")
    assert api.admit(ids(30), "b")
    error = refusal(api, ids(1))
    assert (error.reason, error.metadata["work_tokens"]) == (Reason.TOO_MUCH_WORK, "100")
    assert "about 1 tokens of work, and the server holds 100 of the 100" in str(error)
    ticket.progress(1)
    assert api.admit(ids(1), "a")


def test_what_is_too_large_for_the_bound_runs_alone(clock: Clock) -> None:
    api = admission(clock, max_work_tokens=100, tenant_max_work_tokens=50)
    large = api.admit(ids(1000), "a")
    assert refusal(api, ids(1), "b").reason is Reason.TOO_MUCH_WORK
    large.release()
    small = api.admit(ids(1), "b")
    assert refusal(api, ids(1000)).reason is Reason.TOO_MUCH_WORK
    small.release()
    assert api.admit(ids(1000), "a")


def test_what_logprobs_may_take_is_bounded_in_all(clock: Clock) -> None:
    api = admission(clock, max_work_tokens=10**9)
    # Of one token 260 bytes; 520 MiB are half of all and a little more.
    large = ids(1, 2 << 17, top_logprobs=20, num_sequences=8)
    first = api.admit(large, "a")
    error = refusal(api, large)
    assert error.reason is Reason.TOO_MUCH_WORK
    assert "520 MiB" in str(error)
    assert "ask for fewer tokens" in str(error)
    assert api.admit(ids(1, 2 << 17, num_sequences=8), "a")
    assert api.admit(ids(1, 100, top_logprobs=20), "a")
    first.release()
    first.release()
    assert api.admit(large, "a")


def test_a_tenant_has_its_own_bounds_and_takes_nobody_elses(clock: Clock) -> None:
    api = admission(clock, {"vip": Bounds(0, 0), "small": Bounds(1, 0)}, tenant_max_requests=2)
    for tenant, most in {"small": 1, "other": 2}.items():
        for _ in range(most):
            api.admit(ids(1), tenant)
        assert refusal(api, ids(1), tenant).reason is Reason.TENANT_QUOTA
    for _ in range(10):
        api.admit(ids(1), "vip")


def test_a_tenants_work_is_bounded(clock: Clock) -> None:
    api = admission(clock, {"a": Bounds(0, 50)})
    api.admit(ids(40), "a")
    error = refusal(api, ids(20))
    assert (error.reason, "has 40 of the 50" in str(error)) == (Reason.TENANT_QUOTA, True)
    assert api.admit(ids(20), "b")


def test_a_refused_request_leaves_nothing(clock: Clock) -> None:
    api = admission(clock, tenant_max_requests=1)
    ticket = api.admit(ids(1), "a")
    refusal(api, ids(1))
    ticket.release()
    assert (api.requests, api.work_tokens, api.tenants) == (0, 0, {})


def test_a_corrected_estimate_counts_what_is_done(clock: Clock) -> None:
    api = admission(clock)
    ticket = api.admit(ids(100), "a")
    ticket.correct(60)
    ticket.progress(50)
    assert (api.work_tokens, ticket.work_tokens) == (10, 10)
    ticket.progress(50)
    assert api.work_tokens == 0


def test_the_delay_is_the_work_held_over_the_rate_of_service(clock: Clock) -> None:
    api = admission(clock, max_requests=1, max_work_tokens=1 << 40)
    ticket = api.admit(ids(0, 1 << 20), "a")
    for _ in range(100):
        clock.now += 0.5
        ticket.progress(2000)
    assert api.service_rate == pytest.approx(4000, rel=0.1)
    ticket.correct(200_000 + 40_000)
    error = refusal(api, ids(1))
    assert error.retry_after_s == pytest.approx(40_000 / api.service_rate)
    assert f"try again in {error.retry_after_s:.1f} s" in str(error)


def test_the_delay_is_jittered_by_half_and_never_silly(clock: Clock) -> None:
    api = admission(clock, max_requests=1, rng=random.Random(1))
    ticket = api.admit(ids(10_000), "a")
    delays = [refusal(api, ids(1)).retry_after_s for _ in range(200)]
    assert 5 <= min(delays) < 5.5 < 14.5 < max(delays) <= 15
    ticket.correct(1)
    assert refusal(api, ids(1)).retry_after_s == 0.1
    ticket.correct(1 << 40)
    assert refusal(api, ids(1)).retry_after_s == 60


def test_time_without_work_is_none_of_the_rates(clock: Clock) -> None:
    api = admission(clock)
    before = api.service_rate
    clock.now += 1000
    assert api.service_rate == before
    ticket = api.admit(ids(1), "a")
    assert api.service_rate == before
    ticket.release()
    clock.now += 1000
    assert api.service_rate == before


def test_a_service_that_stands_still_has_no_rate(clock: Clock) -> None:
    api = admission(clock, max_requests=1)
    api.admit(ids(1000), "a")
    clock.now += 60
    assert api.service_rate < 0.1
    assert refusal(api, ids(1)).retry_after_s == 60


COUNTS = st.integers(0, 200)


class Books(RuleBasedStateMachine):
    """The books always equal the sum of the tickets, within their bounds when something is let in."""

    tickets = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        bounds = {"a": Bounds(3, 150), "b": Bounds()}
        self.api = admission(self.clock, bounds, random.Random(5), max_requests=5, max_work_tokens=300)
        self.held: dict[Ticket, str] = {}

    @rule(target=tickets, prompt=COUNTS, answer=COUNTS, tenant=st.sampled_from("abc"))
    def admit(self, prompt: int, answer: int, tenant: str) -> Ticket | None:
        before = (self.api.requests, self.api.work_tokens)
        try:
            ticket = self.api.admit(ids(prompt, answer), tenant)
        except Overloaded as error:
            refused = error
        else:
            assert before[0] < 5
            assert before[0] == 0 or before[1] + prompt + answer <= 300
            self.held[ticket] = tenant
            return ticket
        assert before[0] > 0
        assert 0.1 <= (refused.retry_after_s or 0) <= 60
        return None

    @rule(ticket=tickets, tokens=COUNTS, seconds=st.floats(0, 3))
    def progress(self, ticket: Ticket | None, tokens: int, seconds: float) -> None:
        self.clock.now += seconds
        if ticket:
            ticket.progress(tokens)

    @rule(ticket=tickets, tokens=COUNTS)
    def correct(self, ticket: Ticket | None, tokens: int) -> None:
        if ticket:
            ticket.correct(tokens)

    @rule(ticket=tickets)
    def release(self, ticket: Ticket | None) -> None:
        """Also of what is released already."""
        if ticket:
            ticket.release()
            self.held.pop(ticket, None)

    @rule(ticket=consumes(tickets))
    def forget(self, ticket: Ticket | None) -> None:
        self.release(ticket)

    @precondition(lambda self: self.held)
    @rule()
    def release_all(self) -> None:
        for ticket in [*self.held]:
            self.release(ticket)
        assert self.api.tenants == {}

    @invariant()
    def the_books_are_right(self) -> None:
        assert self.api.requests == len(self.held)
        assert self.api.work_tokens == sum(ticket.work_tokens for ticket in self.held)
        assert self.api.tenants.keys() == set(self.held.values())
        for tenant, held in self.api.tenants.items():
            own = [ticket for ticket, owner in self.held.items() if owner == tenant]
            assert (held.requests, held.work_tokens) == (len(own), sum(ticket.work_tokens for ticket in own))
        assert min((ticket.work_tokens for ticket in self.held), default=0) >= 0
        assert self.api.service_rate >= 0


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=30)
