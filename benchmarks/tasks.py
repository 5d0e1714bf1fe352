"""Many asyncio tasks at once, for the works that compare the asyncio face."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Run(Protocol):
    """Runs a coroutine to its end, in one loop that lives through all rounds."""

    def __call__(self, coroutine: Coroutine[Any, Any, T], /) -> T: ...


@contextmanager
def event_loop() -> Iterator[Run]:
    """An event loop of asyncio's own kind; on the way out what still runs in it is cancelled.

    Ctrl-C cancels the coroutine that is being run, and comes out of ``run`` as KeyboardInterrupt when it has ended:
    raised in the middle of the loop, it would break what cleans up (asyncio.Runner does the same, from Python 3.11).
    """
    loop = asyncio.new_event_loop()

    def run(coroutine: Coroutine[Any, Any, T]) -> T:
        task = loop.create_task(coroutine)
        loop.add_signal_handler(signal.SIGINT, task.cancel)
        try:
            return loop.run_until_complete(task)
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    try:
        yield run
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def many_tasks(pair: Callable[[str], Awaitable[object]], names: Sequence[str], seconds: float) -> list[float]:
    """One task a name, each awaiting ``pair(name)`` over and over for so many seconds; pairs a second in all."""
    start = time.perf_counter()
    end = start + seconds

    async def task(name: str) -> int:
        done = 0
        while time.perf_counter() < end:
            await pair(name)
            done += 1
        return done

    done = await asyncio.gather(*(task(name) for name in names))
    return [sum(done) / (time.perf_counter() - start)]
