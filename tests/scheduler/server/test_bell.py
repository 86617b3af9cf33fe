"""What rings on one thread is heard once on another, however often it rang."""

import select
import threading
from contextlib import closing

from octavo.runtime.transport.wakeup import Wakeup


def ring_often(wakeup: Wakeup) -> None:
    for _ in range(100_000):
        wakeup.ring()


def test_a_bell_is_heard_once_for_all_its_ringing() -> None:
    with closing(Wakeup()) as wakeup:
        assert not wakeup.heard()
        ringer = threading.Thread(target=ring_often, args=(wakeup,))
        ringer.start()
        assert select.select([wakeup.fileno()], [], [], 60)[0]
        ringer.join()
        while wakeup.heard():
            pass
        assert not select.select([wakeup.fileno()], [], [], 0)[0]


def test_nobody_hears_a_bell_that_is_closed_and_nobody_minds() -> None:
    wakeup = Wakeup()
    wakeup.close()
    wakeup.ring()
