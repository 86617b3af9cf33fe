"""The processes as they run on several hosts: over tcp, with keys."""

from pathlib import Path

import pytest

from octavo.runtime.transport.curve_keys import files_of, write_keys
from octavo.testbed.stack import Stack, free_address, token_request

from .conftest import StartStack


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """The directories of three hosts, each with the files that its process needs."""
    write_keys(tmp_path / "all")
    for role in ("scheduler", "frontend", "worker"):
        (tmp_path / role).mkdir()
        for name in files_of(role):
            (tmp_path / role / name).write_bytes((tmp_path / "all" / name).read_bytes())
            (tmp_path / role / name).chmod((tmp_path / "all" / name).stat().st_mode)
    return tmp_path


@pytest.fixture
def stack(new_stack: StartStack, keys: Path) -> Stack:
    """Over tcp on this machine, each process with its own keys."""
    endpoints = {f"OCTAVO_{wire}_ENDPOINT": f"tcp://{free_address()}" for wire in ("FRONTEND", "WORKER")}
    stack = new_stack(**endpoints)
    for role in ("scheduler", "frontend", "worker"):
        stack.start(role, OCTAVO_CURVE_KEYS=str(keys / role))
    stack.wait_ready()
    return stack


def test_a_stack_with_keys_serves_and_keeps_strangers_out(stack: Stack, keys: Path) -> None:
    write_keys(keys / "others")
    stack.start("worker", "bare")
    stack.start("worker", "foreign", OCTAVO_CURVE_KEYS=str(keys / "others"))
    assert len(stack.generate(token_request(range(20), 12)).token_ids) == 12
    stack.wait_for(lambda: "does not let this process in" in stack.log("bare"))
    stack.wait_for(lambda: "does not let this process in" in stack.log("foreign"))
    stack.wait_for(lambda: "kept out a peer at" in stack.log("scheduler"))
    assert len(stack.load().workers) == 1
    assert len(stack.generate(token_request(range(20), 12)).token_ids) == 12
    stack.assert_alive()


def test_workers_and_frontends_find_a_restarted_scheduler_with_the_same_keys(stack: Stack, keys: Path) -> None:
    before = stack.generate(token_request(range(20), 12)).token_ids
    stack.kill("scheduler")
    stack.start("scheduler", OCTAVO_CURVE_KEYS=str(keys / "scheduler"))
    assert stack.generate(token_request(range(20), 12)).token_ids == before
    stack.assert_alive()
