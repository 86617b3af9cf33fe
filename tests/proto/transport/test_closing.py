"""A socket for strangers that is closed in the middle of a message, as its reader goes, does not end the process."""

import subprocess
import sys
from pathlib import Path

import pytest

# In a process of its own, which libzmq would abort within a few hundred rounds. The reader queues one message, so that
# the others are cut off anywhere.
CLOSING = """
import sys, threading, zmq
from octavo.runtime.transport.sockets import bind_router

for number in range(300):
    endpoint = f"ipc://{sys.argv[1]}/{number}.sock"
    with zmq.Context() as context, bind_router(context, endpoint, is_foreign=True) as router:
        strangers = zmq.Context()
        reader = strangers.socket(zmq.DEALER)
        reader.setsockopt(zmq.RCVHWM, 1)
        reader.setsockopt(zmq.LINGER, 0)
        reader.connect(endpoint)
        reader.send_multipart([b"", b"all"])
        identity, *_ = router.recv_multipart()
        try:
            for _ in range(4000):
                router.send_multipart([identity, b"", b"topic", b"number", bytes(60)], zmq.NOBLOCK)
        except zmq.Again:
            pass
        leaves = threading.Thread(target=lambda: (reader.close(), strangers.term()))
        leaves.start()
    leaves.join()
"""


@pytest.mark.deep
def test_a_message_that_is_cut_short_ends_no_process(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", CLOSING, str(tmp_path)], capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
