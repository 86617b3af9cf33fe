"""Real processes as their operators see them: metrics of each, one trace through all, and logs that programs read."""

import json
import re
import shutil
import subprocess
import urllib.request

import pytest

from octavo.testbed.stack import Stack, token_request
from octavo.testing.fakes.otlp_collector import otlp_collector

from .conftest import StartStack

pytestmark = pytest.mark.system

TRACE_ID, CLIENTS_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CLIENT = f"00-{TRACE_ID}-{CLIENTS_SPAN}-01"
PROMPT, MAX_NEW_TOKENS = [5, 6, 7, 8], 6


def scrape(stack: Stack, name: str) -> str:
    """The metrics of the process that logs as `name`."""
    if name == "frontend":
        with stack.http() as client:
            response = client.get("/metrics")
            assert response.status_code == 200
            return response.text
    (url,) = re.findall(r"http://127\.0\.0\.1:\d+/metrics", stack.log(name))
    with urllib.request.urlopen(url, timeout=60) as response:
        body: bytes = response.read()
    return body.decode()


def samples(text: str) -> dict[str, float]:
    """By name, without labels; of several the sum."""
    found: dict[str, float] = {}
    for name, value in re.findall(r"^([a-z0-9_:]+)(?:\{.*\})? (\S+)$", text, flags=re.MULTILINE):
        found[name] = found.get(name, 0.0) + float(value)
    return found


def check_form(text: str) -> None:
    """Prometheus' own tool finds nothing wrong, but for the colons in the names that others look for."""
    if promtool := shutil.which("promtool"):
        result = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
        assert [line for line in result.stderr.splitlines() if not line.startswith("vllm:")] == []


def test_every_process_counts_what_a_request_did(new_stack: StartStack) -> None:
    stack = new_stack(OCTAVO_METRICS_LISTEN="127.0.0.1:0").start_all()
    for _ in range(2):
        stack.generate(token_request(PROMPT, MAX_NEW_TOKENS))
    # The scheduler's loop publishes its books now and then.
    booked = ("octavo_workers", "octavo_frontends")
    stack.wait_for(lambda: [samples(scrape(stack, "scheduler")).get(name) for name in booked] == [1, 1])
    texts = {name: scrape(stack, name) for name in ("frontend", "scheduler", "worker-0")}
    for text in texts.values():
        check_form(text)
        assert samples(text)["octavo_build_info"] == 1
    frontend, scheduler, worker = map(samples, texts.values())
    assert frontend["octavo_requests_arrived_total"] == frontend["octavo_requests_finished_total"] == 2
    assert frontend["octavo_generated_tokens_total"] == 2 * MAX_NEW_TOKENS
    assert frontend["octavo_prompt_tokens_total"] == 2 * len(PROMPT)
    assert frontend["octavo_time_to_first_token_seconds_count"] == 2
    assert frontend["octavo_requests_in_flight"] == frontend["octavo_journal_requests"] == 0
    assert scheduler["octavo_tokens_sampled_total"] == 2 * MAX_NEW_TOKENS
    assert scheduler["octavo_queue_time_seconds_count"] == 2
    assert worker["octavo_worker_model_info"] == 1
    assert worker["octavo_worker_tokens_total"] == scheduler["octavo_tokens_computed_total"]
    assert worker["octavo_worker_steps_total"] == scheduler["octavo_step_seconds_count"]


def test_one_request_is_one_trace_through_all_processes(new_stack: StartStack) -> None:
    with otlp_collector() as collector:
        stack = new_stack(OCTAVO_OTLP_ENDPOINT=collector.address, OTEL_BSP_SCHEDULE_DELAY="100").start_all()
        request = token_request(PROMPT, MAX_NEW_TOKENS, request_id="traced")
        list(stack.generation.Generate(request, timeout=60, metadata=[("traceparent", CLIENT)]))
        # A worker forgets a sequence with the plan after its last.
        stack.generate(token_request(PROMPT, MAX_NEW_TOKENS))
        stack.wait_for(lambda: len([each for each in collector.spans if each.span.trace_id.hex() == TRACE_ID]) == 3)
        by_service = {each.service: each for each in collector.spans if each.span.trace_id.hex() == TRACE_ID}
    frontend, scheduler, worker = (by_service[f"octavo-{name}"] for name in ("frontend", "scheduler", "worker"))
    assert [each.span.name for each in (frontend, scheduler, worker)] == ["request", "schedule", "sequence"]
    assert frontend.span.parent_span_id.hex() == CLIENTS_SPAN
    assert scheduler.span.parent_span_id == frontend.span.span_id
    assert worker.span.parent_span_id == scheduler.span.span_id
    assert frontend.attributes["octavo.request_id"] == scheduler.attributes["octavo.request_id"] == "traced"
    assert "octavo.queue_time_s" in scheduler.attributes
    assert "first_token" in frontend.events
    assert worker.events == ["first_token"]


def test_with_the_collector_away_all_serve_and_end_well_and_every_line_they_log_is_one_object(
    new_stack: StartStack,
) -> None:
    stack = new_stack(
        OCTAVO_OTLP_ENDPOINT="http://127.0.0.1:9",
        OTEL_BSP_SCHEDULE_DELAY="50",
        OCTAVO_LOG_FORMAT="json",
        OCTAVO_LOG_LEVEL="debug",
    ).start_all()
    stack.generate(token_request(PROMPT, MAX_NEW_TOKENS))
    stack.assert_alive()
    for name in ("frontend", "worker-0", "scheduler"):
        stack.processes[name].terminate()
        assert stack.processes[name].wait(60) == 0
        # What a worker prints to stdout, for people, is not its log.
        lines = [line for line in stack.log(name).splitlines() if not line.startswith("model ")]
        assert lines
        assert all({"time", "level", "logger", "pid", "message"} <= json.loads(line).keys() for line in lines), name
