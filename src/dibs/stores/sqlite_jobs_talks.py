"""Puts and ends of jobs on SQLite, as statements for whichever connection: the store's own, or the caller's.

Each is a generator that yields statements, is sent their answers, and returns the outcome. Whoever runs them sees to it
that nobody else writes from before the first of them until the transaction has ended.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any, NamedTuple
from dibs.door import Said
from dibs.jobs import BACK, DEAD, DONE, KEEP, REPLACE, RETRY, Finished, KeyTaken, PutDone
from dibs.stores.sqlite_jobs_sql import with_rows

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from dibs.door import Answer
    from dibs.jobs import Finish, NewJob, Put

# Rows of one statement: SQLite takes 32,766 values or more, and a longer text is not faster.
ROWS_MAX = 100


class Moment(NamedTuple):
    """When it is: the number of the boot, seconds on its clock, and Unix time."""

    boot: int
    now: float
    wall: float


def put(sql: dict[str, str], request: Put, at: Moment) -> Generator[Said, Answer, PutDone | KeyTaken]:
    name, put_id, jobs, on_conflict = request
    known: Answer = yield Said(sql["known"], (put_id, name))
    keyed = [place for place, job in enumerate(jobs) if job.key is not None]
    live = (yield from _with_keys(sql, name, jobs, keyed, at)) if keyed else {}
    if known.rows:  # repeated, since the answer was lost
        ids = [row[0] for row in known.rows]
        of_keys = {place: job for place, (job, _) in live.items() if on_conflict == KEEP or job in ids}
        return PutDone(_told_again(ids, len(jobs), keyed, of_keys))
    for place in sorted(live):
        job, claimed = live[place]
        if on_conflict != KEEP and (claimed or on_conflict != REPLACE):
            return KeyTaken(jobs[place].key or "", job, claimed)
    if live and on_conflict == REPLACE:
        for place, (job, _) in live.items():
            new = jobs[place]
            values = (new.payload, new.priority, _due(new, at), new.group, new.max_tries, put_id, job)
            yield Said(sql["replace"], values)
    ids = yield from _insert(sql, request, [new for place, new in enumerate(jobs) if place not in live], at)
    if live:
        inserted = iter(ids)
        ids = [live[place][0] if place in live else next(inserted) for place in range(len(jobs))]
    return PutDone(tuple(ids))


def _told_again(known: list[int], count: int, keyed: Sequence[int], of_keys: dict[int, int]) -> tuple[int, ...]:
    """The ids of a put that was done before, in their order; fewer, if some of its jobs have ended meanwhile."""
    others = set(known).difference(of_keys.values())
    if len(of_keys) < len(keyed) or len(others) < count - len(keyed):
        return tuple(known)
    inserted = iter(sorted(others))
    return tuple([of_keys[place] if place in of_keys else next(inserted) for place in range(count)])


def _with_keys(
    sql: dict[str, str], name: str, jobs: Sequence[NewJob], keyed: Sequence[int], at: Moment
) -> Generator[Said, Answer, dict[int, tuple[int, bool]]]:
    """The live jobs that have these jobs' keys, by the places of these: their ids, and whether they are claimed."""
    live: dict[int, tuple[int, bool]] = {}
    for first in range(0, len(keyed), ROWS_MAX):
        block = keyed[first : first + ROWS_MAX]
        values: list[object] = []
        for place in block:
            values += (place, jobs[place].key)
        found = yield Said(with_rows(sql, "with_keys", len(block), 2), (*values, at.boot, at.now, name))
        live.update({place: (job, bool(claimed)) for place, job, claimed in found.rows})
    return live


def _insert(
    sql: dict[str, str], request: Put, jobs: Sequence[NewJob], at: Moment
) -> Generator[Said, Answer, list[int]]:
    name, put_id, wall = request.name, request.put_id, at.wall
    ids: list[int] = []
    for first in range(0, len(jobs), ROWS_MAX):
        block = jobs[first : first + ROWS_MAX]
        values: list[object] = []
        for new in block:
            payload, priority, _, _, key, group, max_tries = new
            values += (name, put_id, wall, payload, priority, _due(new, at), key, group, max_tries)
        inserted = yield Said(with_rows(sql, "insert", len(block), 9), values)
        # Rows of one INSERT get their ids in their order, but are not always told in it.
        ids += sorted([row[0] for row in inserted.rows])
    return ids


def _due(new: NewJob, at: Moment) -> float:
    return at.wall + new.delay if new.at is None else new.at


def finish(sql: dict[str, str], request: Finish, at: Moment) -> Generator[Said, Answer, Finished]:
    name, ids, fencing_token, end, note, delay, keep, _ = request
    mine = (in_json(ids), name, fencing_token, at.boot, at.now)
    ended: list[tuple[Any, ...]] = []
    if end == BACK:
        ended = (yield Said(sql["back"], mine)).rows
    elif end == DONE:
        if keep > 0:
            yield Said(sql["keep_done"], (DONE, at.wall, at.wall + keep, note, *mine))
        ended = (yield Said(sql["done"], mine)).rows
    elif end == DEAD:
        yield Said(sql["keep_failed"], (note, DEAD, at.wall, None, None, *mine))
        ended = (yield Said(sql["done"], mine)).rows
    elif end == RETRY:
        yield Said(sql["keep_exhausted"], (note, DEAD, at.wall, None, None, *mine))
        ended = (yield Said(sql["exhausted"], mine)).rows
        ended += (yield Said(sql["retry"], (note, at.wall + delay, *mine))).rows
    return Finished(gone(ids, ended))


def in_json(ids: Sequence[int]) -> str:
    return f"[{','.join(map(str, ids))}]"


def gone(ids: Sequence[int], rows: Sequence[tuple[Any, ...]]) -> tuple[int, ...]:
    """The ids that are not in the first column of these rows."""
    if len(rows) == len(ids):
        return ()
    found = {row[0] for row in rows}
    return tuple(job for job in ids if job not in found)
