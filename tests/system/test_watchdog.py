"""A scheduler that plans nothing for a worker with work says so: in its log, its metrics, and through its frontends."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from octavo.testbed.stack import Stack, free_address, token_request

from .conftest import StartStack

pytestmark = pytest.mark.system

# No fault is known that stops a replica for good, so one is put into the scheduler's process: while a file is there, it
# plans nothing.
STANDSTILL = """
import os

from octavo.scheduler.core.scheduler import Scheduler

plan = Scheduler.schedule


def schedule(self, now):
    return [] if os.path.exists(os.environ["STANDSTILL"]) else plan(self, now)


Scheduler.schedule = schedule
"""


@pytest.fixture
def switch(tmp_path: Path) -> Path:
    (tmp_path / "sitecustomize.py").write_text(STANDSTILL, encoding="utf-8")
    return tmp_path / "on"


@pytest.fixture
def metrics() -> str:
    return free_address()


@pytest.fixture
def stack(new_stack: StartStack, switch: Path, metrics: str) -> Stack:
    stack = new_stack(OCTAVO_FAKE_STEP_MS="5")
    scheduler = {"PYTHONPATH": str(switch.parent), "STANDSTILL": str(switch), "OCTAVO_WATCHDOG": "1"}
    stack.start("scheduler", **scheduler, OCTAVO_METRICS_LISTEN=metrics)
    stack.start("frontend")
    stack.start_named("worker-0")
    stack.wait_ready()
    return stack


def stalled(metrics: str) -> str:
    """The metric's value, as it is written."""
    text = httpx.get(f"http://{metrics}/metrics", trust_env=False, timeout=60).text
    found = re.search(r'^octavo_worker_stalled\{worker="worker-0"\} (\S+)$', text, flags=re.MULTILINE)
    return found[1] if found else ""


def test_a_worker_that_stands_still_is_told_everywhere_until_it_moves_on(
    stack: Stack, switch: Path, metrics: str
) -> None:
    expected = stack.generate(token_request([1, 2, 3], 40)).token_ids
    with stack.http() as http, ThreadPoolExecutor(1) as pool:
        assert http.get("/ready").status_code == 200
        switch.touch()
        answer = pool.submit(stack.generate, token_request([1, 2, 3], 40))
        stack.wait_for(lambda: http.get("/ready").status_code == 503)
        assert http.get("/livez").status_code == 200
        stack.wait_for(lambda: stalled(metrics) == "1.0")
        line = next(line for line in stack.log("scheduler").splitlines() if "answered no step" in line)
        assert "worker worker-0 has work, and has answered no step for" in line
        assert re.search(
            r"is (waiting|running)( on worker-0)?; steps under way with it: none; what keeps it: nothing", line
        )
        stack.wait_for(lambda: "not ready: STALLED" in stack.log("frontend"))
        switch.unlink()
        assert answer.result(60).token_ids == expected
        stack.wait_for(lambda: http.get("/ready").status_code == 200)
        stack.wait_for(lambda: stalled(metrics) == "0.0")
    stack.wait_for(lambda: "worker worker-0 answers steps again" in stack.log("scheduler"))
