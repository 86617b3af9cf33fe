"""Addresses for processes that begin to listen later."""

import pytest

from octavo.testbed import stack


def test_no_address_is_found_twice_though_nobody_listens_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "_PORTS", range(31_900, 31_960))
    found = [stack.free_address() for _ in range(12)]
    assert len(set(found)) == 12
