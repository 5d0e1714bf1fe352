"""Many asyncio tasks at once, for the works that compare the asyncio face."""

from __future__ import annotations

import asyncio
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
    """An event loop of asyncio's own kind; on the way out, also by Ctrl-C, what still runs in it is cancelled."""
    loop = asyncio.new_event_loop()
    try:
        yield loop.run_until_complete
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
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
