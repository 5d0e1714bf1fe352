"""Jobs put and finished inside the caller's own transaction, so that they and what else it does are one.

The store says which statements that takes, and the caller's connection, through its *door*, runs them. As in
``dibs.guarding``, what is said is written once, as a talk, and carried along by either face.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any, cast
from dibs.door import SQLITE, Said
from dibs.errors import LeaseLost
from dibs.job_hold import forsake, take_up
from dibs.jobs import DONE, Finish, KeyTaken, Put

if TYPE_CHECKING:
    from dibs.door import Door
    from dibs.guarding import Talk
    from dibs.job import JobFacts
    from dibs.jobs import JobStore, PutDone
    from dibs.session import Session

_FILES = Said("PRAGMA database_list")


def put_within(session: Session, door: Door, request: Put) -> Talk[PutDone | KeyTaken]:
    """Put jobs in the transaction that is open behind the door: nobody sees them before it is committed."""
    statements = yield from _statements(session, door, request)
    return (yield from _said(statements))  # type: ignore[no-any-return]


def finish_within(job: JobFacts, door: Door, note: str | None, keep_s: float) -> Talk[None]:
    """End a job in that transaction; LeaseLost when its claim is not in force."""
    request = Finish(job._hold.key, (job.id,), job.fencing_token, DONE, note, 0.0, keep_s)
    statements = yield from _statements(job._session, door, request)
    # From here on it is the transaction's: no renewal waits for its row, and nobody gives it back.
    job._hold.within.add(job.id)
    forsake(job._session, job._hold, [job.id])
    try:
        outcome = yield from _said(statements)
    except BaseException:
        # What the database refused has ended nothing, and its transaction will be undone: the job is its worker's as
        # before, who may say it again in the next one, or fail with it.
        job._hold.within.discard(job.id)
        take_up(job._session, job._hold, job.id)
        raise
    if outcome.gone:
        job._hold.lost.add(job.id)
        raise LeaseLost(job._why())


def _statements(session: Session, door: Door, request: Put | Finish) -> Talk[Any]:
    """What the store wants to be said there."""
    files = (yield _FILES).rows if door.dialect == SQLITE else None
    return session.aside(lambda store, by: cast("JobStore", store).jobs.within(request, door.dialect, files, by))


def _said(statements: Any) -> Talk[Any]:
    """Say it, and hear what came of it."""
    heard = None
    try:
        while True:
            heard = yield statements.send(heard)
    except StopIteration as stop:
        return stop.value
