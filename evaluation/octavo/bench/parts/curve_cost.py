"""Measures what CURVE costs: a step's message of 64 deltas is encoded, sent over TCP on this machine and received.

`python -m octavo.bench.parts.curve_cost` prints messages per second, and CPU time per message of both ends together.
"""

import argparse
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import zmq

from octavo.runtime.transport.curve_keys import read_client_keys, read_server_keys, write_keys
from octavo.runtime.transport.sockets import bind_router, connect_dealer
from octavo.wire.codec import encode
from octavo.wire.requests import Delta, Deltas

Socket = zmq.Socket[bytes]


@dataclass(frozen=True)
class Cost:
    """Holds the cost of one way to send: the median of several rounds."""

    message_bytes: int
    messages_per_s: float
    cpu_us_per_message: float


def deltas_of_a_step(sequences: int) -> Deltas:
    """Makes a message with one token for each of `sequences` sequences."""
    return Deltas(1 << 63, [_delta(number) for number in range(sequences)])


def _delta(number: int) -> Delta:
    name = f"chatcmpl-{number:032x}"
    return Delta(name, 1, 0, 100 + number, (1 << 62) + number, [31_000 + number], None, 0, 0, 0)


def measure(keys: Path | None, *, messages: int, rounds: int, sequences: int = 64) -> Cost:
    """Measures the cost without keys, or with those in a directory."""
    server_keys = None if keys is None else read_server_keys(keys, "frontend")
    client_keys = None if keys is None else read_client_keys(keys, "frontend")
    with zmq.Context() as context, bind_router(context, "tcp://127.0.0.1:0", server_keys) as router:
        address = router.get_string(zmq.LAST_ENDPOINT)
        with zmq.Context() as other, connect_dealer(other, address, client_keys) as dealer:
            dealer.send(b"hello")
            peer, _ = router.recv_multipart()
            step = deltas_of_a_step(sequences)
            taken = [_round(router, peer, dealer, step, messages) for _ in range(rounds)]
    wall_s, cpu_s = (median(times) for times in zip(*taken, strict=True))
    return Cost(len(encode(step)), messages / wall_s, 1e6 * cpu_s / messages)


def _round(router: Socket, peer: bytes, dealer: Socket, step: Deltas, messages: int) -> tuple[float, float]:
    """Returns the seconds, and the seconds of CPU, until the last message is there."""
    reader = threading.Thread(target=lambda: [dealer.recv() for _ in range(messages)])
    began, cpu_began = time.perf_counter(), time.process_time()
    reader.start()
    for _ in range(messages):
        router.send_multipart([peer, encode(step)])
    reader.join()
    return time.perf_counter() - began, time.process_time() - cpu_began


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=5_000, help="messages of a round")
    parser.add_argument("--rounds", type=int, default=15)
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        keys = Path(directory) / "keys"
        write_keys(keys)
        for name, where in (("in the clear", None), ("CURVE", keys)):
            cost = measure(where, messages=chosen.messages, rounds=chosen.rounds)
            print(
                f"{name:13} {cost.messages_per_s:8,.0f} messages/s of {cost.message_bytes:,} bytes,"
                f" {cost.cpu_us_per_message:6.1f} us of CPU each"
            )


if __name__ == "__main__":
    main()
