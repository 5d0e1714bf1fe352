"""Who acquires what is acquired in a thread: an object that is the thread's own for as long as it lives.

A thread's number will not do: the system gives it to the next thread, which would then be taken for the one that left
something behind. Greenlets count as threads where they were put in their place before dibs was imported. A forked
child goes on with the owner of the thread that forked it; what that held is told by its process (``dibs.grips``).
``dibs.aio.tasks`` has the owner for tasks.
"""

from __future__ import annotations

from _thread import _local, get_ident
from weakref import ref

from dibs._typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class ThreadOwner:
    """A thread. It is equal to itself only."""

    __slots__ = ("__weakref__", "ident")

    def __init__(self) -> None:
        #: What people know it by. Another thread may have had it before.
        self.ident = get_ident()

    def __str__(self) -> str:
        return str(self.ident)


# State of the module because threads are, too.
_HERE = _local()


def this_thread() -> ref[ThreadOwner]:
    """The thread that is running. What it acquires does not keep its owner, which is gone when the thread is."""
    try:
        owner: ref[ThreadOwner] = _HERE.owner
    except AttributeError:
        # In one step: a signal may come in between, and its handler may acquire something as well.
        thread = _HERE.__dict__.setdefault("thread", ThreadOwner())
        owner = _HERE.owner = ref(thread)
    return owner


def sentinel(owner: ref[Any]) -> Callable[[], object]:
    """What says None before anything of the thread or task is finalized by the garbage collector.

    The owner itself, a reference without a callback, may outlive that since Python 3.15.
    """
    alive = owner()
    assert alive is not None
    return ref(alive, _nothing)


def _nothing(_: object) -> None:
    pass


def is_gone(owner: object) -> bool:
    """Whether the thread or task has ended, and nobody can ask for what it holds in its name."""
    return isinstance(owner, ref) and owner() is None
