"""Queues under any sequence of acts: every store that keeps them answers as the memory store does.

Ids and tokens are compared by what they belong to; their values differ. Claims are long, or are left to run out at
once, so that no answer depends on how fast a store is.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from dibs.clock import Deadline, RealClock
from dibs.connecting import locate
from dibs.jobs import (
    BACK,
    CLAIMED,
    CRASHES_MAX,
    DEAD,
    DONE,
    ENDS,
    KEEP,
    LOOK_BACK_S,
    NO_TRIES_LEFT,
    RAISE,
    READY,
    REPLACE,
    RETRY,
    STATES,
    Extend,
    Finish,
    NewJob,
    Put,
    PutDone,
    StoredJob,
    Take,
    Taken,
)
from dibs.store import Held, StoreBusy
from dibs.stores.memory import Shelf
from dibs.stores.memory_jobs import Job, MemoryJobs

CLOCK = RealClock()
LONG_S = 3600.0
SHORT_S = 0.06
#: So far apart are two acts that no store takes them for one moment.
APART_S = 0.002
NOTES = {DONE: '{"rows":1}', DEAD: "too old", RETRY: "refused", BACK: None}

some_jobs: st.SearchStrategy[list[dict[str, Any]]] = st.lists(
    st.fixed_dictionaries(
        {
            "priority": st.sampled_from([0, 0, 0, 1, -1]),
            "delay": st.sampled_from([0.0, 0.0, 0.0, LONG_S]),
            "key": st.sampled_from([None, None, "k", "l", "m"]),
            "group": st.sampled_from([None, "g", "h"]),
            "max_tries": st.sampled_from([0, 0, 1, 2]),
        }
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda job: job["key"] or object(),
)
some_places = st.lists(st.integers(0, 30), min_size=1, max_size=3)
limits = st.sampled_from([0, 0, 1, 2])
amounts = st.sampled_from([1, 2, 5])


def deadline() -> Deadline:
    return Deadline(CLOCK, CLOCK.now() + 10)


class Claim(NamedTuple):
    """What was taken once: the tokens of both stores, and our ids."""

    request: Take
    ours: int
    theirs: int
    ids: tuple[int, ...]


class JobComparison(RuleBasedStateMachine):
    """One store beside the memory store: the same acts must have the same outcomes, and leave the same jobs."""

    open_store: Callable[[], Any]
    serial = itertools.count()
    #: Whether each take looks through the queue from its beginning, as a store does that is new.
    anew = True
    #: Whether jobs of one put stand in its order, also where one of them replaces another.
    ordered = True

    @initialize()
    def begin(self) -> None:
        self.queue = f"machine{os.getpid()}-{next(self.serial)}"
        self.shelf = Shelf()
        self.ours = MemoryJobs(self.shelf)
        self.theirs = type(self).open_store()
        self.numbers = itertools.count(1)
        #: Ours: theirs.
        self.ids: dict[int, int] = {}
        self.puts: list[Put] = []
        self.claims: list[Claim] = []
        self.told: list[Any] = []
        self.over = False

    def teardown(self) -> None:
        if hasattr(self, "theirs"):
            self.theirs.close()

    # -- both stores at once --------------------------------------------------------------------------------------

    def them(self, act: Callable[[Any], Any]) -> Any:
        CLOCK.sleep(APART_S)
        for _ in range(1000):
            try:
                return act(self.theirs.jobs)
            except StoreBusy:
                CLOCK.sleep(APART_S)
        return act(self.theirs.jobs)

    def same(self, ours: Any, theirs: Any, what: Any) -> None:
        self.told.append((what, ours, theirs))
        if ours != theirs:
            earlier = "\n".join(map(str, self.told[-40:]))
            raise AssertionError(f"{what}: memory says {ours}, the store {theirs}, after\n{earlier}")

    def both(self, ours: Any, theirs: Any) -> tuple[Any, Any]:
        answers = self.them(lambda jobs: jobs.act([theirs], deadline()))
        return self.ours.act([ours], deadline())[0], answers[0]

    def in_ours(self, theirs: Sequence[int]) -> list[int]:
        known = {their: our for our, their in self.ids.items()}
        return sorted(known[job] for job in theirs)

    def in_theirs(self, ours: Sequence[int]) -> list[int]:
        return [self.ids[job] for job in ours]

    def which(self, places: Sequence[int] | None) -> list[int] | None:
        known = list(self.ids)
        return None if places is None else list(dict.fromkeys(known[place % len(known)] for place in places if known))

    # -- acts -----------------------------------------------------------------------------------------------------

    @rule(jobs=some_jobs, on_conflict=st.sampled_from([RAISE, RAISE, KEEP, REPLACE]), binary=st.booleans())
    def put(self, jobs: list[dict[str, Any]], on_conflict: str, binary: bool) -> None:
        new = []
        for job in jobs:
            text = f'"job {next(self.numbers)}"'
            new.append(NewJob(text.encode() if binary else text, **job))
        request = Put(self.queue, f"put{next(self.numbers)}", tuple(new), on_conflict)
        self.puts.append(request)
        self.putting(request)

    @rule(place=st.integers(0, 30))
    def put_again(self, place: int) -> None:
        """As after an answer that was lost. (The ids of those that have left meanwhile need not be known any more.)"""
        live = [job.put_id for job in self.shelf.jobs.values() if job.ended is None]
        again = [put for put in self.puts if live.count(put.put_id) == len(put.jobs)]
        if again:
            self.putting(again[place % len(again)])

    def putting(self, request: Put) -> None:
        if self.over:
            return
        ours, theirs = self.both(request, request)
        self.same(type(ours), type(theirs), request)
        if isinstance(ours, PutDone):
            pairs = zip(ours.ids, theirs.ids, strict=True)
            self.same([self.ids.setdefault(our, their) for our, their in pairs], list(theirs.ids), "ids")
        else:
            self.same(ours._replace(id=self.ids[ours.id]), theirs, "the job with the key")

    @rule(n=amounts, limit=limits)
    def take(self, n: int, limit: int) -> None:
        self.taking(Take(self.queue, f"claim{next(self.numbers)}", n, LONG_S, "h", limit))

    @rule(n=amounts, limit=limits)
    def take_and_crash(self, n: int, limit: int) -> None:
        if self.taking(Take(self.queue, f"claim{next(self.numbers)}", n, SHORT_S, "h", limit)):
            CLOCK.sleep(SHORT_S * 1.5)

    @rule(place=st.integers(0, 30))
    def take_again(self, place: int) -> None:
        if self.claims:
            self.taking(self.claims[place % len(self.claims)].request._replace(ttl=LONG_S))

    def taking(self, request: Take) -> bool:
        if self.over:
            return False
        if self.anew:
            self.theirs.close()
            self.theirs = type(self).open_store()
        ours, theirs = self.both_take(request)
        if self.over:
            return False
        self.same(type(ours), type(theirs), request)
        if isinstance(ours, Held):
            self.same(round(ours.free_in / LONG_S, 2), round(theirs.free_in / LONG_S, 2), "free_in, in hours")
            return False
        known = {their: our for our, their in self.ids.items()}
        said = [job._replace(id=known[job.id], created_at=0.0) for job in theirs.jobs]
        self.same([job._replace(created_at=0.0) for job in ours.jobs], said, "taken")
        self.claims.append(Claim(request, ours.fencing_token, theirs.fencing_token, tuple(job.id for job in ours.jobs)))
        return True

    def both_take(self, request: Take) -> tuple[Any, Any]:
        return self.both(request, request)

    @rule(
        place=st.integers(0, 30),
        end=st.sampled_from(ENDS),
        delay=st.sampled_from([0.0, 0.0, LONG_S]),
        keep=st.sampled_from([0.0, LONG_S]),
        some=st.integers(0, 3),
        times=st.integers(1, 2),
    )
    def finish(self, place: int, end: str, delay: float, keep: float, some: int, times: int) -> None:
        if not self.claims or self.over:
            return
        claim = self.claims[place % len(self.claims)]
        ids = claim.ids[:some] or claim.ids
        ours = Finish(self.queue, ids, claim.ours, end, NOTES[end])
        ours = ours._replace(delay=delay if end == RETRY else 0.0, keep=keep if end == DONE else 0.0)
        theirs = ours._replace(ids=tuple(self.in_theirs(ids)), fencing_token=claim.theirs)
        for _ in range(times):
            one, other = self.both(ours, theirs)
            self.same(sorted(one.gone), self.in_ours(other.gone), ours)

    @rule(place=st.integers(0, 30))
    def extend(self, place: int) -> None:
        if not self.claims or self.over:
            return
        claim = self.claims[place % len(self.claims)]
        ours = Extend(self.queue, claim.ids, claim.ours, LONG_S)
        one, other = self.both(ours, Extend(self.queue, tuple(self.in_theirs(claim.ids)), claim.theirs, LONG_S))
        self.same(sorted(one.gone), self.in_ours(other.gone), ours)

    @rule(places=some_places, keep=st.sampled_from([0.0, LONG_S]))
    def cancel(self, places: list[int], keep: float) -> None:
        ids = self.which(places)
        if not ids or self.over:
            return
        theirs = self.them(lambda jobs: jobs.cancel(self.queue, self.in_theirs(ids), keep, deadline()))
        ours = self.ours.cancel(self.queue, ids, keep, deadline())
        self.same(sorted(ours), self.in_ours(theirs), "cancelled")

    @rule(places=st.none() | some_places)
    def revive(self, places: list[int] | None) -> None:
        ids = self.which(places)
        if not self.over:
            named = None if ids is None else self.in_theirs(ids)
            theirs = self.them(lambda jobs: jobs.revive(self.queue, named, deadline()))
            self.same(self.ours.revive(self.queue, ids, deadline()), theirs, "revived")

    @rule(places=st.none() | some_places, older_than=st.sampled_from([0.0, LONG_S]))
    def forget(self, places: list[int] | None, older_than: float) -> None:
        ids = self.which(places)
        if not self.over:
            named = None if ids is None else self.in_theirs(ids)
            theirs = self.them(lambda jobs: jobs.forget(self.queue, named, older_than, deadline()))
            self.same(self.ours.forget(self.queue, ids, older_than, deadline()), theirs, "forgotten")

    # -- what is there --------------------------------------------------------------------------------------------

    @invariant()
    def the_same_is_shown(self) -> None:
        if not hasattr(self, "theirs"):
            return
        self.bury()
        if not self.over:
            self.same(self.shown(self.ours), self.them(self.shown), "jobs that are shown")

    def bury(self) -> None:
        """A job whose last claim ran out is dead when a take has found it so, and how far takes look is not said."""
        now = self.shelf.now()
        for our, their in self.ids.items():
            job = self.shelf.jobs.get(our)
            if job is None or not job.max_tries or job.tries < job.max_tries:
                continue
            if job.ended == DEAD or job.state(now) == READY:
                there = self.them(partial(self.find, their))
                if there is not None and there.state == DEAD and job.ended is None:
                    job.error = NO_TRIES_LEFT if job.claim_id is not None else job.error
                    job.end(DEAD, now, 0)
                elif there is not None and there.state == READY and job.ended == DEAD:
                    self.over = True  # not found there yet: its key is still taken, and so on

    def find(self, job: int, jobs: Any) -> StoredJob | None:
        found: StoredJob | None = jobs.find(self.queue, job, deadline())
        return found

    def shown(self, jobs: Any) -> Any:
        known = {our: our for our in self.ids} if jobs is self.ours else {their: our for our, their in self.ids.items()}
        found: list[Any] = []
        for state in STATES:
            some = [
                # (How often it has crashed may be counted when its claim has run out, or when it is claimed again.)
                job._replace(id=known[job.id], crashes=0, fencing_token=0, created_at=0.0, due_at=0.0, ended_at=None)
                for job in jobs.jobs_in(self.queue, state, 100, deadline())
            ]
            some = [job._replace(expires_at=None, holder=job.holder if state == CLAIMED else None) for job in some]
            found += some if self.ordered else sorted(some, key=lambda job: job.id)
        depths = jobs.depths(self.queue, self.queue + "~", deadline())
        return found, [depth._replace(oldest_s=0.0) for depth in depths]


class LaxComparison(JobComparison):
    """The same for a store whose takes may find fewer than they asked for, and look on where the last one ended.

    What it takes may be taken, at least; and it takes something before long where something may be.
    """

    anew = False

    def both_take(self, request: Take) -> tuple[Any, Any]:
        for _ in range(6):
            (theirs,) = self.them(lambda jobs: jobs.act([request], deadline()))
            now = self.shelf.now()
            if any(job.claim_id == request.claim_id and job.state(now) == CLAIMED for job in self.shelf.jobs.values()):
                return self.ours.act([request], deadline())[0], theirs
            self.bury()
            if self.over or isinstance(theirs, Taken):
                return (None if self.over else self.took(request, theirs, now)), theirs
            if not any(self.may_be_taken(job, request, (), now) for job in self.ours._live(self.queue)):
                # (When it is to look again may be told too early, never too late.)
                ours = self.ours.act([request], deadline())[0]
                assert isinstance(ours, Held)
                return (ours if theirs.free_in > ours.free_in + 1 else theirs), theirs
            self.told.append((request, "found nothing"))
            CLOCK.sleep(LOOK_BACK_S * 1.1)
        raise AssertionError(
            "it finds nothing, although something may be taken, after\n" + "\n".join(map(str, self.told))
        )

    def may_be_taken(self, job: Job, request: Take, beside: Sequence[Job], now: float) -> bool:
        tries_left = not job.max_tries or job.tries < job.max_tries
        return job.state(now) == READY and tries_left and self.ours._has_its_turn(job, request.group_limit, beside, now)

    def took(self, request: Take, theirs: Taken, now: float) -> Taken:
        """Have the memory store take the same, if that may be."""
        known = {their: our for our, their in self.ids.items()}
        taken: list[Job] = []
        for told in theirs.jobs:
            job = self.shelf.jobs[known[told.id]]
            self.same(True, self.may_be_taken(job, request, taken, now), (request, "may be taken", told))
            taken.append(job)
        for job in taken:
            job.crashes += job.claim_id is not None
        self.same(True, len(taken) == 1 or all(job.crashes < CRASHES_MAX for job in taken), (request, "alone", theirs))
        self.same(True, len(taken) <= request.n, (request, "as many", theirs))
        token = max(job.fencing_token for job in taken) + 1
        for job in taken:
            job.tries += 1
            job.fencing_token, job.claim_id, job.holder = token, request.claim_id, request.holder
            job.claimed_at, job.expires_at = now, now + request.ttl
        return self.ours._taken(taken)


class UnorderedComparison(LaxComparison):
    """The same where what is replaced by a put is due some microseconds after what is new in it."""

    ordered = False


def compare(kind: type[JobComparison], url: str, examples: int) -> None:
    address = locate(url)[0]
    run_state_machine_as_test(
        type("Comparison", (kind,), {"open_store": staticmethod(address.open)}),
        settings=settings(
            max_examples=examples, stateful_step_count=30, suppress_health_check=list(HealthCheck), deadline=None
        ),
    )


@pytest.mark.parametrize("anew", [True, False])
def test_sqlite_keeps_queues_as_memory_does(anew: bool, sqlite_url: str) -> None:
    """The SQLite store gives the memory store's outcomes about jobs, and shows the same ones, whatever is asked."""
    compare(type("Kind", (JobComparison,), {"anew": anew}), sqlite_url, 50)


def test_redis_keeps_queues_as_memory_does(redis_url: str) -> None:
    """The Redis store gives the memory store's outcomes about jobs, and shows the same ones, whatever is asked."""
    compare(type("Kind", (JobComparison,), {"anew": False}), redis_url, 40)


def test_postgresql_keeps_queues_as_memory_does(postgres_url: str) -> None:
    """The PostgreSQL store takes only what may be taken, and gives the memory store's other outcomes about jobs."""
    compare(LaxComparison, postgres_url, 40)


def test_mysql_keeps_queues_as_memory_does(mysql_url: str) -> None:
    """The MySQL store takes only what may be taken, and gives the memory store's other outcomes about jobs."""
    compare(UnorderedComparison, mysql_url, 40)
