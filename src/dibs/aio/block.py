"""What becomes of an ``async with`` block whose lease is lost: its task is cancelled, once."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

from dibs.aio.tasks import call_in
from dibs.hold import HELD, LOST

if TYPE_CHECKING:
    from dibs.grips import Releasable
    from dibs.hold import Hold


class Block:
    """One ``async with`` block, whose task is cancelled when its lease is lost."""

    __slots__ = ("_task", "cancelled", "over")

    def __init__(self, lease: Releasable, task: asyncio.Task[Any]) -> None:
        # Not kept alive: a task whose loop was closed is garbage, and then its lease ends by its ttl.
        self._task = ref(task)
        self.cancelled = False
        self.over = False
        for hold in lease._holds:
            tell = partial(self._tell, hold)
            # Nearly always nobody else knows this hold yet, except the renewer: whoever ends it changes its state
            # before it calls its listeners, so entering first and looking afterwards misses nothing.
            hold.listeners = [tell] if hold.listeners is None else [*hold.listeners, tell]
            if hold.state != HELD:
                self._tell(hold)

    def _tell(self, hold: Hold) -> None:
        task = self._task()
        if hold.state == LOST and not self.over and task is not None:
            call_in(task.get_loop(), self._cancel)

    def end(self, exc_type: type[BaseException] | None) -> bool:
        """The block is over: whether by the loss of its lease and nothing else."""
        self.over = True
        by_loss = self.cancelled and exc_type is not None and issubclass(exc_type, asyncio.CancelledError)
        task = self._task()
        if self.cancelled and task is not None and sys.version_info >= (3, 11):
            # The cancellation was ours. If somebody else cancelled the task as well, that one goes on.
            by_loss = task.uncancel() == 0 and by_loss
        return by_loss

    def _cancel(self) -> None:
        task = self._task()
        if not self.over and not self.cancelled and task is not None:
            self.cancelled = True
            task.cancel("the dibs lease of this block was lost")
