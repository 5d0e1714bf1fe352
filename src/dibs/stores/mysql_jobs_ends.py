"""Ending claims on jobs, and jobs, in the queues of MySQL and MariaDB.

The rows are locked first, in the order of their ids, where the claim's token is and while the claim is in force. What
is decided then holds until the transaction ends, be it dibs's own or the caller's: nobody takes a row that is locked.
Each of the statements names the token again, so that nothing happens on a connection that is in no transaction.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, NamedTuple
from dibs.jobs import BACK, CANCELLED, DEAD, DONE, JOB_LOCKED, KEY_LOCKED, NO_TRIES_LEFT, RETRY, Finished
from dibs.store import RowBusy, StoreBusy
from dibs.stores import mysql_jobs_sql as sql
from dibs.stores.mysql_values import hexed, literal, us

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence
    from typing import Any

    from dibs.jobs import Extend, Finish
    from dibs.stores.mysql_drivers import Answer

    Execute = Callable[[str], Answer]

KEEP_MAX_S = 1e10
# Jobs that one statement within the caller's transaction names.
WITHIN_MAX = 500


class NotAll(Exception):
    """Some of the claims are not in force, so what was done must be undone and done one by one."""


class Which(NamedTuple):
    """Which rows a statement is about, and of which of them its condition says yes."""

    #: For those that join, and for those that do not.
    rows: str
    key_name: str
    keys: str
    where: str = "TRUE"

    def joined(self, also: str = "TRUE") -> tuple[str, str]:
        return self.rows, f"{self.where} AND {also}"

    def listed(self, also: str = "TRUE") -> tuple[str, str]:
        return self.key_name, f"{self.keys} AND {self.where} AND {also}"


def among(ids: Iterable[int]) -> str:
    return f"j.id IN ({','.join(map(str, sorted(ids)))})"


def by_ids(ids: Iterable[int], text: Callable[[str], str], where: str = "TRUE") -> Which:
    """Jobs by their ids, in that order."""
    listed = sorted(set(ids))
    return Which(text(sql.BY_IDS) % f"[{','.join(map(str, listed))}]", "job_id", among(listed), where)


def by_places(queue: str, places: Sequence[tuple[int, str, int]], text: Callable[[str], str]) -> Which:
    """Jobs by their primary keys."""
    listed = ",".join(f'[{rank:d},"{due_at}",{job:d}]' for rank, due_at, job in places)
    return Which(text(sql.BY_PLACES) % (f"[{listed}]", hexed(queue)), "PRIMARY", sql.at_places(hexed(queue), places))


def of_claim(request: Extend | Finish) -> str:
    """The condition for jobs whose last claim this is; whether it has expired is another thing."""
    return (
        f"j.queue = x'{hexed(request.name)}' AND j.fencing_token = {request.fencing_token:d} AND j.claim_id IS NOT NULL"
    )


def in_force(requests: Sequence[Extend | Finish], text: Callable[[str], str]) -> Which:
    """All jobs that these requests name and whose claims are in force."""
    every = {job for request in requests for job in request.ids}
    each = " OR ".join(f"{of_claim(request)} AND {among(request.ids)}" for request in requests)
    return by_ids(every, text, f"({each}) AND {sql.IN_FORCE}")


def is_plain(finish: Finish) -> bool:
    """Nothing of these jobs is kept."""
    return finish.end == DONE and finish.keep <= 0


def remove(finishes: Sequence[Finish], text: Callable[[str], str], execute: Execute) -> None:
    """Inside a transaction: end claims of which nothing is kept, all of them; NotAll."""
    jobs = [job for finish in finishes for job in finish.ids]
    if len(set(jobs)) < len(jobs) or execute(text(sql.REMOVE) % in_force(finishes, text).joined()).affected < len(jobs):
        raise NotAll


def ending(finish: Finish, which: Which, text: Callable[[str], str]) -> Generator[str, Any, Finished]:
    """The statements that end a claim on the jobs in ``which``, for a transaction."""
    which = which._replace(where=of_claim(finish))
    answer = yield text(sql.LOCK) % which.joined(sql.IN_FORCE)
    spent = {int(job): bool(int(max_tries)) and int(tries) >= int(max_tries) for job, tries, max_tries in answer.rows}
    live = [job for job in spent if finish.end == BACK or (finish.end == RETRY and not spent[job])]
    over = [job for job in spent if job not in live]
    changed = 0
    if live:
        those = which.listed(among(live))
        if finish.end == BACK:
            answer = yield text(sql.GIVE_BACK) % those
        else:
            delay = us(min(finish.delay, KEEP_MAX_S))
            answer = yield text(sql.TRY_AGAIN) % (those[0], literal(finish.note), delay, those[1])
        changed += answer.affected
    if over:
        those = which.joined(among(over))
        if finish.end != DONE:
            yield _kept(DEAD, those, text, error=literal(finish.note))
        elif finish.keep > 0:
            yield _kept(DONE, those, text, result=literal(finish.note), keep=finish.keep)
        answer = yield text(sql.REMOVE) % those
        changed += answer.affected
    if changed < len(spent):  # they were not locked: the connection is in no transaction
        return Finished(finish.ids)
    return Finished(tuple(job for job in finish.ids if job not in spent))


def run(statements: Generator[str, Any, Any], execute: Execute) -> Any:
    """Carry them out on dibs's own connection."""
    try:
        statement = next(statements)
        while True:
            statement = statements.send(execute(statement))
    except StopIteration as stop:
        return stop.value


def at_once(statement: str, why: str, execute: Execute) -> Answer:
    """Lock rows on dibs's own connection without waiting for them; RowBusy, saying ``why``, when others have them."""
    try:
        return execute(statement)
    except StoreBusy as error:
        raise RowBusy(why) from error


def end_all(finishes: Sequence[Finish], text: Callable[[str], str], execute: Execute) -> list[Finished]:
    """Inside a transaction: end claims in any way, each request by itself."""
    if len(finishes) > 1:  # all rows in one order, whichever request they are of
        execute(text(sql.LOCK) % in_force(finishes, text).joined())
    return [run(ending(finish, by_ids(finish.ids, text), text), execute) for finish in finishes]


def end_unless_locked(finishes: Sequence[Finish], text: Callable[[str], str], execute: Execute) -> list[Finished]:
    """The same; RowBusy when others have locked one of these jobs."""
    at_once(text(sql.LOCK_AT_ONCE) % in_force(finishes, text).joined(), JOB_LOCKED, execute)
    return end_all(finishes, text, execute)


def bury(ids: Sequence[int], text: Callable[[str], str], execute: Execute) -> None:
    """Inside a transaction: those of these jobs that are ready and have no tries left are dead."""
    spent = by_ids(ids, text, f"j.max_tries > 0 AND j.tries >= j.max_tries AND {sql.NOT_CLAIMED}")
    locked = [int(job or 0) for job, *_ in execute(text(sql.LOCK) % spent.joined()).rows]
    if locked:
        those = by_ids(locked, text).joined()
        error = f"IF(j.claim_id IS NULL, j.error, {literal(NO_TRIES_LEFT)})"
        execute(_kept(DEAD, those, text, error=error, crashes="j.crashes + (j.claim_id IS NOT NULL)"))
        execute(text(sql.REMOVE) % those)


def cancel(name: str, ids: Sequence[int], keep: float, text: Callable[[str], str], execute: Execute) -> list[int]:
    """Inside a transaction: end live jobs, whoever works them; which they were."""
    statement = text(sql.LOCK_AT_ONCE) % by_ids(ids, text, f"j.queue = x'{hexed(name)}'").joined()
    rows = at_once(statement, JOB_LOCKED, execute).rows
    locked = [int(job or 0) for job, *_ in rows]
    if locked:
        those = by_ids(locked, text).joined()
        if keep > 0:
            execute(_kept(CANCELLED, those, text, keep=keep))
        execute(text(sql.REMOVE) % those)
    return locked


def _kept(
    state: str,
    those: tuple[str, str],
    text: Callable[[str], str],
    *,
    error: str = "j.error",
    crashes: str = "j.crashes",
    result: str = "NULL",
    keep: float | None = None,
) -> str:
    until = "NULL" if keep is None else sql.KEEP_UNTIL % us(min(keep, KEEP_MAX_S))
    return text(sql.END) % (f"'{state}'", error, crashes, result, until, *those)


# -- what has ended ---------------------------------------------------------------------------------------------------


def revive(ids: Sequence[int], name: str, text: Callable[[str], str], execute: Execute) -> int:
    """Inside a transaction: make those of these jobs ready that are dead and whose keys no live job has; how many."""
    listed = ",".join(map(str, sorted(ids)))
    dead = [(int(job or 0), key) for job, key in execute(text(sql.DEAD) % listed).rows]
    keys = {f"x'{key.hex()}'" for _, key in dead if key is not None}
    taken: set[bytes | None] = set()
    if keys:
        statement = text(sql.LOCK_KEYS) % (hexed(name), ",".join(sorted(keys)))
        taken = {key for key, *_ in at_once(statement, KEY_LOCKED, execute).rows}
    chosen = []
    for job, key in dead:
        if key is None or key not in taken:
            chosen.append(job)
            taken.add(key)
    if chosen:
        listed = ",".join(map(str, chosen))
        execute(text(sql.REVIVE) % listed)
        execute(text(sql.FORGET) % listed)
    return len(chosen)
