"""What the fake model makes of a request when nothing goes wrong, for any windows and any way of decoding."""

from functools import cache
from pathlib import Path

import msgspec

from octavo.scheduler.core.replica import Replica
from octavo.scheduler.core.sequence import Sequence
from octavo.testing.cluster import VOCABULARY, Cluster, FakeReplica
from octavo.wire.requests import Request
from octavo.wire.sampling import Logprobs
from octavo.worker.fake.runner import expected_logprobs, expected_tokens


class Expectations:
    """Of requests to replicas whose KV groups have these `windows`."""

    def __init__(self, directory: Path, windows: tuple[int, ...]) -> None:
        self._directory = directory
        self._windows = windows
        self._window = 0 if 0 in windows else max(windows)

    def outputs(self, request: Request) -> list[list[int]]:
        """The tokens of all its sequences: by the model's definition; of beams, by a search that nothing disturbs."""
        sampling = request.sampling
        if sampling.beam is not None:
            return _undisturbed(self._directory, self._windows, msgspec.json.encode(request))
        prompt, count = request.prompt_token_ids, sampling.max_tokens
        outputs = [
            expected_tokens(prompt, sampling, index, count, VOCABULARY, self._window)
            for index in range(sampling.num_sequences)
        ]
        return [_until_stop(tokens, sampling.stop_token_ids) for tokens in outputs]

    def logprobs(self, request: Request, tokens: list[int]) -> list[Logprobs]:
        """What must have come with `tokens` of one of its sequences."""
        top, prompt = request.sampling.logprobs, request.prompt_token_ids
        return [] if top is None else self._reports(prompt + tokens, top)[len(prompt) - 1 :]

    def prompt_logprobs(self, request: Request) -> list[Logprobs]:
        top = request.sampling.prompt_logprobs
        return [] if top is None else self._reports(request.prompt_token_ids, top)

    def _reports(self, token_ids: list[int], top: int) -> list[Logprobs]:
        return expected_logprobs(token_ids, top, VOCABULARY, self._window)


@cache
def _undisturbed(directory: Path, windows: tuple[int, ...], encoded: bytes) -> list[list[int]]:
    request = msgspec.json.decode(encoded, type=Request)
    cluster = Cluster(directory)
    cluster.join(num_blocks=1000, block_size=16, windows=windows)
    cluster.submit(msgspec.structs.replace(request, attempt=1, generated=[]))
    cluster.run()
    return cluster.outputs(request.request_id)


def _until_stop(tokens: list[int], stop_token_ids: list[int]) -> list[int]:
    end = next((i for i, token in enumerate(tokens) if token in stop_token_ids), len(tokens))
    return tokens[: end + 1]


def assert_worker_agrees(replica: Replica, worker: FakeReplica) -> None:
    """With no step outstanding, a worker knows just the sequences that run on it, and of each what the core knows, but
    for what the next plan is to tell."""
    if replica.outstanding:
        return
    known = {sequence.sequence_id: sequence for sequence in worker.table}
    for group in replica.running:
        for sequence in group.live:
            if sequence.placement.is_introduced:
                theirs = known.pop(sequence.placement.sequence_id)
                num_sent = sequence.placement.num_sent if group.search else sequence.num_known
                assert theirs.token_ids == list(sequence.known_tokens(0, num_sent))
                assert theirs.num_computed == sequence.placement.num_computed
                _assert_same_tables(replica, sequence, theirs.block_tables)
    assert known.keys() <= set(replica.next_plan.forget), "the worker keeps sequences that are nobody's"


def _assert_same_tables(replica: Replica, sequence: Sequence, theirs: list[list[int]]) -> None:
    told = [list(blocks) for blocks in theirs]
    for owner, remap in replica.next_plan.remaps:
        if owner is sequence:
            told[remap.kv_group][remap.logical_index] = remap.block_id
    for group, ours, blocks in zip(replica.hello.kv_groups, replica.kv.block_table(sequence), told, strict=True):
        first = (
            max(0, sequence.placement.num_computed - group.window + 1) // replica.kv.block_size if group.window else 0
        )
        assert len(ours) == len(blocks)
        assert ours[first:] == blocks[first:]
