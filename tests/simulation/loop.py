"""An event loop of asyncio in one thread of a simulated process: it sleeps and tells the time as the world does.

Everything else of it is asyncio's own. Which loop runs, and which of its tasks, Python keeps for each real thread, of
which a world has one; so that is changed whenever the world goes on with another of its threads.
"""

from __future__ import annotations

import asyncio
import asyncio.tasks
import sys
from inspect import CORO_CREATED, getcoroutinestate
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from tests.simulation.process import Process
    from tests.simulation.world import Task, World

# Since 3.14 it is kept for each thread; before, for each loop.
_SWAP_TASK: Callable[..., Any] | None = (
    asyncio.tasks._swap_current_task if sys.version_info >= (3, 14) else None  # type: ignore[attr-defined]
)


class SimLoop(asyncio.BaseEventLoop):
    def __init__(self, world: World, process: Process) -> None:
        super().__init__()
        self._world = world
        self._process = process
        self._selector = self
        self._woken = False
        self._sleeper: Task | None = None
        self._task_within: Any = None
        self.set_exception_handler(self._strike)

    def work(self, members: list[Coroutine[Any, Any, None]]) -> None:
        """Run these in tasks of this loop, to their end."""
        thread = self._world.current
        assert thread is not None
        thread.loop = self
        self.enter()
        try:
            tasks = [self.create_task(member) for member in members]
            while not all(task.done() for task in tasks):
                self._run_once()  # type: ignore[attr-defined]
            for task in tasks:
                task.result()
        finally:
            self.leave()
            thread.loop = None
            self.close()
            for member in members:
                if getcoroutinestate(member) == CORO_CREATED:
                    member.close()  # its process was killed before it began

    def enter(self) -> None:
        """The world goes on with the thread of this loop."""
        asyncio._set_running_loop(self)
        if _SWAP_TASK is not None:
            _SWAP_TASK(self, self._task_within)

    def leave(self) -> None:
        """It goes on with another."""
        if _SWAP_TASK is not None:
            self._task_within = _SWAP_TASK(self, None)
        asyncio._set_running_loop(None)

    def _strike(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not self._world.closing:
            self._world.broken(f"asyncio: {context['message']}: {context.get('exception')!r}")

    # What asyncio asks of a loop: the time, a selector, and to be woken by other threads.

    def time(self) -> float:
        # As time.monotonic does, it stands still while the machine sleeps.
        return self._process.rate * (self._world.now - self._process.slept_s)

    def select(self, timeout: float | None) -> list[object]:
        """Sleep until something is to be done, or for so many seconds."""
        world = self._world
        world.seam()
        if not self._woken and timeout != 0:
            self._sleeper = world.current
            try:
                world.block(None if timeout is None else timeout / self._process.rate)
            finally:
                self._sleeper = None
        self._woken = False
        return []

    def _process_events(self, events: list[object]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        self._woken = True
        if self._sleeper is not None:
            self._world.wake(self._sleeper)
        self._world.seam()
