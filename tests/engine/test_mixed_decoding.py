"""Scheduler's core and the bundled model in one process, fp32: what runs beside a request never changes its tokens."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoTokenizer

from octavo.scheduler.core.config import Policy, Preemption
from octavo.scheduler.core.events import PrefixPinned
from octavo.testbed.models import fp32_runner
from octavo.testing.cluster import Cluster, make_request, write_fake_model
from octavo.testing.depth import deep
from octavo.wire.requests import Prefix, RejectReason, Request
from octavo.wire.sampling import BeamSearch, EarlyStopping
from octavo.worker.models.decoder import PagedStep
from octavo.worker.runner import Runner
from octavo.worker.step.batch import Batch
from octavo.worker.step.model_runner import ModelRunner

NUM_TOKENS = 10
NUM_BLOCKS = 256
BEAM = BeamSearch(4, 1.0, EarlyStopping.OFF)
# By name: the text after "<prefix>" or alone, and how to choose tokens.
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("The capital of France is", {}),
    "sampled": ("Once upon a time", {"temperature": 0.8, "top_p": 0.95, "seed": 1}),
    "top-k": ("中文的句子：今天天气", {"temperature": 1.0, "top_k": 20, "seed": 2}),
    "four": ("The lighthouse keeper counted", {"temperature": 1.0, "seed": 3, "num_sequences": 4}),
    "beam": ("1 2 3 4 5 6 7 8 9", {"beam": BEAM, "num_sequences": 4}),
    "penalised": ("na na na na na na", {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2}),
    "biased": ("def fibonacci(n):", {"logit_bias": [(198, 4.0)], "banned_token_ids": [216], "logprobs": 3}),
    "prefixed": ("<prefix> What do you sell?", {"temperature": 0.7, "seed": 4, "num_sequences": 2}),
    "prefixed too": ("<prefix> When do you open?", {}),
}
PREFIX = (
    "You are the clerk of a small bookshop in Mainz. You answer in one sentence, politely, and never make up a price."
)


@pytest.fixture(scope="module")
def runner(bundled_model: Path) -> ModelRunner:
    return fp32_runner(bundled_model, num_blocks=NUM_BLOCKS, block_size=16, num_cpu_blocks=NUM_BLOCKS)


@pytest.fixture(scope="module")
def prefix(bundled_model: Path) -> Prefix:
    token_ids = AutoTokenizer.from_pretrained(bundled_model).encode(PREFIX)
    assert len(token_ids) % 16, "the prefix is to end inside a block"
    return Prefix("clerk", token_ids)


@pytest.fixture(scope="module")
def requests(bundled_model: Path, prefix: Prefix) -> list[Request]:
    tokenizer = AutoTokenizer.from_pretrained(bundled_model)
    made = []
    for name, (text, sampling) in REQUESTS.items():
        own = tokenizer.encode(text.removeprefix("<prefix>"))
        prompt = prefix.token_ids + own if text.startswith("<prefix>") else own
        made.append(msgspec.structs.replace(make_request(name, 1, NUM_TOKENS, **sampling), prompt_token_ids=prompt))
    return made


def run(directory: Path, runner: Runner, requests: list[Request], **config: Any) -> Cluster:
    """A fresh core and an empty pool; what is pinned by `prefix` is pinned first."""
    prefix = config.pop("prefix", None)
    cluster = Cluster(write_fake_model(directory), **config)
    cluster.join(runner=runner)
    if prefix:
        cluster.handle(PrefixPinned(prefix))
    cluster.submit(*requests)
    cluster.run()
    return cluster


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, runner: Runner, requests: list[Request]) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("alone")
    return {r.request_id: run(directory, runner, [r], prefix_caching=False).outputs(r.request_id) for r in requests}


@pytest.mark.parametrize(
    "config",
    [
        {},
        *deep({"max_steps_in_flight": 1, "max_num_batched_tokens": 40, "max_num_seqs": 40}),
        {"policy": Policy.PAPER, "prefix_caching": False},
    ],
    ids=["two steps in flight", "one step in flight, small chunks", "paper policy, no prefix cache"],
)
def test_all_kinds_in_one_batch_give_what_each_gives_alone(
    tmp_path: Path,
    runner: Runner,
    requests: list[Request],
    prefix: Prefix,
    alone: dict[str, Any],
    config: dict[str, Any],
) -> None:
    cluster = run(tmp_path, runner, requests, prefix=prefix, **config)
    for request in requests:
        assert cluster.outputs(request.request_id) == alone[request.request_id], request.request_id


@pytest.mark.parametrize("preemption", [Preemption.SWAP, *deep(Preemption.RECOMPUTE)])
def test_groups_that_lose_their_blocks_go_on_with_the_same_tokens(
    tmp_path: Path,
    bundled_model: Path,
    requests: list[Request],
    alone: dict[str, Any],
    preemption: Preemption,
) -> None:
    # Blocks of two tokens: few are shared, so the pool that holds each request alone is far too small for all.
    runner = fp32_runner(bundled_model, num_blocks=96, block_size=2, num_cpu_blocks=96)
    cluster = run(tmp_path, runner, requests, preemption=preemption, watermark=0.0)
    assert cluster.core.preemptions > 0
    assert (cluster.core.swaps > 0) == (preemption is Preemption.SWAP)
    for request in requests:
        assert cluster.outputs(request.request_id) == alone[request.request_id], request.request_id


def test_one_that_shares_a_block_of_a_skipped_chunk_gives_what_it_gives_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: ModelRunner
) -> None:
    # What goes on depends on the pattern in the third block, which goes on in the other's own tokens.
    prompt = [*range(1000, 1032), *[501, 502, 503, 504] * 4, *range(1032, 1040)]
    cluster = Cluster(write_fake_model(tmp_path), max_num_batched_tokens=32, max_steps_in_flight=2)
    cluster.join(runner=runner)
    cluster.submit(with_prompt("failing", prompt))
    cluster.schedule()
    cluster.submit(other := with_prompt("other", [*prompt[:48], 501, 502]))
    cluster.schedule()
    # Of these the failing request fills the last sixteen in the step that is skipped for it.
    assert cluster.groups["other"].cached_prompt_tokens == 48
    break_once(monkeypatch, runner)
    cluster.answer(1)
    assert cluster.rejected["failing"].reason is RejectReason.NOT_FINITE
    cluster.run()
    # Only now: in the first run nothing of it must be in the blocks that are not written.
    assert run(tmp_path, runner, [other], prefix_caching=False).outputs("other") == cluster.outputs("other")
    assert cluster.deltas["other", 0][-1].preemptions == 1


def with_prompt(name: str, token_ids: list[int]) -> Request:
    return msgspec.structs.replace(make_request(name, 1, NUM_TOKENS), prompt_token_ids=token_ids)


def break_once(monkeypatch: pytest.MonkeyPatch, runner: ModelRunner) -> None:
    """The next forward pass gives NaN for the last token of a prompt that is computed in part. The keys and values are
    in the cache by then, and sound."""
    model = runner.paged_model
    compute = model.forward

    def broken(batch: Batch, step: PagedStep) -> torch.Tensor:
        monkeypatch.undo()
        rows, hidden = batch.logit_rows, compute(batch, step).clone()
        assert len(rows.watched) == 1, "one prompt was to be computed in part"
        hidden[rows.num_choosing : rows.first_of_prompts] = torch.nan
        return hidden

    monkeypatch.setattr(model, "forward", broken)
