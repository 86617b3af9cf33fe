"""What an endpoint picker reads of a frontend's serving port follows real processes: what waits, what runs, how many
blocks are taken; and nothing at all while no scheduler says so."""

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.frontend.stream.metrics import LOAD_METRICS
from octavo.testbed.stack import Stack, token_request

from ..conftest import StartStack

pytestmark = pytest.mark.system

_SIDE_BY_SIDE, _NUM_REQUESTS, _NUM_LATER, _NUM_TOKENS = 2, 5, 3, 200


def scraped(stack: Stack) -> dict[str, float]:
    """The load, by the names that pickers know without their prefix; the number of blocks as `blocks`."""
    with stack.http() as http:
        text = http.get("/metrics").text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if family.name == "vllm:cache_config_info":
                found["blocks"] = float(sample.labels["num_gpu_blocks"])
            elif family.name in LOAD_METRICS:
                assert sample.labels == {"model_name": "byte-model"}
                found[family.name.removeprefix("vllm:")] = sample.value
    return found


def test_the_load_follows_requests_a_worker_that_stops_and_a_scheduler_that_dies(new_stack: StartStack) -> None:
    stack = new_stack(OCTAVO_FAKE_STEP_MS="20", OCTAVO_MAX_NUM_SEQS=str(_SIDE_BY_SIDE)).start_all()
    num_blocks = float(stack.load().workers[0].blocks_total)
    idle = {"num_requests_waiting": 0.0, "num_requests_running": 0.0, "kv_cache_usage_perc": 0.0, "blocks": num_blocks}
    stack.wait_for(lambda: scraped(stack) == idle)
    with ThreadPoolExecutor(_NUM_REQUESTS + _NUM_LATER) as pool:
        answers = [
            pool.submit(stack.generate, token_request([n] * 40, _NUM_TOKENS), 240.0) for n in range(_NUM_REQUESTS)
        ]
        crowd = {"num_requests_waiting": _NUM_REQUESTS - _SIDE_BY_SIDE, "num_requests_running": _SIDE_BY_SIDE}
        stack.wait_for(lambda: scraped(stack).items() >= crowd.items())
        # On a busy machine a load may be too old to be told now and then.
        stack.wait_for(lambda: 0 < scraped(stack).get("kv_cache_usage_perc", 0.0) < 1)
        stack.processes["worker-0"].send_signal(signal.SIGSTOP)
        before = stack.load().waiting
        answers += [pool.submit(stack.generate, token_request([100 + n] * 40, 4), 240.0) for n in range(_NUM_LATER)]
        stack.wait_for(lambda: scraped(stack).get("num_requests_waiting", 0.0) >= before + _NUM_LATER)
        # The worker counts as lost by and by: then nothing runs, and no block is there to be had.
        stack.wait_for(lambda: scraped(stack).items() >= {"num_requests_running": 0, "kv_cache_usage_perc": 1}.items())
        assert "blocks" not in scraped(stack)
        stack.processes["worker-0"].send_signal(signal.SIGCONT)
        assert [len(answer.result(240).token_ids) for answer in answers] == [_NUM_TOKENS] * 5 + [4] * 3
    stack.wait_for(lambda: scraped(stack) == idle)
    stack.kill("scheduler")
    stack.wait_for(lambda: scraped(stack) == {})
    stack.start("scheduler")
    stack.wait_for(lambda: scraped(stack) == idle)
