"""What is particular to queues in Redis: answers as memory's, what is kept, memory, rights, crashes, clusters."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from dibs.clock import Deadline, RealClock
from dibs.connecting import locate
from dibs.jobs import (
    CANCELLED,
    DEAD,
    DONE,
    ENDS,
    ON_CONFLICT,
    STATES,
    Extend,
    Extended,
    Finish,
    Finished,
    JobRequest,
    Jobs,
    JobStore,
    KeyTaken,
    NewJob,
    Put,
    PutDone,
    Take,
    Taken,
)
from dibs.store import Held

ENDED = (DONE, DEAD, CANCELLED)
#: A claim that has expired when the next request is made.
MOMENT_S = 0.001


def soon(seconds: float = 10.0) -> Deadline:
    return Deadline(RealClock(), RealClock.now() + seconds)


@contextmanager
def opened(url: str) -> Iterator[Jobs]:
    store = locate(url)[0].open()
    try:
        yield cast("JobStore", store).jobs
    finally:
        store.close()


@pytest.fixture
def jobs(redis_url: str) -> Iterator[Jobs]:
    with opened(redis_url) as jobs:
        yield jobs


@pytest.fixture
def prefix(redis_url: str) -> str:
    return redis_url.partition("prefix=")[2]


def act(jobs: Jobs, *requests: JobRequest) -> list[Any]:
    return list(jobs.act(requests, soon()))


def put(jobs: Jobs, *new: NewJob | str, name: str = "n:q", put_id: str | None = None) -> list[int]:
    made = tuple(job if isinstance(job, NewJob) else NewJob(job) for job in new)
    (outcome,) = act(jobs, Put(name, put_id or os.urandom(8).hex(), made))
    assert isinstance(outcome, PutDone), outcome
    return list(outcome.ids)


def take(jobs: Jobs, n: int = 1, ttl: float = 60.0, *, name: str = "n:q", group_limit: int = 0) -> Any:
    return act(jobs, Take(name, os.urandom(8).hex(), n, ttl, "h", group_limit))[0]


def finish(jobs: Jobs, taken: Taken, end: str = DONE, name: str = "n:q", **fields: Any) -> Any:
    return act(jobs, Finish(name, ids(taken), taken.fencing_token, end, **fields))[0]


def ids(taken: Taken) -> tuple[int, ...]:
    return tuple(job.id for job in taken.jobs)


# -- the answers ------------------------------------------------------------------------------------------------------


class JobComparison(RuleBasedStateMachine):
    """Redis and memory are asked the same; each knows the jobs by ids of its own."""

    NAMES = ("n:a", "n:b")
    open_redis: Any

    def __init__(self) -> None:
        super().__init__()
        self.stores = [self.open_redis(), locate(f"memory://{os.urandom(8).hex()}")[0].open()]
        self.sides: list[Any] = [store.jobs for store in self.stores]
        run = os.urandom(4).hex()
        self.names = [f"{run}:{name}" for name in self.NAMES]
        #: Ids by side, in the order in which they became known, and claims with both tokens.
        self.known: list[list[int]] = [[], []]
        self.claims: list[tuple[int, str, list[int], list[int]]] = []
        self.count = 0

    def teardown(self) -> None:
        for store in self.stores:
            store.close()

    def place(self, side: int, job: int) -> int:
        if job not in self.known[side]:
            self.known[side].append(job)
        return self.known[side].index(job)

    def both(self, *requests: Sequence[JobRequest]) -> list[Any]:
        """The outcomes of both, which are alike in everything but ids, tokens and times."""
        outcomes = [self.sides[side].act([request], soon())[0] for side, request in enumerate(*requests)]
        seen = [self.plain(side, outcome) for side, outcome in enumerate(outcomes)]
        assert seen[0] == seen[1], f"{requests}: {outcomes}"
        return outcomes

    def plain(self, side: int, outcome: Any) -> Any:
        if isinstance(outcome, (Finished, Extended)):
            return [self.place(side, job) for job in outcome.gone]
        if isinstance(outcome, PutDone):
            return [self.place(side, job) for job in outcome.ids]
        if isinstance(outcome, KeyTaken):
            return outcome.key, self.place(side, outcome.id), outcome.claimed
        if isinstance(outcome, Taken):
            return [(self.place(side, job.id), *job[1:5], *job[6:]) for job in outcome.jobs]
        assert isinstance(outcome, Held)
        return "nothing"

    def fresh(self) -> str:
        self.count += 1
        return f"{self.names[0]}-{self.count}"

    jobs_put = st.lists(
        st.builds(
            NewJob,
            payload=st.sampled_from(["1", '"a b"', b"\x00\xff "]),
            priority=st.sampled_from([0, 0, 0, 7, -3]),
            delay=st.sampled_from([0.0, 0.0, 0.0, 1000.0]),
            at=st.sampled_from([None, None, 5.0]),
            key=st.sampled_from([None, None, "k", "k l", "-", "%20"]),
            max_tries=st.sampled_from([0, 1, 2]),
            group=st.none(),
        )
        | st.builds(
            NewJob,
            payload=st.just("2"),
            priority=st.sampled_from([0, 0, 7]),
            delay=st.just(0.0),
            at=st.none(),
            max_tries=st.just(0),
            key=st.sampled_from([None, None, "k"]),
            group=st.sampled_from(["g", "h i"]),
        ),
        min_size=1,
        max_size=6,
        unique_by=lambda job: job.key if job.key is not None else object(),
    )

    @rule(name=st.sampled_from([0, 0, 1]), new=jobs_put, on_conflict=st.sampled_from(ON_CONFLICT))
    def put(self, name: int, new: list[NewJob], on_conflict: str) -> None:
        request = Put(self.names[name], self.fresh(), tuple(new), on_conflict)
        redis, _ = self.both((request, request))
        claimed = isinstance(redis, KeyTaken)
        again = self.sides[0].act([request], soon())[0]
        assert again == redis or claimed, "repeated"

    @rule(
        name=st.sampled_from([0, 0, 1]),
        n=st.sampled_from([1, 1, 2, 5]),
        limit=st.sampled_from([0, 0, 1, 1, 2]),
        lasts=st.sampled_from([True, True, True, False]),
    )
    def take(self, name: int, n: int, limit: int, lasts: bool) -> None:
        request = Take(self.names[name], self.fresh(), n, 60 if lasts else MOMENT_S, "h o", limit)
        outcomes = self.both((request, request))
        if not lasts:
            time.sleep(3 * MOMENT_S)
        if isinstance(outcomes[0], Taken):
            self.claims.append(
                (
                    name,
                    request.claim_id,
                    [o.fencing_token for o in outcomes],
                    [self.place(0, j) for j in ids(outcomes[0])],
                )
            )
            assert outcomes[0].fencing_token > 0
        else:
            if limit == 0:
                assert outcomes[0].free_in == pytest.approx(outcomes[1].free_in, abs=1)

    @rule(which=st.integers(0, 30), n=st.sampled_from([1, 2]))
    def take_again(self, which: int, n: int) -> None:
        if not self.claims:
            return
        name, claim, _, _ = self.claims[-1 - which % len(self.claims)]
        request = Take(self.names[name], claim, n, 60, "h o")
        outcomes = self.both((request, request))
        if isinstance(outcomes[0], Taken):
            found = [self.place(0, j) for j in ids(outcomes[0])]
            self.claims.append((name, claim, [o.fencing_token for o in outcomes], found))

    @rule(
        which=st.integers(0, 30),
        end=st.sampled_from([*ENDS, "extend"]),
        some=st.sets(st.integers(0, 4)),
        later=st.booleans(),
        note=st.sampled_from([None, '"n o"']),
    )
    def finish(self, which: int, end: str, some: set[int], later: bool, note: str | None) -> None:
        if not self.claims:
            return
        name, _, tokens, places = self.claims[-1 - which % len(self.claims)]
        chosen = [place for index, place in enumerate(places) if index not in some]
        keep = 1000.0 if later else 0.0
        requests: list[JobRequest] = []
        for side in (0, 1):
            jobs = tuple(self.known[side][place] for place in chosen)
            if end == "extend":
                requests.append(Extend(self.names[name], jobs, tokens[side], 60.0))
            else:
                requests.append(Finish(self.names[name], jobs, tokens[side], end, note, keep, keep))
        self.both(requests)

    @rule(name=st.sampled_from([0, 0, 1]), places=st.sets(st.integers(0, 40), max_size=3), keep=st.booleans())
    def cancel(self, name: int, places: set[int], keep: bool) -> None:
        seen = []
        for side in (0, 1):
            chosen = [self.known[side][place] for place in places if place < len(self.known[side])]
            found = self.sides[side].cancel(self.names[name], chosen, 1000.0 * keep, soon())
            seen.append(sorted(self.place(side, job) for job in found))
        assert seen[0] == seen[1]

    @rule(name=st.sampled_from([0, 0, 1]), places=st.none() | st.sets(st.integers(0, 40), max_size=3))
    def revive_or_forget(self, name: int, places: set[int] | None) -> None:
        for verb in ("revive",) if places is None else ("revive", "forget"):
            seen = []
            for side in (0, 1):
                known = self.known[side]
                chosen = None if places is None else [known[place] for place in places if place < len(known)]
                more = (0.0, soon()) if verb == "forget" else (soon(),)
                seen.append(getattr(self.sides[side], verb)(self.names[name], chosen, *more))
            assert seen[0] == seen[1], verb

    @invariant()
    def the_same_is_shown(self) -> None:
        for name in self.names:
            for state in STATES:
                seen = []
                for side in (0, 1):
                    shown = self.sides[side].jobs_in(name, state, 100, soon())
                    seen.append([self.shown(side, job) for job in shown])
                    for job in shown[:1]:
                        assert self.sides[side].find(name, job.id, soon()) is not None
                assert seen[0] == seen[1], f"{name} {state}"
            depths = [self.sides[side].depths(name, name + "\x01", soon()) for side in (0, 1)]
            assert [depth[:5] for depth in depths[0]] == [depth[:5] for depth in depths[1]]
            assert [depth.oldest_s for depth in depths[0]] == pytest.approx([d.oldest_s for d in depths[1]], abs=1)

    def shown(self, side: int, job: Any) -> Any:
        there = (job.fencing_token > 0, job.expires_at is None, job.ended_at is None)
        return self.place(side, job.id), *job[1:7], *job[10:13], job.error is None, job.result, there


def test_redis_answers_on_jobs_as_memory_does(redis_url: str) -> None:
    """The Redis store gives the memory store's outcomes for jobs, and shows the same, whatever is asked."""
    compared = type("Comparison", (JobComparison,), {"open_redis": staticmethod(locate(redis_url)[0].open)})
    run_state_machine_as_test(compared, settings=settings(max_examples=150, stateful_step_count=30))
