"""What the cases on stores that keep queues work with: one queue of the store under test, and what it answers."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from functools import partial

from dibs._typing import TYPE_CHECKING, Any, cast
from dibs.clock import Deadline
from dibs.jobs import DONE, Extend, Extended, Finish, Finished, NewJob, Put, PutDone, Take, Taken
from dibs.store import Held, RowBusy
from dibs.testing.case import STORE_CASES, Bench, claims, equal, queues, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from dibs.jobs import Depth, JobRequest, Jobs, JobStore, StoredJob
    from dibs.testing.case import Connection


case = partial(STORE_CASES.case, promised=queues)


class Queue:
    """One queue of the store under test, over one connection."""

    def __init__(self, bench: Bench, name: str | None = None, connection: Connection | None = None) -> None:
        self.bench = bench
        self.connection = connection or bench.open()
        self.name = bench.name() if name is None else name
        self.jobs: Jobs = cast("JobStore", self.connection.store).jobs

    def elsewhere(self) -> Queue:
        """The same queue over another connection."""
        return Queue(self.bench, self.name)

    def act(self, *requests: JobRequest) -> list[Any]:
        outcomes: list[Any] = self._patiently(lambda deadline: self.jobs.act(requests, deadline))
        equal(len(outcomes), len(requests), "outcomes of one call")
        for place, outcome in enumerate(outcomes):
            if isinstance(outcome, RowBusy):  # it alone was not carried out; as clients do, it is asked for again
                outcomes[place] = self._patiently(partial(self._act_alone, requests[place]))
        return outcomes

    def _act_alone(self, request: JobRequest, deadline: Deadline) -> Any:
        (outcome,) = self.jobs.act([request], deadline)
        if isinstance(outcome, RowBusy):
            raise outcome
        return outcome

    def _patiently(self, act: Callable[[Deadline], Any]) -> Any:
        return self.connection._patiently(act)

    def put(self, *jobs: NewJob | str | bytes, on_conflict: str = "raise", put_id: str | None = None) -> list[int]:
        """Put jobs that must be taken in; their ids."""
        outcome = self.try_put(*jobs, on_conflict=on_conflict, put_id=put_id)
        assert isinstance(outcome, PutDone), f"a put was refused: {outcome}"
        return list(outcome.ids)

    def try_put(self, *jobs: NewJob | str | bytes, on_conflict: str = "raise", put_id: str | None = None) -> Any:
        new = tuple(job if isinstance(job, NewJob) else NewJob(job) for job in jobs)
        return self.act(Put(self.name, put_id or os.urandom(8).hex(), new, on_conflict))[0]

    def take(self, n: int = 1, ttl: float = 60, *, claim: str | None = None, group_limit: int = 0) -> Taken | Held:
        """What a take is told, whatever it is."""
        claim = claim or claims(1)[0]
        outcome: Taken | Held = self.act(Take(self.name, claim, n, ttl, f"host/{claim[:12]}", group_limit))[0]
        return outcome

    def taken(self, n: int = 1, ttl: float = 60, **options: Any) -> Taken:
        """What is taken, of which there must be something."""
        outcome = self.take(n, ttl, **options)
        assert isinstance(outcome, Taken), f"nothing was to be had: {outcome}; {self.depth()}"
        return outcome

    def until_taken(self, what: str, **options: Any) -> Taken:
        """Ask until there is something, as when a claim is to expire."""

        def attempt() -> Taken | None:
            outcome = self.take(**options)
            return outcome if isinstance(outcome, Taken) else None

        return until(attempt, what)

    def finish(self, taken: Taken, end: str = DONE, ids: Sequence[int] | None = None, **fields: Any) -> Finished:
        of_all = tuple(job.id for job in taken.jobs)
        request = Finish(self.name, of_all if ids is None else tuple(ids), taken.fencing_token, end, **fields)
        outcome: Finished = self.act(request)[0]
        return outcome

    def extend(self, taken: Taken, ttl: float = 60) -> Extended:
        outcome: Extended = self.act(Extend(self.name, ids(taken), taken.fencing_token, ttl))[0]
        return outcome

    def job(self, job: int) -> StoredJob:
        found = self.found(job)
        assert found is not None, f"job {job} is not in the store"
        return found

    def found(self, job: int) -> StoredJob | None:
        found: StoredJob | None = self._patiently(lambda deadline: self.jobs.find(self.name, job, deadline))
        return found

    def jobs_in(self, state: str, limit: int = 100) -> list[StoredJob]:
        found: list[StoredJob] = self._patiently(lambda deadline: self.jobs.jobs_in(self.name, state, limit, deadline))
        return found

    def depth(self) -> Depth | None:
        found: list[Depth] = self._patiently(lambda deadline: self.jobs.depths(self.name, self.name + "\x01", deadline))
        equal([depth.name for depth in found][:1], [self.name] if found else [], "whose depth is told")
        return found[0] if found else None

    def counts(self) -> tuple[int, int, int, int]:
        """Ready, later, claimed, dead."""
        depth = self.depth()
        return (0, 0, 0, 0) if depth is None else depth[1:5]

    def cancel(self, *of: int, keep: float = 0.0) -> list[int]:
        cancelled: list[int] = self._patiently(lambda deadline: self.jobs.cancel(self.name, of, keep, deadline))
        return cancelled

    def revive(self, *of: int) -> int:
        revived: int = self._patiently(lambda deadline: self.jobs.revive(self.name, of or None, deadline))
        return revived

    def forget(self, *of: int, older_than: float = 0.0) -> int:
        forgotten: int = self._patiently(lambda deadline: self.jobs.forget(self.name, of or None, older_than, deadline))
        return forgotten

    def payloads(self, n: int = 100, **options: Any) -> list[str | bytes]:
        outcome = self.take(n, **options)
        return [job.payload for job in outcome.jobs] if isinstance(outcome, Taken) else []


@contextmanager
def listening(queue: Queue) -> Iterator[Callable[[str], AbstractContextManager[None]]]:
    """Gives what is put around an act: where the store has hints, whoever watches for the queue is sent one by it."""
    watch = queue.bench.open().watch(claims(1)[0].partition("-")[0])

    @contextmanager
    def told(what: str) -> Iterator[None]:
        if watch is None:
            yield
            return
        time.sleep(0.05)  # so that it is not taken for what was told before
        list(watch.changed([queue.name]))
        yield
        until(lambda: queue.name in watch.changed([queue.name]), f"the watch was not told of {what}")

    try:
        yield told
    finally:
        if watch is not None:
            watch.close()


def ids(taken: Taken) -> tuple[int, ...]:
    return tuple(job.id for job in taken.jobs)


def payloads(taken: Taken) -> list[str | bytes]:
    return [job.payload for job in taken.jobs]


def nothing(outcome: object, what: str) -> Held:
    assert isinstance(outcome, Held), f"{what}: {outcome}"
    return outcome
