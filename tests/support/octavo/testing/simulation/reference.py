"""Computes what a client must get, whatever happens: the model's answer when nothing goes wrong."""

from collections.abc import Iterator
from dataclasses import dataclass

from octavo.scheduler.core.step.beam_search import Beam, BeamSearchState
from octavo.testing.simulation.workload import ClientPlan, Model
from octavo.wire.sampling import Logprobs
from octavo.worker.fake.encoder import expected_output
from octavo.worker.fake.runner import expected_candidates, expected_logprobs, expected_tokens


@dataclass(frozen=True)
class Reference:
    """Holds what an undisturbed run generates, by sequence: all that the scheduler would let it, the part that is the
    client's, and the logprobs where they are wanted or come with a beam search; the sequences that the client gets, in
    their order; and the model's `output`, if it is that which is wanted."""

    generated: list[list[int]]
    delivered: list[list[int]]
    logprobs: list[list[Logprobs]]
    cumulative_logprobs: list[float | None]
    prompt_logprobs: list[Logprobs] | None
    order: list[int]
    output: bytes = b""


def reference(plan: ClientPlan, model: Model) -> Reference:
    """Computes the undisturbed answer to `plan`."""
    sampling, prompt = plan.sampling, plan.prompt_token_ids
    if plan.pools:
        seen = prompt[-model.window :] if model.window and model.pooling == "last" else prompt
        return Reference([[]], [[]], [[]], [None], None, [0], expected_output(seen))
    found = list(_search(plan, model) if sampling.beam else _samples(plan, model))
    generated, totals = [tokens for tokens, _ in found], [total for _, total in found]
    delivered = [_cut(tokens, plan) for tokens in generated]
    logprobs = [_logprobs([*prompt, *tokens], sampling.logprobs, model)[len(prompt) - 1 :] for tokens in generated]
    order = list(range(len(generated)))
    if plan.is_ranked and not sampling.beam:
        order.sort(key=lambda index: -_total(logprobs[index][: len(delivered[index])]))
    told = None if sampling.prompt_logprobs is None else _logprobs(prompt, sampling.prompt_logprobs, model)
    return Reference(generated, delivered, logprobs, totals, told, order[: plan.num_results])


def _samples(plan: ClientPlan, model: Model) -> Iterator[tuple[list[int], None]]:
    sampling = plan.sampling
    for index in range(sampling.num_sequences):
        tokens = expected_tokens(
            plan.prompt_token_ids, sampling, index, sampling.max_tokens, model.vocabulary, model.window
        )
        ends = (i for i, token in enumerate(tokens, 1) if token in sampling.stop_token_ids)
        yield tokens[: next(ends, len(tokens))], None


def _search(plan: ClientPlan, model: Model) -> Iterator[tuple[list[int], float]]:
    """A beam search in which nothing is forked, freed or lost: every beam is computed from its own tokens."""
    sampling = plan.sampling
    assert sampling.beam is not None
    search = BeamSearchState(sampling.beam, sampling.max_tokens, frozenset(sampling.stop_token_ids))
    beams: list[tuple[list[int], float]] = [([], 0.0)]
    while beams:
        chosen = search.advance([_offer(plan, model, tokens, logprob) for tokens, logprob in beams])
        beams = [([*beams[each.beam][0], each.token_id], each.cumulative_logprob) for each in chosen]
    best = search.hypotheses[: sampling.num_sequences]
    return ((hypothesis.token_ids, hypothesis.cumulative_logprob) for hypothesis in best)


def _offer(plan: ClientPlan, model: Model, tokens: list[int], logprob: float) -> Beam:
    offered = expected_candidates(plan.prompt_token_ids, tokens, plan.sampling, model.vocabulary, model.window)
    return Beam(tokens, logprob, [token for token, _ in offered], [value for _, value in offered])


def _cut(tokens: list[int], plan: ClientPlan) -> list[int]:
    ends = (
        count
        for count, token in enumerate(tokens, 1)
        if token == plan.stop_token_id and count >= plan.sampling.min_tokens
    )
    return tokens[: next(ends, len(tokens))]


def _logprobs(tokens: list[int], top: int | None, model: Model) -> list[Logprobs]:
    return [] if top is None else expected_logprobs(tokens, top, model.vocabulary, model.window)


def _total(logprobs: list[Logprobs]) -> float:
    total = 0.0
    # One by one, as the frontend adds them up.
    for entry in logprobs:
        total += entry.logprob
    return total
