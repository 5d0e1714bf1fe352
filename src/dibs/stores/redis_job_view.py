"""What people see of queues in Redis: how deep they are, and their jobs one by one."""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING
from dibs.jobs import CANCELLED, CLAIMED, DEAD, DONE, READY, Depth, StoredJob
from dibs.stores.redis_job_words import Row
from dibs.stores.redis_keys import beginning

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dibs.clock import Deadline
    from dibs.stores.redis_job_runs import JobRuns

# Rows, and payloads, that are read by one command.
ROWS_AT_ONCE = 500
JOBS_AT_ONCE = 50


def depths(runs: JobRuns, first: str, before: str, deadline: Deadline) -> list[Depth]:
    # Nothing lies between a name and the same with a control character: that is asked for by who wants this one.
    if before == first + "\x01":
        names = [first]
    else:
        names = sorted(n for n in runs.names(beginning(first, before), deadline) if first <= n < before)
    answers = runs.run([runs.calling("depth", name) for name in names], deadline) if names else []
    found = []
    for name, said in zip(names, answers, strict=True):
        if said:  # there are any jobs
            ready, later, claimed, dead, oldest = map(int, said)
            found.append(Depth(name, ready, later, claimed, dead, oldest / 1e6))
    return found


def find(runs: JobRuns, name: str, job: int, deadline: Deadline) -> StoredJob | None:
    now = _look(runs, name, deadline)
    shown = _shown(runs, name, [job], now, deadline)
    return shown[0] if shown else None


def jobs_in(runs: JobRuns, name: str, state: str, limit: int, deadline: Deadline) -> list[StoredJob]:
    now = _look(runs, name, deadline)
    if state in (DONE, DEAD, CANCELLED):
        key = runs.key(name, f":{state}")
        (ids,) = runs.ask(name, [("ZREVRANGE", key, "0", str(limit - 1))], deadline)
    elif state == CLAIMED:
        (ids,) = runs.ask(name, [("ZRANGE", runs.key(name, ":claimed"), "0", "-1")], deadline)
        ids = _first(runs, name, ids, limit, deadline)
    else:
        (priorities,) = runs.ask(name, [("ZRANGE", runs.key(name, ":priorities"), "0", "-1")], deadline)
        ids = []
        for priority in map(bytes.decode, priorities):
            keys = [runs.key(name, f":{kind}:{priority}") for kind in ("due", "parked")]
            span = ("-inf", str(now)) if state == READY else (f"({now}", "+inf")
            some = [("ZRANGEBYSCORE", key, *span, "LIMIT", "0", str(limit)) for key in keys]
            due, parked = runs.ask(name, some, deadline)
            ids += _first(runs, name, due + parked, limit, deadline) if parked else due
            if len(ids) >= limit:
                break
    shown = _shown(runs, name, list(map(int, ids[:limit])), now, deadline)
    return [job for job in shown if job.state == state]  # those that have not changed meanwhile


def _look(runs: JobRuns, name: str, deadline: Deadline) -> int:
    """Put in order what has expired; the time."""
    while True:
        ((now, more),) = runs.run([runs.calling("look", name)], deadline)
        if not more:
            return int(now)


def _first(runs: JobRuns, name: str, ids: Sequence[bytes], limit: int, deadline: Deadline) -> list[int]:
    """Those of these live jobs that are taken first."""
    rows = []
    for start in range(0, len(ids), ROWS_AT_ONCE):
        some = ids[start : start + ROWS_AT_ONCE]
        command = ("HMGET", runs.key(name, ":jobs"), *map(bytes.decode, some))
        (found,) = runs.ask(name, [command], deadline)
        rows += [Row(int(job), row) for job, row in zip(some, found, strict=True) if row is not None]
    return [row.id for row in sorted(rows, key=Row.order)[:limit]]


def _shown(runs: JobRuns, name: str, ids: Sequence[int], now: int, deadline: Deadline) -> list[StoredJob]:
    shown = []
    for start in range(0, len(ids), JOBS_AT_ONCE):
        some = ids[start : start + JOBS_AT_ONCE]
        fields = [f"{job}{part}" for job in some for part in ("", ":payload", ":error", ":result")]
        (found,) = runs.ask(name, [("HMGET", runs.key(name, ":jobs"), *fields)], deadline)
        for place, job in enumerate(some):
            row, *parts = found[4 * place : 4 * place + 4]
            if row is not None:
                shown.append(Row(job, row).shown(now, *parts))
    return shown
