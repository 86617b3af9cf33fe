"""A signal ends a poll at once, and the handlers of before come back."""

import os
import select
import signal

import pytest

from octavo.worker.process import StopSignal


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_noted_and_wakes_a_poll(number: int) -> None:
    stop = StopSignal()
    before = signal.getsignal(number)
    with stop.installed():
        assert not stop.requested
        os.kill(os.getpid(), number)
        readable, _, _ = select.select([stop.fileno()], [], [], 5)
        assert readable
        assert stop.requested
        assert not stop.insisted
        stop.noticed()
        assert not select.select([stop.fileno()], [], [], 0)[0]
        os.kill(os.getpid(), number)
        assert select.select([stop.fileno()], [], [], 5)[0]
        assert stop.insisted
    assert signal.getsignal(number) is before
