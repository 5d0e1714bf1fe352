"""The executable specification of queues: what every store answers about jobs, in as few words as possible."""

from __future__ import annotations

from dibs._typing import TYPE_CHECKING, Any
from dibs.errors import InvalidOption
from dibs.jobs import (
    BACK,
    CANCELLED,
    CLAIMED,
    CRASHES_MAX,
    DEAD,
    DONE,
    KEEP,
    LATER,
    NO_TRIES_LEFT,
    NOTHING_CLAIMED,
    READY,
    REPLACE,
    RETRY,
    Depth,
    Extend,
    Extended,
    Finish,
    Finished,
    JobOutcome,
    JobRequest,
    KeyTaken,
    Put,
    PutDone,
    StoredJob,
    Take,
    Taken,
    TakenJob,
)
from dibs.store import Held
from dibs.stores.memory_forks import alone

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from dibs.clock import Deadline
    from dibs.door import Answer, Said
    from dibs.jobs import WithinOutcome
    from dibs.stores.memory import Shelf


class Job:
    """A row. ``claim_id`` is None while nobody has claimed it since it was put, tried, or given back."""

    def __init__(self, job: int, request: Put, place: int, now: float, wall_offset: float) -> None:
        self.id = job
        self.name = request.name
        self.created_at = now
        self.tries = self.crashes = self.fencing_token = 0
        self.claimed_at = 0.0
        self.claim_id: str | None = None
        self.holder: str | None = None
        self.expires_at: float | None = None
        self.error: str | None = None
        self.result: str | None = None
        self.ended: str | None = None
        self.ended_at = self.keep_until = 0.0
        self.be(request, place, now, wall_offset)

    def be(self, request: Put, place: int, now: float, wall_offset: float) -> None:
        """Become what was put."""
        new = request.jobs[place]
        self.put_id, self.put_place = request.put_id, place
        self.payload, self.priority, self.key, self.group = new.payload, new.priority, new.key, new.group
        self.max_tries = new.max_tries
        self.due_at = now + new.delay if new.at is None else new.at - wall_offset

    def state(self, now: float) -> str:
        if self.ended is not None:
            return self.ended
        if self.claim_id is not None and self.expires_at is not None and self.expires_at > now:
            return CLAIMED
        return READY if self.due_at <= now else LATER

    def order(self) -> tuple[float, float, int]:
        return -self.priority, self.due_at, self.id

    def end(self, state: str, now: float, keep: float) -> None:
        self.ended, self.ended_at, self.claim_id = state, now, None
        self.keep_until = float("inf") if state == DEAD else now + keep


class MemoryJobs:
    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    @alone
    def act(self, requests: Sequence[JobRequest], deadline: Deadline) -> list[JobOutcome]:
        outcomes: dict[int, JobOutcome] = {}
        now = self._shelf.now()
        verbs: list[tuple[type, Any]] = [(Finish, self._finish), (Extend, self._extend), (Put, self._put)]
        for kind, verb in (*verbs, (Take, self._take)):
            for place, request in enumerate(requests):
                if type(request) is kind:
                    outcomes[place] = verb(request, now)
        self._shelf.changes += 1
        return [outcomes[place] for place in range(len(requests))]

    def within(
        self, request: Put | Finish, dialect: str, files: Sequence[tuple[Any, ...]] | None, deadline: Deadline
    ) -> Generator[Said, Answer, WithinOutcome]:
        raise InvalidOption("jobs are kept in the memory of this process, which is in no transaction")
        yield  # a generator all the same

    # -- the vector -----------------------------------------------------------------------------------------------

    def _put(self, request: Put, now: float) -> PutDone | KeyTaken:
        jobs = self._shelf.jobs
        live = {job.key: job for job in self._live(request.name) if job.key is not None}
        put = [job for job in jobs.values() if (job.name, job.put_id) == (request.name, request.put_id)]
        if put:  # repeated, since the answer was lost
            known = {job.put_place: job.id for job in put}
            if request.on_conflict == KEEP:
                known = {place: live[new.key].id for place, new in enumerate(request.jobs) if new.key in live} | known
            return PutDone(tuple(known[place] for place in sorted(known)))
        for new in request.jobs:
            found = live.get(new.key or "")
            if found is None or request.on_conflict == KEEP:
                continue
            claimed = found.state(now) == CLAIMED
            if request.on_conflict != REPLACE or claimed:
                return KeyTaken(found.key or "", found.id, claimed)
        ids = []
        for place, new in enumerate(request.jobs):
            job = live.get(new.key or "")
            if job is None:
                self._shelf.last_job += 1
                job = Job(self._shelf.last_job, request, place, now, self._shelf.wall_offset)
                jobs[job.id] = job
            elif request.on_conflict == REPLACE:
                job.be(request, place, now, self._shelf.wall_offset)
                job.tries = job.crashes = 0
                job.claim_id = job.error = None
            ids.append(job.id)
        return PutDone(tuple(ids))

    def _take(self, request: Take, now: float) -> Taken | Held:
        live = sorted(self._live(request.name), key=Job.order)
        mine = [job for job in live if job.claim_id == request.claim_id and job.state(now) == CLAIMED]
        if mine:
            for job in mine:
                job.expires_at = max(job.expires_at or now, now + request.ttl)
            return self._taken(mine)
        if not request.n:
            return NOTHING_CLAIMED
        chosen: list[Job] = []
        for job in live:
            if job.state(now) != READY or len(chosen) == request.n:
                continue
            if not self._has_its_turn(job, request.group_limit, chosen, now):
                continue
            crashed = job.claim_id is not None
            crashes = job.crashes + crashed
            if job.max_tries and job.tries >= job.max_tries:
                job.crashes, job.error = crashes, NO_TRIES_LEFT if crashed else job.error
                job.end(DEAD, now, 0)
            elif crashes < CRASHES_MAX:
                chosen.append(job)
            elif not chosen:
                chosen.append(job)
                break
        token = max((job.fencing_token for job in chosen), default=0) + 1
        for job in chosen:
            job.crashes += job.claim_id is not None
            job.tries += 1
            job.fencing_token, job.claim_id, job.holder = token, request.claim_id, request.holder
            job.claimed_at, job.expires_at = now, now + request.ttl
        return self._taken(chosen) if chosen else Held(None, 0, 0.0, self._next_in(request.name, now))

    def _taken(self, jobs: list[Job]) -> Taken:
        offset = self._shelf.wall_offset
        told = tuple(
            TakenJob(j.id, j.payload, j.tries, j.max_tries, j.crashes, j.created_at + offset, j.key, j.group)
            for j in jobs
        )
        return Taken(jobs[0].fencing_token, jobs[0].claimed_at + offset, told)

    def _has_its_turn(self, job: Job, group_limit: int, chosen: Sequence[Job], now: float) -> bool:
        if not group_limit or job.group is None:
            return True
        others = [other for other in self._live(job.name) if other.group == job.group and other is not job]
        before = sum(other.id < job.id for other in others)
        worked = sum(other in chosen or other.state(now) == CLAIMED for other in others)
        return before < group_limit and worked < group_limit

    def _next_in(self, name: str, now: float) -> float:
        # What is ready and was not taken waits for others of its group.
        states = ((job.state(now), job) for job in self._live(name))
        times = (job.expires_at if state == CLAIMED else job.due_at for state, job in states if state != READY)
        return min((max(0.0, at - now) for at in times if at is not None), default=float("inf"))

    def _claimed(self, request: Extend | Finish, now: float) -> Iterator[Job]:
        for job in map(self._shelf.jobs.get, dict.fromkeys(request.ids)):
            if job is None or (job.name, job.fencing_token) != (request.name, request.fencing_token):
                continue
            if job.state(now) == CLAIMED:
                yield job

    def _extend(self, request: Extend, now: float) -> Extended:
        found = list(self._claimed(request, now))
        for job in found:
            job.expires_at = max(job.expires_at or now, now + request.ttl)
        return Extended(now + request.ttl + self._shelf.wall_offset, _others(request.ids, found))

    def _finish(self, request: Finish, now: float) -> Finished:
        found = list(self._claimed(request, now))
        for job in found:
            job.claim_id = None
            if request.end == BACK:
                job.tries -= 1
            elif request.end == DONE:
                job.result = request.note
                self._end(job, DONE, now, request.keep)
            else:
                job.error = request.note
                if request.end == RETRY and not (job.max_tries and job.tries >= job.max_tries):
                    job.due_at = now + request.delay
                else:
                    self._end(job, DEAD, now, 0)
        return Finished(_others(request.ids, found))

    def _end(self, job: Job, state: str, now: float, keep: float) -> None:
        job.end(state, now, keep)
        for old in [old.id for old in self._shelf.jobs.values() if old.ended is not None and old.keep_until <= now]:
            del self._shelf.jobs[old]

    # -- see and mend ---------------------------------------------------------------------------------------------

    @alone
    def depths(self, first: str, before: str, deadline: Deadline) -> list[Depth]:
        now = self._shelf.now()
        depths = []
        for name in sorted({job.name for job in self._shelf.jobs.values() if first <= job.name < before}):
            states = [(job.state(now), job.due_at) for job in self._shelf.jobs.values() if job.name == name]
            count = [state for state, _ in states].count
            oldest = max((now - due for state, due in states if state == READY), default=0.0)
            depths.append(Depth(name, count(READY), count(LATER), count(CLAIMED), count(DEAD), oldest))
        return depths

    @alone
    def jobs_in(self, name: str, state: str, limit: int, deadline: Deadline) -> list[StoredJob]:
        now = self._shelf.now()
        found = [job for job in self._shelf.jobs.values() if job.name == name and job.state(now) == state]
        found.sort(key=lambda job: (-job.ended_at, -job.id) if job.ended is not None else job.order())
        return [self._shown(job, now) for job in found[:limit]]

    def find(self, name: str, job: int, deadline: Deadline) -> StoredJob | None:
        with self._shelf.mutex:
            found = self._shelf.jobs.get(job)
            return None if found is None or found.name != name else self._shown(found, self._shelf.now())

    def _shown(self, job: Job, now: float) -> StoredJob:
        offset = self._shelf.wall_offset
        return StoredJob(
            job.id,
            job.state(now),
            job.payload,
            job.priority,
            job.tries,
            job.max_tries,
            job.crashes,
            job.fencing_token,
            job.created_at + offset,
            job.due_at + offset,
            job.key,
            job.group,
            job.holder,
            None if job.expires_at is None else job.expires_at + offset,
            job.error,
            job.result,
            None if job.ended is None else job.ended_at + offset,
        )

    @alone
    def cancel(self, name: str, ids: Sequence[int], keep: float, deadline: Deadline) -> list[int]:
        now = self._shelf.now()
        cancelled = [job for job in self._live(name) if job.id in ids]
        for job in cancelled:
            self._end(job, CANCELLED, now, keep)
        self._shelf.changes += 1
        return [job.id for job in cancelled]

    def revive(self, name: str, ids: Sequence[int] | None, deadline: Deadline) -> int:
        with self._shelf.mutex:
            now, revived = self._shelf.now(), 0
            for job in sorted(self._shelf.jobs.values(), key=lambda job: job.id):
                if job.name != name or job.ended != DEAD or (ids is not None and job.id not in ids):
                    continue
                if job.key is not None and job.key in [other.key for other in self._live(name)]:
                    continue
                job.ended, job.tries, job.crashes, job.due_at = None, 0, 0, now
                revived += 1
            self._shelf.changes += 1
            return revived

    @alone
    def forget(self, name: str, ids: Sequence[int] | None, older_than: float, deadline: Deadline) -> int:
        before = self._shelf.now() - older_than
        ended = [job for job in self._shelf.jobs.values() if job.name == name and job.ended is not None]
        old = [job for job in ended if job.ended_at <= before and (ids is None or job.id in ids)]
        for job in old:
            del self._shelf.jobs[job.id]
        return len(old)

    def schema(self) -> str:
        return ""

    def _live(self, name: str) -> Iterator[Job]:
        return (job for job in self._shelf.jobs.values() if job.name == name and job.ended is None)


def _others(ids: Sequence[int], found: Sequence[Job]) -> tuple[int, ...]:
    known = {job.id for job in found}
    return tuple(job for job in ids if job not in known)
