"""What rings on one thread is heard once on another, however often it rang."""

import select
import threading
from contextlib import closing

from octavo.scheduler.server.wakeup import Bell


def ring_often(bell: Bell) -> None:
    for _ in range(100_000):
        bell.ring()


def test_a_bell_is_heard_once_for_all_its_ringing() -> None:
    with closing(Bell()) as bell:
        assert not bell.heard()
        ringer = threading.Thread(target=ring_often, args=(bell,))
        ringer.start()
        assert select.select([bell.fileno()], [], [], 5)[0]
        ringer.join()
        while bell.heard():
            pass
        assert not select.select([bell.fileno()], [], [], 0)[0]


def test_nobody_hears_a_bell_that_is_closed_and_nobody_minds() -> None:
    bell = Bell()
    bell.close()
    bell.ring()
