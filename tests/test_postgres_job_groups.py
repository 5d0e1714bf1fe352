"""Takes with a limit on groups on PostgreSQL: what is behind long groups, what joins a group late, takers at once."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import Event
from typing import Any

import psycopg
import pytest

from dibs.connecting import locate
from dibs.jobs import BACK, DEAD, LOOK_BACK_S, RETRY, Finished, NewJob, PutDone, Taken
from dibs.store import Held
from dibs.stores import postgres_jobs_flights, postgres_jobs_places, postgres_jobs_turns
from dibs.testing.case import together
from tests.job_queues import JobQueue, finishing, ids
from tests.planned import check_plans
from tests.waits import eventually, soon

LOOK_MAX = 3
NOTES = "SELECT id FROM dibs_lease_job_turn ORDER BY id"


@contextmanager
def queue_at(url: str) -> Iterator[JobQueue]:
    queue = JobQueue(locate(url)[0].open())
    try:
        yield queue
    finally:
        queue.store.close()


@pytest.fixture
def queue(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobQueue]:
    """A queue whose takes examine no more than three jobs in their order."""
    monkeypatch.setattr(postgres_jobs_turns, "LOOK_FIRST", 1)
    monkeypatch.setattr(postgres_jobs_turns, "LOOK_MAX", LOOK_MAX)
    with queue_at(postgres_url) as queue:
        yield queue


@pytest.fixture
def other(postgres_url: str) -> Iterator[JobQueue]:
    with queue_at(postgres_url) as other:
        yield other


def of(group: str | None, *names: str, **fields: Any) -> list[NewJob]:
    return [NewJob(name, group=group, **fields) for name in names]


def payloads(taken: Any) -> list[Any]:
    return [job.payload for job in taken.jobs] if isinstance(taken, Taken) else []


# -- behind long groups -----------------------------------------------------------------------------------------------


def test_other_groups_are_found_behind_a_busy_one(queue: JobQueue, other: JobQueue) -> None:
    """However many jobs of a busy group come first, the first of other groups are taken, in the order of claims."""
    queue.put(*of("long", *"0123456789"))
    first = queue.take(10, group_limit=1)
    assert payloads(first) == ["0"]
    queue.put(
        *of("b", "b1", "b2"), *of("a", "a1"), *of("c", "c1"), *of("c", "c2", priority=7), *of("d", "d1", priority=7)
    )
    assert [payloads(other.take(2, group_limit=1)) for _ in range(3)] == [["d1"], ["b1", "a1"], ["c1"]]
    assert isinstance(other.take(10, group_limit=1), Held)
    assert isinstance(queue.take(10, group_limit=1), Held)
    assert queue.one(finishing(first)) == Finished()
    assert payloads(other.take(10, group_limit=1)) == ["1"]


def test_with_a_greater_limit(queue: JobQueue, other: JobQueue) -> None:
    """As many of each group as the limit says are found, wherever they are, one take after the other."""
    queue.put(*of("long", *"0123456789"), *of("b", "b1", "b2", "b3", "b4"))
    had = [payloads(queue.take(2, group_limit=3)) for _ in range(2)]
    assert had == [["0", "1"], ["2"]]
    assert [payloads(other.take(2, group_limit=3)) for _ in range(3)] == [["b1", "b2"], ["b3"], []]
    assert isinstance(queue.take(10, group_limit=2), Held)
    assert payloads(queue.take(10, group_limit=4)) == ["3"]
    assert payloads(other.take(10, group_limit=4)) == ["b4"]


def test_jobs_without_a_group_are_found_behind_a_busy_one(queue: JobQueue, other: JobQueue) -> None:
    """They are found at once by who has not looked yet, and by everybody else with the next look at everything."""
    queue.put(*of("long", *"0123456789"))
    assert payloads(queue.take(10, group_limit=1)) == ["0"]
    assert isinstance(queue.take(10, group_limit=1), Held)
    queue.put(*of(None, "u1", "u2", "u3"), *of("b", "b1"))
    assert payloads(other.take(3, group_limit=1)) == ["u1", "u2", "u3"]
    queue.put(*of(None, "u4"), *of(None, "u5", priority=1))
    had: list[Any] = []

    def takes() -> bool:
        had.extend(payloads(queue.take(10, group_limit=1)))
        return len(had) == 3

    eventually(takes, f"all but {had} is never taken")
    assert sorted(had) == ["b1", "u4", "u5"]


def test_who_finds_nothing_is_told_when_to_look_at_everything(queue: JobQueue) -> None:
    """Among many jobs it is not known what is next; the answer is when the next look at all of them is due."""
    queue.put(*of("long", *"0123456789"))
    queue.take(1, group_limit=1)
    for _ in range(3):
        held = queue.take(1, group_limit=1)
        assert isinstance(held, Held)
        assert 0 < held.free_in <= LOOK_BACK_S


def test_the_next_of_a_group_is_found_where_looking_back_takes_long(
    queue: JobQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the first of a group has ended, the next is found by the group, wherever takes have got to in the order."""
    monkeypatch.setattr(postgres_jobs_places, "LOOK_CHEAP_S", -1.0)
    monkeypatch.setattr(postgres_jobs_places, "LOOK_BACK_S", 3600.0)
    queue.put(*of("long", "0", "1"), *of("b", "b1"))
    first = queue.take(1, group_limit=1)
    assert payloads(first) == ["0"]
    assert payloads(queue.take(1, group_limit=1)) == ["b1"]
    assert queue.one(finishing(first)) == Finished()
    assert payloads(queue.take(1, group_limit=1)) == ["1"]


def test_a_first_job_that_waits_keeps_its_group_waiting(queue: JobQueue) -> None:
    """While the first of a group is not due, or waits for its next try, no other of it is taken, and others are."""
    queue.put(*of("late", "0", delay=3600), *of("late", *"123456789"), *of("b", "b1"))
    failed = queue.take(10, group_limit=1)
    assert payloads(failed) == ["b1"]
    queue.put(*of("b", *"23456789", priority=1), *of("c", "c1", "c2"))
    assert queue.one(finishing(failed, RETRY, delay=3600.0, note="e")) == Finished()
    assert payloads(queue.take(10, group_limit=1)) == ["c1"]
    assert isinstance(queue.take(10, group_limit=1), Held)


def test_jobs_without_tries_left_are_buried_behind_a_busy_group(queue: JobQueue) -> None:
    """A first job whose last try ran out is dead when a take comes across it, and the next of its group is taken."""
    queue.put(*of("b", "b1", max_tries=1), *of("b", "b2"))
    spent = queue.take(1, 0.05, group_limit=1)
    queue.put(*of("long", *"0123456789", priority=1))
    assert payloads(queue.take(1, group_limit=1)) == ["0"]
    eventually(lambda: payloads(queue.take(1, group_limit=1)) == ["b2"], "the next is not taken")
    assert queue.payloads(DEAD) == payloads(spent)


# -- what joins a group late ------------------------------------------------------------------------------------------


def test_a_group_counts_what_was_committed_late(queue: JobQueue, other: JobQueue, postgres_url: str) -> None:
    """A job with a smaller id that is committed while its group is at its limit waits for its turn."""
    queue.put("0")
    with psycopg.connect(postgres_url) as connection:
        queue.within(connection, queue.asked(*of("g", "1")))
        queue.put(*of("g", "2"))
        first = queue.take(10, group_limit=1)
        assert payloads(first) == ["0", "2"]
        connection.commit()
    assert isinstance(other.take(10, group_limit=1), Held)
    assert queue.one(finishing(first)) == Finished()
    assert payloads(other.take(10, group_limit=1)) == ["1"]


def test_a_greater_limit_counts_it_too(queue: JobQueue, postgres_url: str) -> None:
    """Of jobs committed late so many may be claimed as the limit leaves beside the later ones that are worked."""
    queue.put("0")
    with psycopg.connect(postgres_url) as connection:
        queue.within(connection, queue.asked(*of("g", *"1234")))
        queue.put(*of("g", *"56789"))
        first = queue.take(3, group_limit=3)
        assert payloads(first) == ["0", "5", "6"]
        connection.commit()
    second = queue.take(10, group_limit=3)
    assert payloads(second) == ["1"]
    assert isinstance(queue.take(10, group_limit=3), Held)
    queue.one(finishing(second))
    third = queue.take(10, group_limit=3)
    assert payloads(third) == ["2"]
    queue.one(finishing(first))
    assert payloads(queue.take(10, group_limit=3)) == ["3", "4"]


def test_takes_of_a_group_wait_for_each_other(
    queue: JobQueue, other: JobQueue, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one take is about to claim a later job of a group, no other takes the earlier one, committed just then."""
    queue.put("0")
    with psycopg.connect(postgres_url) as connection, ThreadPoolExecutor(2) as threads:
        queue.within(connection, queue.asked(*of("g", "1")))
        queue.put(*of("g", "2"))
        claiming, go_on = Event(), Event()
        execute = other.jobs._flights.execute

        def slowly(statements: list[Any], by: Any) -> list[Any]:
            if statements[-1] is not postgres_jobs_flights.COMMIT:
                return list(execute(statements, by))
            results = execute(statements[:-1], by)
            claiming.set()
            assert go_on.wait(10)
            return [*results, *execute(statements[-1:], by)]

        monkeypatch.setattr(other.jobs._flights, "execute", slowly)
        first = threads.submit(other.take, 10, group_limit=1)
        try:
            assert claiming.wait(10)
            connection.commit()
            second = threads.submit(queue.take, 10, group_limit=1)
            time.sleep(0.3)  # for a take that does not wait
        finally:
            go_on.set()
        assert payloads(first.result(10)) == ["0", "2"]
        assert isinstance(second.result(10), Held)


def test_notes_of_claims_that_are_over_go(queue: JobQueue, postgres_url: str) -> None:
    """However its claim ended, the note of a job goes with a later take; that of a claim in force counts and stays."""
    late = queue.put(*of("g", "late", max_tries=1))
    queue.one(finishing(queue.take(1, group_limit=1), DEAD, note="e"))
    queue.put(*of("g", *"0123456789"))
    for end in (DEAD, BACK, RETRY, "done"):
        queue.one(finishing(queue.take(1, group_limit=1), end, **{"note": "e"} if end in (DEAD, RETRY) else {}))
    queue.take(1, 0.05, group_limit=1)
    worked = queue.taken()
    time.sleep(0.1)  # the claim is over
    held = queue.take(1, group_limit=1)
    assert queue.jobs.revive(queue.name, list(late), soon()) == 1
    with psycopg.connect(postgres_url, autocommit=True) as connection:

        def is_left() -> bool:
            assert not payloads(queue.take(1, group_limit=1))
            return [job for (job,) in connection.execute(NOTES).fetchall()] == list(ids(held))

        assert payloads(worked) != payloads(held)
        eventually(is_left, "there are other notes")
    assert queue.one(finishing(held)) == Finished()
    assert ids(queue.take(1, group_limit=1)) == late


def test_a_job_put_into_another_group_leaves_the_first(queue: JobQueue) -> None:
    """When a job was replaced after its claim ran out, it is of its new group, and keeps nobody waiting in the old."""
    first, moved = queue.put(*of("a", "1"), *of("a", "2", key="k"))
    assert ids(queue.take(10, 0.05, group_limit=2)) == (first, moved)
    replaced = queue.asked(*of("b", "3", key="k"), on_conflict="replace")
    eventually(lambda: isinstance(queue.one(replaced), PutDone), "the claim does not run out")
    again = queue.take(10, group_limit=2)
    assert payloads(again) == ["1", "3"]
    assert queue.one(finishing(again, BACK)._replace(ids=(first,))) == Finished()
    eventually(lambda: payloads(queue.take(10, group_limit=1)) == ["1"], "the first is never taken")
    assert ids(again) == (first, moved)


# -- takers at once ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 3])
def test_takers_at_once_keep_to_the_limit(queue: JobQueue, postgres_url: str, limit: int) -> None:
    """Many takers, while jobs come late: each job is worked once, never more of a group than the limit, in order."""
    groups = {f"g{number}": [f"g{number} {job:02}" for job in range(25)] for number in range(4)}
    queue.put(*of(None, "u1"), *[job for group, names in groups.items() for job in of(group, *names)], *of(None, "u2"))
    wanted = {name for names in groups.values() for name in names} | {"u1", "u2", "late g0", "late g1"}
    at_work: Counter[str] = Counter()
    started: list[str] = []
    done: Counter[str] = Counter()
    broken: list[str] = []
    mutex = threading.Lock()

    def work(own: JobQueue) -> None:
        while len(done) < len(wanted):
            taken = own.take(4, group_limit=limit)
            if isinstance(taken, Held):
                time.sleep(min(taken.free_in, 0.01))  # as the store says, before another look
                continue
            with mutex:
                for job in taken.jobs:
                    started.append(str(job.payload))
                    at_work[str(job.group)] += 1
                    if job.group is not None and at_work[job.group] > limit:
                        broken.append(f"{at_work[job.group]} of {job.group} at {job.payload}")
            time.sleep(0.001)  # the work
            with mutex:
                for job in taken.jobs:
                    at_work[str(job.group)] -= 1
                    done[str(job.payload)] += 1
            assert own.one(finishing(taken)) == Finished()

    with ExitStack() as stack:
        late = stack.enter_context(psycopg.connect(postgres_url))
        queue.within(late, queue.asked(*of("g0", "late g0"), *of("g1", "late g1")))
        queue.put(*of("g0", "g0 25"), *of("g1", "g1 25"))
        wanted |= {"g0 25", "g1 25"}
        takers = [stack.enter_context(queue_at(postgres_url)) for _ in range(6)]

        def commit() -> None:
            eventually(lambda: done["g0 05"], "it does not get on", 30)
            late.commit()

        together([partial(work, taker) for taker in takers] + [commit])
    assert not broken
    assert done == Counter(wanted)
    if limit == 1:
        for group, names in groups.items():
            assert [name for name in started if name.startswith(group)] == [
                *names,
                *[f"{group} 25"] * (group in ("g0", "g1")),
            ]


# -- how rows are found -----------------------------------------------------------------------------------------------


def test_takes_by_groups_planned_on_an_empty_table_serve_a_full_one(queue: JobQueue, postgres_url: str) -> None:
    """What is before a job, or noted, is found by the group, and a job by its id, whatever the plan was made for."""
    queue.put("1")
    queue.take(1, group_limit=1)
    stretch = f"'{{0}}', '{{NULL}}', '{{0}}', '{{NULL}}', '{{{2**63 - 1}}}', '{{-100,1}}', '{{-1,100}}'"
    turn = ("Index Cond: ((queue = $1) AND (group_name = j", "Index Cond: (id = l.id)", "Index Cond: (id = t.id)")
    found_by = {
        "TAKE_IN_ORDER": (
            f"'q', 'c', 10, 60, 'h', {stretch}, 1, 500",
            ("((- priority) = r.rank) AND (ROW(due_at, (id + 0)) >", *turn),
        ),
        "TAKE_BY_GROUPS": ("'q', 'c', 10, 60, 'h', 1, 0", ("(group_name > g.name)", "(group_name = g_1.name)", *turn)),
        "CLEAR": ("'q'", ("Index Cond: (id = t.id)",)),
    }
    # (Executed, since a plan does not show all of itself before; the queue is empty.)
    check_plans(postgres_url, ("dibs_lease_job", "dibs_lease_job_turn"), found_by, "(ANALYZE)")


def test_tables_of_an_older_version_are_completed(queue: JobQueue, postgres_url: str) -> None:
    """A take with a limit that finds no table for notes makes it, and so does setting up."""
    queue.put(*of("g", "1", "2"))
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        for complete in (lambda: queue.take(1, group_limit=1), lambda: queue.store.setup(soon())):
            connection.execute("DROP TABLE dibs_lease_job_turn")
            assert not queue.jobs.set_up(soon())
            complete()
            assert queue.jobs.set_up(soon())
    assert isinstance(queue.take(1, group_limit=1), Held)
