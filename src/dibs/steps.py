"""One way through the code for threads and tasks: acts are written once, as steps.

A *steps* generator yields ``(session, ask, timeout)`` whenever it needs an answer and is sent whether the ask was
settled in time. ``run`` takes the steps in a thread, blocking; ``dibs.aio`` takes the same steps in a task, awaiting.
An exception at the waiting point (Ctrl-C, cancellation) is thrown into the steps, which clean up after themselves.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from dibs.lane import Ask
    from dibs.session import Session

T = TypeVar("T")
Steps = Generator[tuple["Session", "Ask", "float | None"], bool, T]


def run(steps: Steps[T]) -> T:
    """Take the steps in this thread."""
    try:
        session, ask, timeout = next(steps)
        while True:
            try:
                settled = session.wait(ask, timeout)
            except BaseException as error:  # noqa: BLE001 - the steps raise it again when they have cleaned up
                session, ask, timeout = steps.throw(error)
            else:
                session, ask, timeout = steps.send(settled)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
