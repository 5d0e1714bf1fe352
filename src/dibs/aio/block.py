"""What becomes of an ``async with`` block whose lease is lost: its task is cancelled, once."""

from __future__ import annotations

import asyncio
import sys

from dibs._typing import TYPE_CHECKING
from dibs.aio.tasks import call_in
from dibs.hold import HELD, LOST
from dibs.owners import sentinel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dibs.aio.tasks import Owner
    from dibs.grips import Releasable
    from dibs.hold import Hold


class Block:
    """One ``async with`` block, whose task is cancelled when its lease is lost. Its holds call it at their end."""

    __slots__ = ("alive", "cancelled", "holds", "over", "task")

    def __init__(self, lease: Releasable, task: Owner) -> None:
        #: Not kept alive: a task whose loop was closed is garbage, and then its lease ends by its ttl.
        self.task = task
        #: None as soon as the task is garbage, also while its block is left for that reason.
        self.alive = sentinel(task)
        self.holds: Sequence[Hold] = lease._holds
        self.cancelled = False
        self.over = False
        for hold in self.holds:
            # Nearly always nobody else knows this hold yet, except the renewer: whoever ends it changes its state
            # before it calls its listeners, so entering first and looking afterwards misses nothing.
            hold.listeners = [self] if hold.listeners is None else [*hold.listeners, self]
            if hold.state != HELD:
                self()

    def __call__(self) -> None:
        if self.over:
            return
        task = self.task()
        if task is not None and any(hold.state == LOST for hold in self.holds):
            call_in(task.get_loop(), self._cancel)

    def end(self, exc_type: type[BaseException] | None) -> bool:
        """The block is over: whether by the loss of its lease and nothing else."""
        self.over = True
        by_loss = self.cancelled and exc_type is not None and issubclass(exc_type, asyncio.CancelledError)
        task = self.task() if self.cancelled else None
        if task is not None and sys.version_info >= (3, 11):
            # The cancellation was ours. If somebody else cancelled the task as well, that one goes on.
            by_loss = task.uncancel() == 0 and by_loss
        return by_loss

    def _cancel(self) -> None:
        task = self.task()
        if not self.over and not self.cancelled and task is not None:
            self.cancelled = True
            task.cancel("the dibs lease of this block was lost")
