"""Putting jobs into the queues of MySQL and MariaDB.

Puts without keys travel together, in one INSERT in autocommit. Everything else is a few statements in a transaction,
dibs's own or the caller's, after a look (over dibs's own connection, outside of it) at what is there already. A row is
found to be there, besides, by the unique keys of the INSERT, which waits for whoever is about to make or end that very
job, and for nobody else.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, NamedTuple
from dibs.errors import StoreUnavailable
from dibs.jobs import KEEP, REPLACE, Elsewhere, KeyTaken, PutDone
from dibs.store import StoreBusy
from dibs.stores import mysql_jobs_sql as sql
from dibs.stores.mysql_sql import EPOCH, NOW
from dibs.stores.mysql_values import hexed, literal, us

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence
    from typing import Any

    from dibs.jobs import NewJob, Put

# Jobs of one INSERT, and how much text it may carry: a server takes statements of 16 MB at least, unless it was told
# otherwise.
ROWS_MAX = 1000
CHARS_MAX = 4_000_000
# Rows that one statement replaces: each is a SELECT of its own to the server, which takes long to make sense of many.
UNITED_MAX = 100
# A DATETIME goes from the year 1000 to 9999: jobs that are due earlier or later are due then.
_FIRST_S, _LAST_S = -30_000_000_000.0, 253_000_000_000.0
_DELAY_MAX_S = 1e10
# How often a put within the caller's transaction is begun again.
TRIES_MAX = 5
_SAVEPOINT = "dibs_put"


class Seen(NamedTuple):
    """What there was before a put."""

    #: The jobs of this put, if it has been done before, by their places.
    done: dict[int, int]
    #: Live jobs by their keys: the id, and whether it is claimed.
    live: dict[str, tuple[int, bool]]


def row(put: Put, place: int, job: NewJob) -> str:
    """A job as VALUES of the INSERT."""
    payload, payload_bytes = _payload(job)
    return (
        f"(x'{hexed(put.name)}',{-job.priority:d},{_due_at(job)},{payload},{payload_bytes},{_binary(job.key)},"
        f"{_binary(job.group)},{job.max_tries:d},{NOW},x'{hexed(put.put_id)}',{place:d})"
    )


def parts(rows: Sequence[str], glue: str = ",", rows_max: int = ROWS_MAX) -> Iterator[str]:
    """The rows, in parts that one statement may carry; one row at least."""
    part: list[str] = []
    size = 0
    for one in rows:
        if part and (len(part) == rows_max or size + len(one) > CHARS_MAX):
            yield glue.join(part)
            part, size = [], 0
        part.append(one)
        size += len(one)
    if part:
        yield glue.join(part)


def look(put: Put, text: Callable[[str], str], read: Callable[[str], Sequence[tuple[Any, ...]]]) -> Seen:
    """What there is before this put."""
    done = {int(place): int(job) for place, job in read(text(sql.PUT_PLACES) % (hexed(put.put_id), hexed(put.name)))}
    live: dict[str, tuple[int, bool]] = {}
    for some in _lists([job.key for job in put.jobs if job.key is not None]):
        live |= _live(read(text(sql.WITH_KEYS) % (hexed(put.name), some)))
    return Seen(done, live)


def locking(put: Put, seen: Seen, text: Callable[[str], str]) -> Iterator[str]:
    """The statements that lock, without waiting, the live jobs with the keys that this put will write.

    What a transaction has put and not yet committed is not seen, but is locked.
    """
    keys = [job.key for job in put.jobs if job.key is not None]
    for some in _lists([key for key in keys if put.on_conflict == REPLACE or key not in seen.live]):
        yield text(sql.LOCK_KEYS) % (hexed(put.name), some)


def known(put: Put, seen: Seen) -> PutDone | KeyTaken | None:
    """The outcome, where that look told it."""
    if seen.done:
        # Of those that have ended meanwhile nothing is known any more; no job has the id 0.
        kept = [seen.live.get(job.key, (0, False))[0] if job.key is not None else 0 for job in put.jobs]
        return PutDone(tuple(seen.done.get(place, kept[place]) for place in range(len(kept))))
    for job in put.jobs:
        if job.key is not None and job.key in seen.live and put.on_conflict != KEEP:
            there, claimed = seen.live[job.key]
            if put.on_conflict != REPLACE or claimed:
                return KeyTaken(job.key, there, claimed)
    return None


def putting(
    put: Put, seen: Seen, text: Callable[[str], str], server: str | None = None
) -> Generator[str, Any, PutDone | Elsewhere]:
    """The statements of one put, for a transaction; StoreBusy when they must be undone, and begun again with a look.

    ``server``: where that may be somebody else's, see to it that it is on this one.
    """
    there = [None if job.key is None or job.key not in seen.live else seen.live[job.key][0] for job in put.jobs]
    new = [row(put, place, job) for place, job in enumerate(put.jobs) if there[place] is None]
    for part in parts(new):
        yield text(sql.PUT_UNLESS_THERE) % part
    if put.on_conflict == REPLACE:
        rows = [_replacing(put.jobs[place], place, live) for place, live in enumerate(there) if live is not None]
        for part in parts(rows, " UNION ALL ", UNITED_MAX):
            yield text(sql.REPLACE) % (part, hexed(put.name), hexed(put.put_id))
    of_put = hexed(put.put_id), hexed(put.name)
    if server is None:
        answer = yield text(sql.PUT_PLACES) % of_put
    else:
        answer = yield text(sql.PUT_PLACES_AND_OURS) % (hexed(server).upper(), *of_put)
        if not all(int(ours) for *_, ours in answer.rows):
            yield text(sql.UNPUT) % of_put
            return Elsewhere()
    if put.on_conflict == KEEP:
        ids = {place: live for place, live in enumerate(there) if live is not None}
    else:
        ids = {}
    ids |= {int(place): int(job) for place, job, *_ in answer.rows}
    if len(ids) < len(put.jobs):
        raise StoreBusy("a job with the same key was put, taken or ended at the same moment")
    return PutDone(tuple(ids[place] for place in range(len(put.jobs))))


def is_ours(server: str, text: Callable[[str], str]) -> Generator[str, Any, bool]:
    """Ask whether that is this server."""
    answer = yield text(sql.OURS) % hexed(server).upper()
    return bool(int(answer.rows[0][0]))


def putting_within(
    put: Put, seen: Seen, text: Callable[[str], str], server: str | None
) -> Generator[str, Any, PutDone | KeyTaken | Elsewhere]:
    """The same for a transaction that is the caller's, and of which nothing else may be undone.

    Where there is none, on a connection in autocommit, there are no savepoints either: so one is asked for only where
    something may have to be undone, and it is not released.
    """
    several = len(put.jobs) > 1 and any(job.key is not None for job in put.jobs)
    for _ in range(TRIES_MAX):
        outcome = known(put, seen)
        if outcome is not None:
            return outcome
        # What is replaced cannot be taken back, so that is asked before; else the last statement of the put tells it.
        if server and seen.live and put.on_conflict == REPLACE and not (yield from is_ours(server, text)):
            return Elsewhere()
        if several:
            yield f"SAVEPOINT {_SAVEPOINT}"
        try:
            return (yield from putting(put, seen, text, server))
        except StoreBusy:
            if several:
                yield f"ROLLBACK TO SAVEPOINT {_SAVEPOINT}"
        if server and not (yield from is_ours(server, text)):
            return Elsewhere()
        # What is in the way may be this transaction's own, or be there since it began: others may not see it, or it
        # may not. A locking read sees both.
        keys = [_binary(job.key) for job in put.jobs if job.key is not None]
        answer = yield f"{text(sql.WITH_KEYS) % (hexed(put.name), ','.join(keys))} LOCK IN SHARE MODE"
        seen = Seen({}, _live(answer.rows))
    raise StoreUnavailable("jobs with the same keys are put and ended all the time: put them again later")


def _lists(keys: Sequence[str]) -> Iterator[str]:
    """Keys, as many as one statement may name."""
    for first in range(0, len(keys), ROWS_MAX):
        yield ",".join(map(_binary, keys[first : first + ROWS_MAX]))


def _replacing(job: NewJob, place: int, live: int) -> str:
    values = (*_payload(job), -job.priority, _due_at(job), _binary(job.group), job.max_tries, place)
    return sql.REPLACING % (hexed(job.key or ""), live, *values)


def _live(rows: Sequence[tuple[Any, ...]]) -> dict[str, tuple[int, bool]]:
    return {bytes(key).decode(): (int(job), bool(int(claimed))) for key, job, claimed in rows}


def _payload(job: NewJob) -> tuple[str, str]:
    """The two columns, of which one is NULL."""
    if isinstance(job.payload, str):
        return literal(job.payload), "NULL"
    return "NULL", f"x'{job.payload.hex()}'"


def _due_at(job: NewJob) -> str:
    if job.at is not None:
        return f"TIMESTAMPADD(MICROSECOND, {us(min(max(job.at, _FIRST_S), _LAST_S)):d}, {EPOCH})"
    return f"{NOW} + INTERVAL {us(min(job.delay, _DELAY_MAX_S)):d} MICROSECOND" if job.delay else NOW


def _binary(value: str | None) -> str:
    return "NULL" if value is None else f"x'{hexed(value)}'"
