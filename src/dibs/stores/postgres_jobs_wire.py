"""Jobs as PostgreSQL takes and gives them: columns of puts and ends as parameters, rows as the contract has them."""

from __future__ import annotations

from struct import Struct

from dibs._typing import TYPE_CHECKING, Any, NamedTuple
from dibs.jobs import BACK, DEAD, DONE, RETRY, StoredJob, Taken, TakenJob
from dibs.stores.postgres_wire import EPOCH_S, float8, instant, integer, numbers, plain, text, texts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from psycopg.pq.abc import PGresult

    from dibs.jobs import Extend, Finish, NewJob, Put

    Parameters = tuple[bytes | None, ...]

# -- parameters -------------------------------------------------------------------------------------------------------


def _unless(usual: object, values: list[Any], array: Callable[[list[Any]], bytes] = numbers) -> bytes:
    """An array, or one without elements if all of them are as usual."""
    return b"{}" if values.count(usual) == len(values) else array(values)


def _bytes(values: Iterable[bytes | None]) -> bytes:
    return b"{" + b",".join(b"NULL" if v is None else b'"\\\\x' + v.hex().encode() + b'"' for v in values) + b"}"


def _columns(jobs: Sequence[NewJob]) -> Parameters:
    """What is asked of each job, besides its key and put. One array at least is as long as there are jobs."""
    payloads = [job.payload for job in jobs]
    strings: list[Any] = [payload if isinstance(payload, str) else None for payload in payloads]
    raw: list[Any] = [None if isinstance(payload, str) else payload for payload in payloads]
    return (
        _unless(None, strings, texts),
        _unless(None, raw, _bytes),
        _unless(0, [job.priority for job in jobs]),
        _unless(0.0, [job.delay for job in jobs]),
        _unless(None, [job.at for job in jobs]),
        _unless(None, [job.group for job in jobs], texts),
        _unless(0, [job.max_tries for job in jobs]),
    )


def put_id(one: Put) -> str:
    """What a put is told by: its id counts within its queue."""
    return f"{one.put_id} {one.name}"


def put(puts: Sequence[Put]) -> Parameters:
    """The parameters of PUT for puts whose jobs have no keys."""
    which: list[int] = []
    starts = []
    for number, one in enumerate(puts, 1):
        starts.append(len(which))
        which += [number] * len(one.jobs)
    return (
        texts([put_id(one) for one in puts]),
        texts([one.name for one in puts]),
        numbers(starts),
        _unless(1, which),
        *_columns([job for one in puts for job in one.jobs]),
    )


def put_keyed(one: Put) -> Parameters:
    """The parameters of PUT_RAISE, PUT_KEEP and PUT_REPLACE."""
    return put_id(one).encode(), one.name.encode(), texts([job.key for job in one.jobs]), *_columns(one.jobs)


def ids(jobs: Sequence[int] | None) -> bytes | None:
    return None if jobs is None else ("{" + ",".join(map(str, jobs)) + "}").encode()


def verb_of(request: Finish) -> str:
    """The statement that ends it so."""
    if request.end == DONE:
        return "KEEP" if request.keep > 0 else "DONE"
    return {RETRY: "RETRY", BACK: "BACK", DEAD: "DEAD"}[request.end]


def finish(request: Finish, jobs: Sequence[int]) -> Parameters:
    """The parameters of that statement for these jobs."""
    which = request.name.encode(), ids(jobs), b"%d" % request.fencing_token
    verb = verb_of(request)
    if verb == "RETRY":
        return *which, plain(request.note), b"%r" % request.delay
    if verb == "KEEP":
        return *which, DONE.encode(), plain(request.note), b"%r" % request.keep
    if verb == "DEAD":
        return *which, DEAD.encode(), plain(request.note), None
    return which


def extend(request: Extend, jobs: Sequence[int]) -> Parameters:
    """The parameters of EXTEND for these jobs."""
    return request.name.encode(), ids(jobs), b"%d" % request.fencing_token, b"%r" % request.ttl


# -- answers ----------------------------------------------------------------------------------------------------------


class Claimed(NamedTuple):
    """The columns that TAKE and MINE tell as one value."""

    id: int
    fencing_token: int
    tries: int
    max_tries: int
    crashes: int
    created_at: int
    claimed_at: int
    rank: int
    due_at: int


# On the wire a row is the number of its columns and, for each, its type, length and value.
_CLAIMED = Struct("!4x8xq8xq8xi8xi8xi8xq8xq8xi8xq")
_ONE_ID = Struct("!4x8xq")
_LOOKED = Struct("!4x8xi")
_UNTOLD = Struct("!4x8x?")


class PriorityUntold(Exception):
    """There are jobs of a priority that the take was not told of, so it took none."""


def claimed(result: PGresult) -> tuple[list[tuple[Claimed, int]], list[int]]:
    """What was claimed, in its order, with the numbers of the rows; and the ids of jobs without tries left."""
    get = result.get_value
    rows: list[tuple[Claimed, int]] = []
    exhausted: list[int] = []
    for r in range(result.ntuples):
        fixed: Any = get(r, 0)
        if len(fixed) == _CLAIMED.size:
            rows.append((Claimed._make(_CLAIMED.unpack(fixed)), r))
        elif len(fixed) == _ONE_ID.size:
            exhausted += _ONE_ID.unpack(fixed)
    rows.sort(key=_order)
    return rows, exhausted


def check_told(result: PGresult) -> None:
    """Raise PriorityUntold if that is what a take tells."""
    last = result.ntuples - 1
    if last >= 0 and len(result.get_value(last, 0) or b"") == _UNTOLD.size:
        raise PriorityUntold


def looked_in_vain(result: PGresult) -> int | None:
    """How many jobs a take with a limit looked at, if none of them had its turn."""
    fixed: Any = result.get_value(0, 0)
    return _LOOKED.unpack(fixed)[0] if len(fixed) == _LOOKED.size else None


def took_s(result: PGresult) -> float:
    """How long a take took the server, if it tells anything; one that only found jobs without tries left does not."""
    return float8(result.get_value(0, 5)) if result.ntuples else 0.0


def _order(row: tuple[Claimed, int]) -> tuple[int, int, int]:
    job = row[0]
    return job.rank, job.due_at, job.id


def taken(result: PGresult, rows: list[tuple[Claimed, int]]) -> Taken:
    """The answer to a take that claimed these."""
    get, jobs = result.get_value, []
    for job, r in rows:
        payload, key, group = get(r, 1), get(r, 3), get(r, 4)
        jobs.append(
            TakenJob(
                job.id,
                (get(r, 2) or b"") if payload is None else payload.decode(),
                job.tries,
                job.max_tries,
                job.crashes,
                job.created_at / 1e6 + EPOCH_S,
                None if key is None else key.decode(),
                None if group is None else group.decode(),
            )
        )
    first = rows[0][0]
    return Taken(first.fencing_token, first.claimed_at / 1e6 + EPOCH_S, tuple(jobs))


def stored_jobs(result: PGresult) -> list[StoredJob]:
    """The rows of LIST_LIVE, LIST_ENDED and FIND."""
    get, jobs = result.get_value, []
    for r in range(result.ntuples):
        payload, expires, ended = get(r, 2), get(r, 14), get(r, 17)
        jobs.append(
            StoredJob(
                integer(get(r, 0)),
                text(get(r, 1)) or "",
                (get(r, 3) or b"") if payload is None else payload.decode(),
                integer(get(r, 4)),
                integer(get(r, 5)),
                integer(get(r, 6)),
                integer(get(r, 7)),
                integer(get(r, 8)),
                instant(get(r, 9)),
                instant(get(r, 10)),
                text(get(r, 11)),
                text(get(r, 12)),
                text(get(r, 13)),
                None if expires is None else instant(expires),
                text(get(r, 15)),
                text(get(r, 16)),
                None if ended is None else instant(ended),
            )
        )
    return jobs
