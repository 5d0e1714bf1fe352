"""Queues of every store beside those of the memory store: the same acts have the same outcomes, in whatever sequence.

Long ttls and delays, so that time decides nothing, but for claims that are left to expire, once in an example. The ids
and tokens of a store are its own: jobs are compared by the payload under which they were first put, tokens must rise.
Where a store looks for jobs is not what is tested here (``the order of jobs`` in the conformance cases): it looks at
everything at each take.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from dibs.busy import patiently
from dibs.clock import Deadline, RealClock
from dibs.connecting import locate
from dibs.jobs import (
    BACK,
    CLAIMED,
    DEAD,
    DONE,
    ENDS,
    KEEP,
    ON_CONFLICT,
    REPLACE,
    RETRY,
    STATES,
    Extend,
    Extended,
    Finish,
    Finished,
    KeyTaken,
    NewJob,
    Put,
    PutDone,
    Take,
    Taken,
)
from dibs.store import Held
from dibs.stores import mysql_jobs_take, postgres_jobs_places, sqlite_jobs_turns
from dibs.stores.memory import MemoryStore, Shelf
from tests.waits import eventually, soon

CLOCK = RealClock()
LONG_S = 3600.0
SHORT_S = 0.05
ALL = 100


class Claim(NamedTuple):
    """What a take was told by the memory store and by the other."""

    tokens: tuple[int, int]
    labels: tuple[str, ...]


some_jobs = st.lists(
    st.builds(
        NewJob,
        payload=st.just(""),
        priority=st.sampled_from([0, 0, 0, -3, 7]),
        delay=st.sampled_from([0.0, 0.0, 0.0, LONG_S]),
        at=st.none(),
        key=st.sampled_from([None, None, None, "A", "B", "é"]),
        group=st.sampled_from([None, "g", "g", "h"]),
        max_tries=st.sampled_from([0, 0, 1, 2]),
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda job: job.key or object(),
)
ends: Any = {
    "place": st.integers(0, 4),
    "parts": st.sets(st.integers(0, 4), max_size=3),
    "end": st.sampled_from(ENDS),
    "keep": st.booleans(),
    "later": st.booleans(),
}
which = st.sets(st.integers(0, 9), min_size=1, max_size=4)


class JobComparison(RuleBasedStateMachine):
    """A queue of one store, and of the memory store."""

    open_store: Callable[[], Any]
    serial = itertools.count()

    @initialize(group_limit=st.sampled_from([0, 1, 2]))
    def begin(self, group_limit: int) -> None:
        self.name = f"machine:{next(self.serial)}"
        self.store: Any = type(self).open_store()
        self.sides: tuple[Any, Any] = (MemoryStore(Shelf()).jobs, self.store.jobs)
        self.group_limit = group_limit
        self.numbers = itertools.count(1)
        self.labels: list[str] = []
        #: Of each side: the label of each id, and the other way round.
        self.label_of: tuple[dict[int, str], dict[int, str]] = ({}, {})
        self.id_of: tuple[dict[str, int], dict[str, int]] = ({}, {})
        self.last_token: tuple[dict[str, int], dict[str, int]] = ({}, {})
        self.claims: list[Claim] = []
        self.expired = False

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()

    def both(self, ask: Callable[[int, Any, Deadline], Any]) -> Any:
        """Ask both sides, and compare what they say; the answer."""
        ours, theirs = (self._asked(side, ask) for side in (0, 1))
        assert theirs == ours, f"memory says {ours}, the store {theirs}"
        return ours

    def _asked(self, side: int, ask: Callable[[int, Any, Deadline], Any]) -> Any:
        by = soon()
        return patiently(lambda: ask(side, self.sides[side], by), CLOCK, by.at, lambda: False, lambda error: None)

    def _known(self, side: int, ids: Iterable[int]) -> list[str]:
        return sorted(self.label_of[side].get(job, "?") for job in ids)

    def _ids(self, side: int, labels: Iterable[str]) -> tuple[int, ...]:
        return tuple(self.id_of[side][label] for label in labels)

    def _some(self, places: set[int]) -> list[str]:
        """Some of the jobs that were put last, say."""
        latest = self.labels[::-1]
        return [latest[place] for place in sorted(places) if place < len(latest)]

    # -- acts -----------------------------------------------------------------------------------------------------

    def put_request(self, jobs: list[NewJob], on_conflict: str) -> Put:
        # (In which order a new job stands and one that is replaced by the same put is the store's affair.)
        jobs = jobs[:1] if on_conflict == REPLACE else jobs
        jobs = [job._replace(payload=str(next(self.numbers))) for job in jobs]
        return Put(self.name, f"put-{self.name}-{next(self.numbers)}", tuple(jobs), on_conflict)

    def was_put(self, side: int, put: Put, outcome: Any) -> Any:
        if isinstance(outcome, KeyTaken):
            return "key taken", outcome.key, self.label_of[side][outcome.id], outcome.claimed
        assert isinstance(outcome, PutDone)
        for job, number in zip(put.jobs, outcome.ids, strict=True):
            label = self.label_of[side].setdefault(number, str(job.payload))
            self.id_of[side][label] = number
            if side and label not in self.labels:
                self.labels.append(label)
        return [self.label_of[side][number] for number in outcome.ids]

    @rule(jobs=some_jobs, on_conflict=st.sampled_from(ON_CONFLICT), times=st.sampled_from([1, 1, 2]))
    def put(self, jobs: list[NewJob], on_conflict: str, times: int) -> None:
        """Perhaps sent twice."""
        request = self.put_request(jobs, on_conflict)
        for _ in range(times):
            self.both(lambda side, queue, by: self.was_put(side, request, queue.act([request], by)[0]))

    def take_request(self, n: int, ttl: float = LONG_S) -> Take:
        claim = f"claim-{self.name}-{next(self.numbers)}"
        return Take(self.name, claim, n, ttl, "host/1", self.group_limit)

    def was_taken(self, side: int, outcome: Any, tokens: dict[int, int]) -> Any:
        if isinstance(outcome, Held):
            assert outcome.free_in >= 0
            return ()
        assert isinstance(outcome, Taken)
        labels = [self.label_of[side][job.id] for job in outcome.jobs]
        for label in labels:
            # (The same as before if the take is repeated.)
            assert outcome.fencing_token >= self.last_token[side].get(label, 0)
            self.last_token[side][label] = outcome.fencing_token
        tokens[side] = outcome.fencing_token
        told = [(job.payload, job.tries, job.max_tries, job.key, job.group) for job in outcome.jobs]
        return tuple(zip(labels, told, strict=True))

    def note(self, tokens: dict[int, int], taken: Any) -> None:
        if taken:
            self.claims.append(Claim((tokens[0], tokens[1]), tuple(label for label, _ in taken)))

    @rule(n=st.sampled_from([1, 1, 2, 3, ALL]), times=st.sampled_from([1, 1, 2]), undone=st.booleans())
    def take(self, n: int, times: int, undone: bool) -> None:
        """Perhaps sent twice, and then perhaps asked what there is."""
        request = self.take_request(n)
        tokens: dict[int, int] = {}
        asked = [request] * times + [request._replace(n=0)] * undone
        taken = [self.take_by_both(one, tokens) for one in asked]
        assert all(again == taken[0] for again in taken)
        self.note(tokens, taken[0])

    def take_by_both(self, take: Take, tokens: dict[int, int]) -> Any:
        return self.both(lambda side, queue, by: self.was_taken(side, queue.act([take], by)[0], tokens))

    @rule(n=st.integers(1, 3))
    def take_and_die(self, n: int) -> None:
        """Claims that expire. What has no tries left is dead when a take comes across it, in some stores sooner."""
        if self.expired:
            return
        self.expired = True
        tokens: dict[int, int] = {}
        taken = self.take_by_both(self.take_request(n, SHORT_S), tokens)
        self.note(tokens, taken)
        labels = {label for label, _ in taken}
        eventually(lambda: not any(labels & self._asked(side, self.claimed) for side in (0, 1)), "they do not expire")
        for _ in range(2 + 2 * n):
            take = self.take_request(ALL)
            for side in (0, 1):
                self._asked(side, partial(self.take_and_give_back, take))

    def claimed(self, side: int, queue: Any, by: Deadline) -> set[str]:
        return {self.label_of[side][job.id] for job in queue.jobs_in(self.name, CLAIMED, ALL, by)}

    def take_and_give_back(self, take: Take, side: int, queue: Any, by: Deadline) -> None:
        (taken,) = queue.act([take], by)
        if isinstance(taken, Taken):
            ids = tuple(job.id for job in taken.jobs)
            queue.act([Finish(self.name, ids, taken.fencing_token, BACK)], by)

    def finishes(self, place: int, parts: set[int], end: str, keep: bool, later: bool) -> Callable[[int], list[Finish]]:
        """Of one of the last claims, which may have ended: some of its jobs, or all."""
        if place >= len(self.claims):
            return lambda side: []
        claim = self.claims[-1 - place]
        labels = [label for number, label in enumerate(claim.labels) if number in parts] or list(claim.labels)
        note = {DONE: '"well"' if keep else None, RETRY: "failed", DEAD: "dead", BACK: None}[end]
        times = LONG_S * later if end == RETRY else 0.0, LONG_S * keep if end == DONE else 0.0
        return lambda side: [Finish(self.name, self._ids(side, labels), claim.tokens[side], end, note, *times)]

    def finished(self, side: int, outcome: Any) -> list[str]:
        assert isinstance(outcome, Finished)
        return self._known(side, outcome.gone)

    @rule(times=st.sampled_from([1, 1, 2]), **ends)
    def finish(self, times: int, **how: Any) -> None:
        requests = self.finishes(**how)
        for _ in range(times):
            self.both(
                lambda side, queue, by: [self.finished(side, outcome) for outcome in queue.act(requests(side), by)]
            )

    @rule(place=st.integers(0, 4))
    def extend(self, place: int) -> None:
        if place >= len(self.claims):
            return
        claim = self.claims[-1 - place]

        def ask(side: int, queue: Any, by: Deadline) -> list[str]:
            request = Extend(self.name, self._ids(side, claim.labels), claim.tokens[side], LONG_S)
            (outcome,) = queue.act([request], by)
            assert isinstance(outcome, Extended)
            return self._known(side, outcome.gone)

        self.both(ask)

    @rule(jobs=some_jobs, n=st.integers(1, 3), **ends)
    def all_at_once(self, jobs: list[NewJob], n: int, **how: Any) -> None:
        """An end, a put and a take in one call."""
        put, take, finish = self.put_request(jobs, KEEP), self.take_request(n), self.finishes(**how)
        tokens: dict[int, int] = {}

        def ask(side: int, queue: Any, by: Deadline) -> Any:
            *ended, was_put, was_taken = queue.act([*finish(side), put, take], by)
            new = self.was_put(side, put, was_put)
            return [self.finished(side, one) for one in ended], new, self.was_taken(side, was_taken, tokens)

        self.note(tokens, self.both(ask)[-1])

    # -- operators ------------------------------------------------------------------------------------------------

    @rule(places=which)
    def cancel(self, places: set[int]) -> None:
        labels = self._some(places)
        self.both(lambda side, q, by: self._known(side, q.cancel(self.name, self._ids(side, labels), LONG_S, by)))

    @rule(places=st.none() | which)
    def revive(self, places: set[int] | None) -> None:
        self.both(lambda side, queue, by: queue.revive(self.name, self._chosen(side, places), by))

    @rule(places=st.none() | which)
    def forget(self, places: set[int] | None) -> None:
        self.both(lambda side, queue, by: queue.forget(self.name, self._chosen(side, places), 0.0, by))

    def _chosen(self, side: int, places: set[int] | None) -> tuple[int, ...] | None:
        return None if places is None else self._ids(side, self._some(places))

    # -- what is shown --------------------------------------------------------------------------------------------

    @invariant()
    def the_same_is_shown(self) -> None:
        if hasattr(self, "store"):
            self.both(self._shown)

    def _shown(self, side: int, queue: Any, by: Deadline) -> Any:
        shown = {}
        for state in STATES:
            jobs = [
                (self.label_of[side][job.id], *job[1:6], job.key, job.group, job.error, job.result)
                for job in queue.jobs_in(self.name, state, ALL, by)
            ]
            # (What ends in one call may end at one moment.)
            shown[state] = jobs if state in STATES[:3] else sorted(jobs)
        return shown, [depth[1:5] for depth in queue.depths(self.name, self.name + "!", by)]


@pytest.mark.parametrize("store, examples", [("sqlite", 100), ("postgres", 40), ("mysql", 30), ("redis", 60)])
def test_queues_answer_as_those_in_memory_do(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, store: str, examples: int
) -> None:
    """The outcomes, the order, what is kept and what is shown."""
    for module in (mysql_jobs_take, postgres_jobs_places, sqlite_jobs_turns):
        monkeypatch.setattr(module, "LOOK_BACK_S", 0.0)
        monkeypatch.setattr(module, "LOOK_BACK_PART", 0.0)
    address, _ = locate(request.getfixturevalue(f"{store}_url"))
    run_state_machine_as_test(
        type("JobComparison", (JobComparison,), {"open_store": staticmethod(address.open)}),
        settings=settings(
            max_examples=examples, stateful_step_count=30, suppress_health_check=[HealthCheck.too_slow], deadline=None
        ),
    )
