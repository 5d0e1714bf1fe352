"""Jobs put and finished inside the caller's own transaction, so that they and what else it does are one.

The store says which statements that takes, and the caller's connection, through its *door*, runs them. As in
``dibs.guarding``, what is said is written once, as a talk, and carried along by either face.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any, cast
from dibs.door import FILES, SQLITE
from dibs.errors import InvalidOption, LeaseLost
from dibs.job_hold import forsake, take_up, tell
from dibs.jobs import DONE, Elsewhere, Finish, KeyTaken, Put
from dibs.new_jobs import error_text
from dibs.steps import acting

if TYPE_CHECKING:
    from collections.abc import Callable

    from dibs.clock import Deadline
    from dibs.door import Door
    from dibs.guarding import Talk
    from dibs.job import JobFacts
    from dibs.jobs import JobStore, PutDone
    from dibs.session import Session
    from dibs.store import Store


def put_within(session: Session, door: Door, request: Put) -> Talk[PutDone | KeyTaken]:
    """Put jobs in the transaction that is open behind the door: nobody sees them before it is committed."""
    statements = yield from _statements(session, door, request)
    return (yield from _outcome(session, door, request, statements))  # type: ignore[no-any-return]


def finish_within(job: JobFacts, door: Door, note: str | None, keep_s: float) -> Talk[None]:
    """End a job in that transaction; LeaseLost when its claim is not in force."""
    session, hold = job._session, job._hold
    request = Finish(hold.key, (job.id,), job.fencing_token, DONE, note, 0.0, keep_s)
    hold.refused.pop(job.id, None)
    forsaken: dict[int, list[Callable[[], None]]] = {}
    try:
        statements = yield from _statements(session, door, request)
        # From here on it is the transaction's: no renewal waits for its row, and nobody gives it back.
        hold.within.add(job.id)
        forsake(session, hold, [job.id], forsaken)
        outcome = yield from _outcome(session, door, request, statements)
    except BaseException as error:
        # Nothing has ended, since that transaction will be undone: the job is its worker's as before, who may say it
        # again in the next one. But whoever goes on as if nothing had happened has not done it: see JobHold.refused.
        hold.refused[job.id] = error_text(error)
        hold.within.discard(job.id)
        take_up(session, hold, forsaken)
        raise
    if outcome.gone:
        hold.lost.add(job.id)
        raise LeaseLost(job._why())
    tell(forsaken)


def _statements(session: Session, door: Door, request: Put | Finish) -> Talk[Any]:
    """What the store wants to be said there, when it has been asked what it must be asked over its own connection.

    Through the lane, so that an event loop goes on meanwhile. Not on SQLite, where that may be waiting for this very
    transaction, and the store asks nothing.
    """
    files = (yield FILES).rows if door.dialect == SQLITE else None

    def within(store: Store, by: Deadline) -> Any:
        return cast("JobStore", store).jobs.within(request, door.dialect, files, by)

    return session.aside(within) if files is not None else (yield acting(session, within))


def _outcome(session: Session, door: Door, request: Put | Finish, statements: Any) -> Talk[Any]:
    """What comes of it. A connection that seems to lead elsewhere is refused when the store has looked once more.

    What it knew of where it is itself may have been from before a failover.
    """
    outcome = yield from _said(statements)
    if type(outcome) is Elsewhere:
        outcome = yield from _said((yield from _statements(session, door, request)))
    if type(outcome) is Elsewhere:
        raise InvalidOption(
            f"{door} leads to another database than the one in which this client keeps its jobs: put and end them on a "
            "connection to that one, or leave connection= out"
        )
    return outcome


def _said(statements: Any) -> Talk[Any]:
    """Say it, and hear what came of it."""
    heard = None
    try:
        while True:
            heard = yield statements.send(heard)
    except StopIteration as stop:
        return stop.value
