"""Queues in Redis and Valkey: a hash of jobs a queue, sorted sets by when they are due, and one script to change them.

``redis_lua/jobs_rows.lua`` says how they are kept. All keys of a queue carry its name in braces, so they are in one
slot of a cluster, and nothing that is live has a time to live. The script carries out requests of one kind on one
queue; many of them in runs of about ``CHUNK_JOBS`` jobs, since Redis serves nobody else meanwhile. One request is one
run, however large, as it is all or nothing. A take claims what comes first in the sorted sets, at a cost that does not
depend on how many jobs there are, or were.

Ids and tokens are at least the server's time in microseconds. So they go on rising when data was lost, and what an old
worker says of a job that was forgotten is never taken for a word on a new one.
"""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any
from dibs.errors import InvalidOption, SetupRequired, StoreUnavailable
from dibs.jobs import (
    BACK,
    Extend,
    Extended,
    Finish,
    Finished,
    JobOutcome,
    JobRequest,
    KeyTaken,
    Put,
    PutDone,
    Take,
    Taken,
)
from dibs.store import Held
from dibs.stores import redis_job_view
from dibs.stores.redis_job_runs import JobRuns
from dibs.stores.redis_job_words import ids_in, micros, seconds_in, taken_in, text_in, word, words_of
from dibs.stores.redis_wire import refusal

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence

    from dibs.clock import Deadline
    from dibs.door import Answer, Said
    from dibs.jobs import Depth, StoredJob, WithinOutcome
    from dibs.stores.redis_keys import Keys
    from dibs.stores.redis_scripts import Flights

# Jobs that one run of the script serves, unless one request is about more: this many take about a millisecond.
CHUNK_JOBS = 100
KINDS: dict[type, str] = {Finish: "finish", Extend: "extend", Put: "put", Take: "take"}


class RedisJobs:
    def __init__(self, flights: Flights, keys: Keys, min_replicas: int) -> None:
        self._flights = flights
        self._runs = JobRuns(flights, keys, min_replicas)

    # -- the vector -----------------------------------------------------------------------------------------------

    def act(self, requests: Sequence[JobRequest], deadline: Deadline) -> list[JobOutcome]:
        outcomes: list[Any] = [None] * len(requests)
        left: Sequence[int] = range(len(requests))
        link, flown = self._flights.link, set[Any]()
        while left:
            chunks = list(_chunks(requests, left))
            calls = (
                self._runs.calling(kind, name, _words([requests[index] for index in indexes]))
                for kind, name, indexes in chunks
            )
            again: list[int] = []
            for (_, _, indexes), answers in zip(chunks, self._runs.run(calls, deadline), strict=True):
                for index, said in zip(indexes, answers, strict=True):
                    if said == b"A":  # there was so much to put in order that others should be served in between
                        again.append(index)
                    else:
                        outcomes[index] = self._outcome(requests[index], said)
            left = again
            flown |= link.flown
        if requests:
            link.flown |= flown
            self._settle(requests, outcomes, deadline)
        return outcomes

    def _settle(self, requests: Sequence[JobRequest], outcomes: Sequence[Any], deadline: Deadline) -> None:
        """Go on when enough replicas have it; else give back what was taken, and nothing is known of the rest."""
        try:
            self._runs.settle(deadline)
        except StoreUnavailable:
            back: list[JobRequest] = [
                Finish(request.name, tuple(job.id for job in outcome.jobs), outcome.fencing_token, BACK)
                for request, outcome in zip(requests, outcomes, strict=True)
                if isinstance(outcome, Taken)
            ]
            self._runs.run([self._runs.calling("finish", one.name, _words([one])) for one in back], deadline)
            raise

    def _outcome(self, request: JobRequest, said: Any) -> Any:
        if isinstance(said, list):
            return taken_in(said)
        if said[:2] == b"E ":
            return self._refused(request, said)
        if isinstance(request, Put):
            if said[:1] == b"P":
                return PutDone(ids_in(said[2:]))
            _, claimed, job, key = said.split(b" ", 3)
            return KeyTaken(text_in(key) or "", int(job), claimed == b"1")
        if isinstance(request, Take):
            return Held(None, 0, 0.0, float("inf") if said == b"H -" else seconds_in(said[2:]))
        if isinstance(request, Extend):
            expires, *gone = said.split()
            return Extended(seconds_in(expires), tuple(map(int, gone)))
        return Finished(tuple(map(int, said.split())))

    def _refused(self, request: JobRequest, said: bytes) -> Exception:
        """What became of a request that failed by itself."""
        error = refusal(said[2:])
        if error.code == "OOM":
            return StoreUnavailable(
                f"Redis is out of memory and takes no new job into {request.name!r}: {error.text}", maybe_applied=False
            )
        if error.code == "WRONGTYPE":
            return SetupRequired(
                f"a key of the queue {request.name!r} holds something that is not dibs's: {error.text}"
            )
        raise self._flights.failure(error, maybe_applied=True, in_script=True)

    def within(
        self, request: Put | Finish, dialect: str, files: Sequence[tuple[Any, ...]] | None, deadline: Deadline
    ) -> Generator[Said, Answer, WithinOutcome]:
        queue = request.name.partition(":")[2]
        raise InvalidOption(
            f"the jobs of {queue!r} are kept in Redis, which is in no transaction of this connection: "
            "leave connection= out, or keep the queue in the database that the connection is to"
        )
        yield  # a generator all the same

    # -- see and mend ---------------------------------------------------------------------------------------------

    def depths(self, first: str, before: str, deadline: Deadline) -> list[Depth]:
        return redis_job_view.depths(self._runs, first, before, deadline)

    def jobs_in(self, name: str, state: str, limit: int, deadline: Deadline) -> list[StoredJob]:
        return redis_job_view.jobs_in(self._runs, name, state, limit, deadline)

    def find(self, name: str, job: int, deadline: Deadline) -> StoredJob | None:
        return redis_job_view.find(self._runs, name, job, deadline)

    def cancel(self, name: str, ids: Sequence[int], keep: float, deadline: Deadline) -> list[int]:
        answers = self._mend("cancel", name, (micros(keep),), ids, deadline)
        return [int(job) for some in answers for job in some]

    def revive(self, name: str, ids: Sequence[int] | None, deadline: Deadline) -> int:
        if ids is None:
            ids = self._ended(name, (":dead",), deadline)
        return sum(self._mend("revive", name, (), sorted(ids), deadline))

    def forget(self, name: str, ids: Sequence[int] | None, older_than: float, deadline: Deadline) -> int:
        if ids is None:
            ids = self._ended(name, (":done", ":dead", ":cancelled"), deadline)
        return sum(self._mend("forget", name, (micros(older_than),), ids, deadline))

    def schema(self) -> str:
        return (
            f"# Of a queue, dibs keeps {self._runs.key('name')} and the same with :jobs, :due:0 and so on behind it.\n"
        )

    def _ended(self, name: str, kinds: Iterable[str], deadline: Deadline) -> list[int]:
        asked = [("ZRANGE", self._runs.key(name, kind), "0", "-1") for kind in kinds]
        return [int(job) for some in self._runs.ask(name, asked, deadline) for job in some]

    def _mend(self, verb: str, name: str, words: tuple[str, ...], ids: Sequence[int], deadline: Deadline) -> list[Any]:
        if not ids:
            return []
        calls = [self._runs.calling(verb, name, (*words, *some)) for some in self._runs.chunks(ids, CHUNK_JOBS)]
        answers = self._runs.run(calls, deadline)
        self._runs.settle(deadline)
        return answers


def _chunks(requests: Sequence[JobRequest], indexes: Iterable[int]) -> Iterator[tuple[str, str, list[int]]]:
    """The requests by kind and queue, in their order, as one run of the script takes them."""
    groups: dict[tuple[type, str], list[int]] = {}
    for index in indexes:
        request = requests[index]
        groups.setdefault((type(request), request.name), []).append(index)
    for type_, kind in KINDS.items():
        for (of, name), these in groups.items():
            if of is not type_:
                continue
            chunk: list[int] = []
            jobs = 0
            for index in these:
                size = _size(requests[index])
                if chunk and jobs + size > CHUNK_JOBS:
                    yield kind, name, chunk
                    chunk, jobs = [], 0
                chunk.append(index)
                jobs += size
            yield kind, name, chunk


def _size(request: JobRequest) -> int:
    if isinstance(request, Put):
        return len(request.jobs)
    return request.n if isinstance(request, Take) else len(request.ids)


def _words(requests: Sequence[JobRequest]) -> Iterator[str | bytes]:
    """What the script is told of requests of one kind."""
    for request in requests:
        if isinstance(request, Put):
            yield from (word(request.put_id), request.on_conflict, str(len(request.jobs)))
            yield from words_of(request.jobs)
        elif isinstance(request, Take):
            yield from (word(request.claim_id), micros(request.ttl), str(request.n))
            yield from (word(request.holder), str(request.group_limit))
        else:
            yield str(request.fencing_token)
            if isinstance(request, Finish):
                yield from (request.end, micros(request.delay), micros(request.keep))
                yield "" if request.note is None else "=" + request.note
            else:
                yield micros(request.ttl)
            yield str(len(request.ids))
            yield from map(str, request.ids)
