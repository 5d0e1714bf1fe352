"""Groups of jobs on MySQL and MariaDB: what is committed late, backlogs behind a busy group, and takers at once."""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import pytest

from dibs.clock import Deadline
from dibs.connecting import locate
from dibs.jobs import BACK, DEAD, REPLACE, RETRY, Finished, NewJob, Take, Taken
from dibs.store import Held
from dibs.stores import mysql_jobs_turns
from dibs.stores.mysql_watch import LOOK_JOBS_MAX
from tests.job_queues import NAME, JobQueue, finishing
from tests.mysql_plans import EXPLAIN, Step, steps
from tests.servers.mysql import MariaDBServer
from tests.waits import soon

# How long a test waits for what must come: a search is left out for a while after one that took long.
PATIENCE_S = 20.0


@pytest.fixture
def url(mysql: MariaDBServer) -> Iterator[str]:
    url = mysql.create_database()
    yield url
    mysql.drop_database(url)


@pytest.fixture
def queue(url: str) -> Iterator[JobQueue]:
    queue = queue_at(url)
    yield queue
    queue.store.close()


@pytest.fixture
def other(url: str) -> Iterator[JobQueue]:
    """The same queue over another connection."""
    queue = queue_at(url)
    yield queue
    queue.store.close()


@pytest.fixture
def short_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a backlog of a few jobs is a deep one."""
    monkeypatch.setattr(mysql_jobs_turns, "LOOK_FIRST", 1)
    monkeypatch.setattr(mysql_jobs_turns, "LOOK_MAX", 3)


def queue_at(url: str) -> JobQueue:
    return JobQueue(locate(url)[0].open())


def connection_to(mysql: MariaDBServer, url: str) -> Any:
    return closing(mysql.connect(urlsplit(url).path[1:]))


def jobs(group: str | None, *payloads: str, **fields: Any) -> list[NewJob]:
    return [NewJob(payload, group=group, **fields) for payload in payloads]


def told(outcome: Any) -> list[Any]:
    """The payloads of what was taken."""
    assert isinstance(outcome, Taken), outcome
    return [job.payload for job in outcome.jobs]


def found(queue: JobQueue, n: int, limit: int = 1) -> Taken:
    """What a worker is given that asks until there is something."""
    give_up = time.monotonic() + PATIENCE_S
    while isinstance(outcome := queue.take(n, group_limit=limit), Held):
        assert time.monotonic() < give_up, "nothing was found"
        time.sleep(0.01)  # before another look
    assert isinstance(outcome, Taken)
    return outcome


# -- what is committed late -------------------------------------------------------------------------------------------


def test_a_group_counts_what_was_committed_late(
    queue: JobQueue, other: JobQueue, url: str, mysql: MariaDBServer
) -> None:
    """A job with a smaller id that is committed while its group is at its limit waits for its turn."""
    queue.put("0")
    with connection_to(mysql, url) as connection:
        connection.begin()
        queue.within(connection, queue.asked(*jobs("g", "1")))
        queue.put(*jobs("g", "2"))
        first = queue.take(10, group_limit=1)
        assert told(first) == ["0", "2"]
        connection.commit()
        queue.put(*jobs("h", "3"))
        assert told(other.take(1, group_limit=1)) == ["3"]  # it keeps no other group waiting
        assert isinstance(other.take(10, group_limit=1), Held)
        assert queue.one(finishing(first)) == Finished()
        assert told(other.take(10, group_limit=1)) == ["1"]


def test_a_group_with_a_greater_limit_counts_them_too(queue: JobQueue, url: str, mysql: MariaDBServer) -> None:
    """Of jobs committed late so many may be claimed as the limit leaves beside the later ones that are worked."""
    queue.put("0")
    with connection_to(mysql, url) as connection:
        connection.begin()
        queue.within(connection, queue.asked(*jobs("g", *"1234")))
        queue.put(*jobs("g", *"56789"))
        first = queue.take(3, group_limit=3)
        assert told(first) == ["0", "5", "6"]
        connection.commit()
        second = queue.take(10, group_limit=3)
        assert told(second) == ["1"]
        assert isinstance(queue.take(10, group_limit=3), Held)
        assert queue.one(finishing(second)) == Finished()
        assert told(queue.take(10, group_limit=3)) == ["2"]
        assert queue.one(finishing(first)) == Finished()
        assert told(queue.take(10, group_limit=3)) == ["3", "4"]


def test_takes_of_a_group_wait_for_each_other(queue: JobQueue, other: JobQueue, url: str, mysql: MariaDBServer) -> None:
    """While one take is about to claim a later job of a group, no other takes the earlier one, committed just then."""
    queue.put("0")
    claiming, go_on = threading.Event(), threading.Event()
    execute = other.store._connection._execute

    def slowly(statement: str, deadline: Deadline) -> Any:
        if statement == "COMMIT":
            claiming.set()
            assert go_on.wait(10)
        return execute(statement, deadline)

    other.store._connection._execute = slowly
    with connection_to(mysql, url) as connection, ThreadPoolExecutor(2) as threads:
        connection.begin()
        queue.within(connection, queue.asked(*jobs("g", "1")))
        queue.put(*jobs("g", "2"))
        first = threads.submit(other.take, 10, group_limit=1)
        try:
            assert claiming.wait(10)
            connection.commit()
            second = threads.submit(queue.take, 10, group_limit=1)
            time.sleep(0.3)  # for a take that does not wait
        finally:
            go_on.set()
        assert told(first.result(10)) == ["0", "2"]
        assert isinstance(second.result(10), Held)


def test_a_take_that_looks_twice(
    queue: JobQueue, url: str, mysql: MariaDBServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is committed while a take looks on for more counts beside what it has chosen already."""
    monkeypatch.setattr(mysql_jobs_turns, "LOOK_FIRST", 0)
    queue.put("0")
    queue.one(finishing(queue.take()))
    execute = queue.store._connection._execute
    looks: list[str] = []
    with connection_to(mysql, url) as connection:
        connection.begin()
        queue.within(connection, queue.asked(*jobs("g", "1")))
        queue.put(*jobs("g", "2", "3"), *jobs("h", "4"))

        def watched(statement: str, deadline: Deadline) -> Any:
            if "AS j WHERE j.job_group IS NULL OR" in statement.replace("\n", " "):
                looks.append(statement)
                if len(looks) == 2:
                    connection.commit()
            return execute(statement, deadline)

        queue.store._connection._execute = watched
        assert told(queue.take(2, group_limit=1)) == ["2", "4"]
    assert len(looks) == 2


def test_a_take_that_sees_a_job_twice(queue: JobQueue, other: JobQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where something comes before what it has looked at already, it looks there again, and counts each job once."""
    monkeypatch.setattr(mysql_jobs_turns, "LOOK_FIRST", 0)
    queue.put(*jobs("a", "a1", "a2", "a3"), *jobs("b", "b1"), *jobs("a", "a4"))
    execute = queue.store._connection._execute
    came: list[tuple[int, ...]] = []

    def watched(statement: str, deadline: Deadline) -> Any:
        if statement.endswith("LIMIT 3, 1") and not came:  # which is the fourth, behind which it looks on
            came.append(other.put(*jobs("z", "urgent", priority=9)))
        return execute(statement, deadline)

    queue.store._connection._execute = watched
    assert told(queue.take(4, group_limit=2)) == ["a1", "a2", "b1"]
    assert came


def test_a_take_without_a_limit_waits_for_no_other(queue: JobQueue, url: str, mysql: MariaDBServer) -> None:
    """Only takes with a limit wait for whoever is taking with one."""
    queue.put("1", "2")
    queue.one(finishing(queue.take(1, group_limit=1)))
    with connection_to(mysql, url) as connection, connection.cursor() as cursor:
        connection.begin()
        cursor.execute("SELECT what FROM dibs_lease_meta WHERE what LIKE 'take%' FOR UPDATE")
        assert len(cursor.fetchall()) == 1
        assert told(queue.take()) == ["2"]  # else it would wait for this very test
        connection.rollback()


def test_a_claim_that_is_being_extended_goes_on(
    queue: JobQueue, other: JobQueue, url: str, mysql: MariaDBServer
) -> None:
    """A claim that seems over counts while somebody has its row locked, who may be about to commit an extension."""
    queue.put("0")
    with connection_to(mysql, url) as late, connection_to(mysql, url) as extending:
        late.begin()
        queue.within(late, queue.asked(*jobs("g", "1")))
        (second,) = queue.put(*jobs("g", "2"))
        assert told(queue.take(10, 0.2, group_limit=1)) == ["0", "2"]
        late.commit()
        extending.begin()
        with extending.cursor() as cursor:
            cursor.execute("SELECT 1 FROM dibs_lease_job WHERE id = %s FOR UPDATE", (second,))
        time.sleep(0.3)  # the claim is over, unless it was extended
        assert told(other.take(10, group_limit=1)) == ["0"]
        extending.rollback()
        assert told(found(other, 10)) == ["1"]


def test_a_job_that_joins_a_group_is_counted(queue: JobQueue, other: JobQueue) -> None:
    """A job that another one replaced may come to a group whose later jobs are being worked."""
    queue.put(NewJob("1", key="k"))
    queue.put(*jobs("g", "2", "3"))
    assert told(queue.take(1, group_limit=1)) == ["1"]
    first = queue.take(10, group_limit=1)
    assert told(first) == ["2"]
    queue.put(NewJob("4", key="l"), *jobs("g", "5"))
    queue.put(NewJob("6", key="l", group="g"), on_conflict=REPLACE)
    assert isinstance(other.take(10, group_limit=1), Held)
    assert queue.one(finishing(first)) == Finished()
    assert told(other.take(10, group_limit=1)) == ["3"]


# -- deep backlogs ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("short_look")
@pytest.mark.parametrize("limit", [1, 3])
def test_others_behind_a_busy_group_are_found(queue: JobQueue, other: JobQueue, limit: int) -> None:
    """In the claim order, whatever the groups are called, and of each group no more than its limit."""
    queue.put(*jobs("m", *map(str, range(20))))
    queue.put(*jobs("z", "z1", "z2", "z3", "z4"), *jobs("b", "b1", "b2", "b3", "b4"))
    busy = queue.take(3, group_limit=limit)
    assert told(busy) == ["0", "1", "2"][:limit]
    first = found(other, 4, limit)
    assert told(first) == {1: ["z1", "b1"], 3: ["z1", "z2", "z3", "b1"]}[limit]
    rest = {1: [], 3: ["b2", "b3"]}[limit]
    if rest:
        assert told(found(other, 4, limit)) == rest
    assert isinstance(other.take(4, group_limit=limit), Held)
    assert queue.one(finishing(busy)) == Finished()
    assert told(found(other, 3, limit)) == ["1", "3", "4", "5"][limit == 3 :][:limit]


@pytest.mark.usefixtures("short_look")
def test_jobs_without_a_group_behind_a_busy_one(queue: JobQueue, other: JobQueue) -> None:
    """They are found, too, in the claim order with what has a group."""
    queue.put(*jobs("m", *map(str, range(20))), "free", *jobs("a", "a1"), "free too")
    assert told(queue.take(1, group_limit=1)) == ["0"]
    assert told(found(other, 10)) == ["free", "a1", "free too"]


@pytest.mark.usefixtures("short_look")
def test_a_first_job_of_a_low_priority(queue: JobQueue) -> None:
    """The order within a group is that of the ids: urgent jobs wait for the first one, and do not hide it."""
    queue.put(*jobs("g", "first", priority=-5), *jobs("g", *map(str, range(6)), priority=9))
    queue.put(*jobs("h", "urgent", priority=20))
    assert told(queue.take(1, group_limit=1)) == ["urgent"]
    for payload in ("first", "0", "1"):
        taken = found(queue, 2)
        assert told(taken) == [payload]
        queue.one(finishing(taken))


@pytest.mark.usefixtures("short_look")
def test_a_first_job_that_is_due_later(queue: JobQueue) -> None:
    """It keeps its followers waiting, however many, and nobody else; when it is due is told."""
    queue.put(*jobs("g", "first", delay=30.0), *jobs("g", *map(str, range(6))), *jobs("h", "1", "2"))
    assert told(found(queue, 10)) == ["1"]
    give_up = time.monotonic() + PATIENCE_S
    # A search that is left out for a while is told, too.
    while (told_in := queue.take(10, group_limit=1).free_in) < 20:
        assert time.monotonic() < give_up
        time.sleep(told_in)  # as the store says
    assert told_in <= 30


@pytest.mark.usefixtures("short_look")
def test_a_job_that_is_tried_again_comes_before_its_followers(queue: JobQueue, other: JobQueue) -> None:
    """It comes last in the claim order, and is found behind all of them."""
    queue.put(*jobs("g", *map(str, range(10))))
    taken = queue.take(1, group_limit=1)
    assert queue.one(finishing(taken, RETRY, delay=0.0, note="e")) == Finished()
    again = found(other, 5)
    assert told(again) == ["0"]
    assert other.one(finishing(again, BACK)) == Finished()
    again = found(other, 5)
    assert told(again) == ["0"]
    assert other.one(finishing(again)) == Finished()
    assert told(found(queue, 5)) == ["1"]


@pytest.mark.usefixtures("short_look")
def test_more_groups_than_one_search_steps_over(
    queue: JobQueue, other: JobQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search goes on where the last one ended, and begins anew at the end: each group has its turn."""
    monkeypatch.setattr(mysql_jobs_turns, "SEARCH_GROUPS_MAX", 2)
    for group in "abcde":
        queue.put(*jobs(group, *[f"{group}{number}" for number in range(4)]))
    assert sorted(told(queue.take(1, group_limit=1)) + told(found(queue, 5))) == ["a0", "b0"]
    had: list[str] = []
    while len(had) < 3:
        had += told(found(other, 1))
    assert sorted(had) == ["c0", "d0", "e0"]
    assert isinstance(queue.take(5, group_limit=1), Held)


def test_a_first_job_without_tries_left(queue: JobQueue, other: JobQueue) -> None:
    """It is buried, and its follower taken, at once."""
    queue.put(*jobs("g", "1", max_tries=1), *jobs("g", "2", max_tries=1), *jobs("g", "3"))
    assert told(queue.take(2, 0.01, group_limit=2)) == ["1", "2"]
    time.sleep(0.02)  # the claim is over
    assert told(other.take(1, group_limit=1)) == ["3"]
    assert sorted(queue.payloads(DEAD)) == ["1", "2"]


def test_a_take_that_is_repeated(queue: JobQueue, other: JobQueue) -> None:
    """It is told the same jobs again, and given no more."""
    queue.put(*jobs("g", *"123"), "4")
    take = Take(NAME, "claim", 2, 60.0, "host/1", 1)
    assert told(queue.one(take)) == ["1", "4"]
    queue.put("5")
    assert told(other.one(take)) == ["1", "4"]


def test_a_take_makes_the_tables(queue: JobQueue) -> None:
    """Also that of the row which it locks, which is no table of jobs."""
    assert isinstance(queue.take(1, group_limit=1), Held)
    queue.put(*jobs("g", "1", "2"))
    assert told(queue.take(10, group_limit=1)) == ["1"]


# -- what it costs ----------------------------------------------------------------------------------------------------


def rows_read(queue: JobQueue) -> int:
    """By its connection, since that was opened."""
    rows = queue.store._connection._execute("SHOW SESSION STATUS LIKE 'Handler_read%'", soon()).rows
    return sum(int(count) for _, count in rows)


def test_a_take_reads_a_bounded_part_of_a_backlog(queue: JobQueue, other: JobQueue, mysql: MariaDBServer) -> None:
    """Whether it finds something or nothing, and also in telling when there will be something."""
    queue.put(*jobs("g", *map(str, range(10_000))))
    other.take(1, group_limit=3)
    # A first job and its turn; then all of them are passed over, their turns looked at, and they are counted. (For the
    # same look MySQL counted 1,002 reads where MariaDB counted 406.)
    look = (10 if mysql.is_mariadb else 15) * mysql_jobs_turns.LOOK_MAX
    for expected, at_most in ((Taken, 300), (Taken, 300), (Held, look)):
        before = rows_read(other)
        outcome = other.take(1, group_limit=3)
        cost = rows_read(other) - before
        assert isinstance(outcome, expected)
        assert cost < at_most


def test_a_watch_reads_a_bounded_part_of_a_backlog(queue: JobQueue, other: JobQueue) -> None:
    """Whether there is something for those who wait, or only what waits for its turn."""
    queue.put(*jobs("g", *map(str, range(5_000))))
    watch = other.store.watch("address", soon())
    ready = []
    for _ in range(2):
        before = rows_read(other)
        ready.append(list(watch.changed([NAME])))
        watch._jobs_at = float("-inf")
        assert rows_read(other) - before < 5 * LOOK_JOBS_MAX
        queue.take(1, group_limit=1)
    assert ready == [[NAME], []]


def test_no_take_with_a_limit_reads_the_whole_table(queue: JobQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each table is read by a key, those that a statement makes for itself apart."""
    monkeypatch.setattr(mysql_jobs_turns, "LOOK_MAX", 30)
    monkeypatch.setattr(mysql_jobs_turns, "SEARCH_SHORT_S", 60)  # also where a search takes long
    queue.put(*jobs("g", *map(str, range(200))), *"12345", *jobs("h", "1", "2"))
    plans: list[tuple[str, list[Step]]] = []
    execute = queue.store._connection._execute

    def explained(statement: str, deadline: Deadline) -> Any:
        if statement.startswith(("SELECT", "UPDATE", "DELETE")):
            plans.append((statement[:300], steps(execute(EXPLAIN + statement, deadline).rows)))
        return execute(statement, deadline)

    queue.store._connection._execute = explained
    for n in (1, 5, 100):
        queue.take(n, group_limit=1)
        queue.take(n, group_limit=3)
    assert isinstance(queue.take(10, group_limit=1), Held)
    assert len(plans) > 30
    assert any("SELECT MIN(g.job_group)" in statement for statement, _ in plans)
    for statement, plan in plans:
        assert not [step for step in plan if step.table == "j" and step.how in ("ALL", "index")], (statement, plan)


# -- many at once -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("short_look")
@pytest.mark.parametrize("limit", [1, 3])
def test_takers_at_once_keep_the_limit(queue: JobQueue, url: str, mysql: MariaDBServer, limit: int) -> None:
    """Of no group more are at work at a time, whoever commits late; each job is done once; nobody is refused."""
    groups, each = "abcd", 12
    queue.put("0")
    queue.one(finishing(queue.take()))
    guard = threading.Lock()
    at_work: Counter[str] = Counter()
    most: dict[str, int] = defaultdict(int)
    done: list[tuple[str, int]] = []
    all_put = threading.Event()

    def put() -> None:
        mine = queue_at(url)
        with connection_to(mysql, url) as late:
            for _ in range(each):
                late.begin()
                mine.within(late, mine.asked(*[NewJob("late", group=group) for group in groups]))
                mine.put(*[NewJob("soon", group=group) for group in groups])
                time.sleep(0.02)  # for the later ones to be taken
                late.commit()
        all_put.set()
        mine.store.close()

    def work() -> None:
        mine = queue_at(url)
        while True:
            last = all_put.is_set()
            outcome = mine.take(2, group_limit=limit)
            if isinstance(outcome, Held):
                with guard:
                    if last and len(done) == 2 * each * len(groups):
                        break
                time.sleep(0.002)  # before another look
                continue
            with guard:
                for job in outcome.jobs:
                    at_work[job.group] += 1
                    most[job.group] = max(most[job.group], at_work[job.group])
            time.sleep(0.003)  # the work
            with guard:
                for job in outcome.jobs:
                    at_work[job.group] -= 1
                    done.append((job.group, job.id))
            assert mine.one(finishing(outcome)) == Finished()
        mine.store.close()

    with ThreadPoolExecutor(7) as threads:
        for future in [threads.submit(put), *[threads.submit(work) for _ in range(6)]]:
            future.result(120)
    assert len(done) == len(set(done)) == 2 * each * len(groups)
    assert max(most.values()) <= limit, most


@pytest.mark.usefixtures("short_look")
def test_takers_at_once_keep_the_order(queue: JobQueue, url: str) -> None:
    """With a limit of 1 the jobs of a group begin in the order in which they were put, one when the last has ended."""
    put: dict[str, list[int]] = defaultdict(list)
    for number in range(20):
        for group in "abc":
            put[group] += queue.put(NewJob(str(number), priority=number % 3, group=group))
    began: dict[str, list[int]] = defaultdict(list)
    guard = threading.Lock()

    def work() -> None:
        mine = queue_at(url)
        while True:
            with guard:
                if sum(map(len, began.values())) == 60:
                    break
            outcome = mine.take(2, group_limit=1)
            if isinstance(outcome, Held):
                time.sleep(0.002)  # before another look
                continue
            with guard:
                for job in outcome.jobs:
                    began[job.group].append(job.id)
            assert mine.one(finishing(outcome)) == Finished()
        mine.store.close()

    with ThreadPoolExecutor(5) as threads:
        for future in [threads.submit(work) for _ in range(5)]:
            future.result(120)
    assert began == put
