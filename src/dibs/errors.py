"""Every error dibs raises, each with the one thing its reader needs to know.

This module answers for the names and the wording of errors; which error a driver's exception becomes is decided in
that driver's store, by error code. *Held by another*, *store unreachable* and *misconfigured* are three classes.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class DibsError(Exception):
    """The root of all errors that dibs raises on purpose."""


class LockTimeout(DibsError, TimeoutError):
    """Another holder kept the name for as long as the caller was willing to wait.

    ``name`` is what was asked for, ``holder`` who was seen holding it (``None`` when the name was free but kept for
    others waiting in line), ``since`` the Unix time of that grant, ``free_in`` the seconds after which the store frees
    it unless it is renewed, ``waited`` the seconds this caller waited. ``paused`` says who has paused it, since
    when and why, if an operator has; who holds it is not told then.
    """

    def __init__(
        self,
        message: str,
        *,
        name: str = "",
        holder: str | None = None,
        since: float | None = None,
        free_in: float | None = None,
        waited: float = 0.0,
        paused: str | None = None,
    ) -> None:
        super().__init__(message)
        self.name = name
        self.holder = holder
        self.since = since
        self.free_in = free_in
        self.waited = waited
        self.paused = paused


class LeaseLost(DibsError):
    """The lease is over although its holder did not give it back; somebody else may be holding the name now."""


class NotHeld(DibsError, RuntimeError):
    """Something was released that this caller does not hold."""


class WouldDeadlock(DibsError, RuntimeError):
    """The caller would wait for itself without limit, alone or in a ring of callers who wait for each other.

    ``cycle`` tells of a ring, a line for each: who it is, what it holds under which token, and what it waits for. It is
    empty for a caller who asked for what it holds itself.
    """

    def __init__(self, message: str, *, cycle: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.cycle = cycle


class LockOrderWarning(RuntimeWarning):
    """Two names were taken in both orders in one process: callers that do so at the same time can deadlock."""


class ResultNotKept(DibsError, ValueError):
    """The work was done and is kept as done, but its ``result`` is not: it is no JSON, or too large."""

    def __init__(self, message: str, *, result: object = None) -> None:
        super().__init__(message)
        self.result = result


class JobExists(DibsError, ValueError):
    """A live job of the queue has this ``key``; nothing was put. Its ``id``, and whether it is worked (``claimed``)."""

    def __init__(self, message: str, *, key: str = "", id: int = 0, claimed: bool = False) -> None:  # noqa: A002
        super().__init__(message)
        self.key = key
        self.id = id
        self.claimed = claimed


class JobFailed(DibsError):
    """The job that was waited for has ended without being done: ``state`` is dead or cancelled, ``error`` its last."""

    def __init__(self, message: str, *, state: str = "dead", error: str | None = None) -> None:
        super().__init__(message)
        self.state = state
        self.error = error


class LimitMismatch(DibsError, ValueError):
    """The name has another number of permits: a semaphore of another limit, or a lock of another kind."""


class InvalidName(DibsError, ValueError):
    """The name cannot be kept exactly on every store; nothing was sent."""


class InvalidOption(DibsError, ValueError):
    """An argument or a URL option is wrong; nothing was sent."""


class StoreUnavailable(DibsError, ConnectionError):
    """The store gave no usable answer, or this process has no thread or file descriptor left to ask it with.

    ``maybe_applied`` is False when the request certainly changed nothing there, True when that is unknown.
    """

    def __init__(self, message: str, *, maybe_applied: bool = True) -> None:
        super().__init__(message)
        self.maybe_applied = maybe_applied


class SetupRequired(DibsError):
    """The store answers, but is not set up for this client: a table, a right or a login is missing."""


class Unsupported(DibsError):
    """This store, or this machine, cannot do that; raised when the object is built, not when it is used."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`` (did you mean 'table'?)`` where one of the known words is near, else nothing."""
    from difflib import get_close_matches

    near = get_close_matches(word.lower(), known, 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def without_frames(error: BaseException) -> BaseException:
    """The same error, free of the frames it went through, so that it can be kept.

    A traceback keeps the variables of every caller alive, a dropped Lease among them, which would then be renewed for
    as long as the error is remembered.
    """
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


def once_more(error: BaseException) -> BaseException:
    """A copy of a kept error, to be raised to one caller: raising adds that caller's frames to what is raised."""
    try:
        import copy
    except OSError:  # of a process that has no file descriptor left for it
        return error
    again = copy.copy(error)
    again.__cause__ = error.__cause__
    return again
