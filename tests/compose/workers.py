"""Prints one line per worker in the scheduler's books: id, running sequences, free blocks, all blocks, steps.

`run.sh` feeds this file to Python inside the scheduler's container, whose Admin service is not public.
"""

import grpc

from octavo.v1 import admin_pb2, admin_pb2_grpc


def main() -> None:
    with grpc.insecure_channel("127.0.0.1:50052") as channel:
        load = admin_pb2_grpc.AdminServiceStub(channel).GetLoad(
            admin_pb2.GetLoadRequest(), timeout=5, wait_for_ready=True
        )
    for worker in load.workers:
        print(worker.id, worker.running, worker.blocks_free, worker.blocks_total, worker.steps)


main()
