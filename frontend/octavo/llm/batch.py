"""Many calls at once, answered in order, with a progress bar where tqdm is installed."""

import importlib.util
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Final, TypeVar

T = TypeVar("T")
R = TypeVar("R")

# What is beyond waits here instead of in the engine, whose queue is for what it is about to begin.
MAX_AT_ONCE: Final = 256


def run_all(
    call: Callable[[T], R], items: Sequence[T], *, shows_progress: bool, give_up: Callable[[], object]
) -> list[R]:
    """What `call` gives for every item, in their order. The first error (Ctrl-C too) ends all and is raised; `give_up`
    is called then, and must end the calls that run."""
    if not items:
        return []
    with ThreadPoolExecutor(min(len(items), MAX_AT_ONCE)) as pool, _progress(len(items), shows_progress) as advance:

        def run(item: T) -> R:
            result = call(item)
            advance()
            return result

        futures = [pool.submit(run, item) for item in items]
        try:
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()
            return [future.result() for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            give_up()
            raise


@contextmanager
def _progress(total: int, shows: bool) -> Iterator[Callable[[], object]]:
    """What is to be called when one is done."""
    if not shows or importlib.util.find_spec("tqdm") is None:
        yield lambda: None
        return
    from tqdm import tqdm

    lock = threading.Lock()
    with tqdm(total=total, desc="Prompts", unit="prompt") as bar:

        def advance() -> None:
            with lock:
                bar.update()

        yield advance
