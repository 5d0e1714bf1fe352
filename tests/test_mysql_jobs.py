"""Queues on MySQL and MariaDB: crashes of the server and of workers, transactions of the caller's, locks and plans."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

import pytest

from dibs.clock import Deadline
from dibs.connecting import locate
from dibs.errors import InvalidOption, SetupRequired
from dibs.jobs import (
    BACK,
    DEAD,
    DONE,
    KEEP,
    REPLACE,
    RETRY,
    Extend,
    Finished,
    KeyTaken,
    NewJob,
    Put,
    PutDone,
    Take,
)
from dibs.store import Held, RowBusy, StoreBusy
from dibs.stores.mysql import MySQLStore
from dibs.stores.mysql_link import Connection
from dibs.testing.case import within
from tests.callers import KINDS, Caller
from tests.job_queues import NAME, JobQueue, finishing
from tests.mysql_plans import EXPLAIN, Step, steps
from tests.servers.mysql import MariaDBServer
from tests.waits import soon

# What MySQL and MariaDB call one.
DEADLOCK = 1213
DRIVERS = ["pymysql", *(["mysqlclient"] if find_spec("MySQLdb") else [])]
CALLERS = [kind for kind, (fixture, _) in KINDS.items() if fixture == "mysql_url"]


class Queue(JobQueue):
    def __init__(self, url: str) -> None:
        super().__init__(locate(url)[0].open())
        assert isinstance(self.store, MySQLStore)


@pytest.fixture(params=DRIVERS)
def url(mysql: MariaDBServer, request: pytest.FixtureRequest) -> Iterator[str]:
    """A new empty database, through each driver."""
    url = mysql.create_database()
    yield f"{url}?driver={request.param}"
    mysql.drop_database(url)


@pytest.fixture
def queue(url: str) -> Iterator[Queue]:
    queue = Queue(url)
    yield queue
    queue.store.close()


def database_of(url: str) -> str:
    return urlsplit(url).path[1:]


def python(code: str, url: str) -> "subprocess.Popen[str]":
    """A process with what the tests have, and the queue at that URL."""
    start = "import sys\nfrom tests.test_mysql_jobs import *\nqueue = Queue(sys.argv[1])"
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, "-c", f"{start}\n{code}", url], text=True, **pipes)


# -- what dies --------------------------------------------------------------------------------------------------------


def test_nothing_is_lost_with_the_server(own_mysql: MariaDBServer) -> None:
    """What was put, ended and kept is there after the server was killed, each claim too, and tokens go on rising."""
    url = own_mysql.create_database()

    def restarted(queue: Queue) -> Queue:
        queue.store.close()
        own_mysql.kill()
        own_mysql.start()
        return Queue(url)

    queue = Queue(url)
    put = queue.put("1", NewJob("2", key="k"), "3")
    first = queue.taken(1)
    assert queue.one(finishing(first, BACK)) == Finished()
    first = queue.taken(1)
    queue = restarted(queue)
    assert queue.put("4") > put
    assert queue.one(finishing(first, DONE, note='"ok"', keep=60.0)) == Finished()
    rest = queue.taken(10)
    assert [job.payload for job in rest.jobs] == ["2", "3", "4"]
    assert queue.payloads(DONE) == ["1"]
    queue = restarted(queue)
    assert queue.one(finishing(rest)) == Finished()
    assert isinstance(queue.take(), Held)
    queue.store.close()


WORK = """
from dibs.jobs import DONE, Finish, Finished, Taken

print("ready", flush=True)
sys.stdin.readline()
while isinstance(outcome := queue.take(3, 0.3), Taken) or queue.jobs.depths(NAME, NAME + "!", soon())[:1]:
    for job in outcome.jobs if isinstance(outcome, Taken) else ():
        if queue.one(Finish(NAME, (job.id,), outcome.fencing_token, DONE)) == Finished():
            print(job.payload, flush=True)
"""


def test_a_worker_that_is_killed_loses_no_job(url: str, queue: Queue) -> None:
    """Of several worker processes one is killed with jobs in hand: each job is done, and none by two."""
    numbers = [str(number) for number in range(300)]
    queue.put(*numbers)
    workers = [python(WORK, url) for _ in range(3)]
    streams = [(one.stdin, one.stdout) for one in workers if one.stdin and one.stdout]
    for _, out in streams:
        assert out.readline() == "ready\n"
    # The first begins, so that it is not left without a job, and is killed while all are at work.
    done = []
    for stdin, _ in streams:
        stdin.write("go\n")
        stdin.flush()
        done.append(streams[0][1].readline().strip())
    workers[0].kill()
    # (Not communicate(), which forgets what readline() has read ahead.)
    said = [(worker.stdout.read(), worker.stderr.read()) for worker in workers if worker.stdout and worker.stderr]
    for worker in workers:
        with worker:
            worker.wait(30)
    assert [error for _, error in said] == ["", "", ""]
    assert [worker.returncode for worker in workers] == [-signal.SIGKILL, 0, 0]
    done += [number for out, _ in said for number in out.split()]
    # What the killed one had done it may not have said any more: one job.
    assert len(done) == len(set(done)) >= len(numbers) - 1
    assert queue.jobs.depths(NAME, NAME + "!", soon()) == []


def test_a_put_whose_answer_was_lost_is_one_put(queue: Queue, url: str) -> None:
    """It is told by its id, also while the first attempt is still being committed, over another connection."""
    ids = queue.put("1", "2", put_id="p")
    other = Queue(url)
    assert other.put("1", "2", put_id="p") == ids
    # In one call with others that are new.
    new, old = other.jobs.act([Put(NAME, "q", (NewJob("3"),)), Put(NAME, "p", (NewJob("1"), NewJob("2")))], soon())
    assert isinstance(new, PutDone)
    assert old == PutDone(ids)
    taken = queue.taken(1)
    assert queue.one(finishing(taken)) == Finished()
    assert other.put("1", "2", put_id="p") == (0, ids[1])
    assert queue.payloads("ready") == ["2", "3"]
    other.store.close()


def test_what_was_put_stays_put_when_the_call_fails_at_something_else(
    queue: Queue, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call is made again as a whole. What it had put before may have been worked meanwhile, and is not put anew."""

    def busy(*_: object) -> None:
        raise StoreBusy("others are at it")

    claim = Take(NAME, "claim", 1, 30.0, "holder")
    for key in (None, "k"):
        requests = [Put(NAME, f"p-{key}", (NewJob("1", key=key),)), claim]
        with monkeypatch.context() as patch:
            patch.setattr(queue.jobs, "_take", busy)
            with pytest.raises(StoreBusy):
                queue.jobs.act(requests, soon())
        other = Queue(url)
        taken = other.taken()
        assert other.one(finishing(taken)) == Finished()
        put, nothing = queue.jobs.act(requests, soon())
        assert (put, type(nothing)) == (PutDone((taken.jobs[0].id,)), Held)
        other.store.close()


def test_an_extension_is_made_anew_when_its_call_failed_at_another(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made again with the call: what is trusted from then on, the store keeps from then on."""
    queue.put("1")
    taken = queue.taken()
    calls = [Extend(name, (taken.jobs[0].id,), taken.fencing_token, 30.0) for name in (NAME, f"{NAME}-2")]
    extend, made = type(queue.jobs)._extend, list[Extend]()

    def busy(jobs: Any, request: Extend, deadline: Deadline) -> Any:
        if request.name != NAME and len(made) == 1:
            raise StoreBusy("others are at it")
        made.append(request)
        return extend(jobs, request, deadline)

    monkeypatch.setattr(type(queue.jobs), "_extend", busy)
    with pytest.raises(StoreBusy):
        queue.jobs.act(calls, soon())
    queue.jobs.act(calls, soon())
    assert made == [calls[0], *calls]


def test_a_put_waits_for_its_own_first_attempt(queue: Queue, url: str, mysql: MariaDBServer) -> None:
    """While that one is not committed yet, the second one waits, and is then told what the first one put."""
    queue.put("0")
    said: list[Any] = []
    other = Queue(url)
    with closing(mysql.connect(database_of(url))) as connection:
        connection.begin()
        first = queue.within(connection, Put(NAME, "p", (NewJob("1"), NewJob("2"))))
        thread = threading.Thread(target=lambda: said.append(other.put("1", "2", put_id="p")))
        thread.start()
        time.sleep(0.2)  # for the other to wait
        assert not said
        connection.commit()
    thread.join(10)
    assert said == [first.ids]
    assert queue.payloads("ready") == ["0", "1", "2"]
    other.store.close()


# -- locks ------------------------------------------------------------------------------------------------------------


def test_no_two_acts_wait_in_a_circle(url: str, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takers, and whoever ends, extends, gives back and puts at the same time, are never rolled back for each other."""
    assert refused_in_a_crowd(url, queue, monkeypatch, (DONE, BACK, DEAD, DONE)) == []


def test_no_deadlock_reaches_a_worker(url: str, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several jobs that move in the claim order can meet others that end: who was rolled back is not told of it."""
    assert set(refused_in_a_crowd(url, queue, monkeypatch, (DONE, RETRY, BACK, DEAD, DONE))) <= {DEADLOCK}


def refused_in_a_crowd(url: str, queue: Queue, monkeypatch: pytest.MonkeyPatch, ends: tuple[str, ...]) -> list[int]:
    """The server's errors when threads do all there is at once. None comes out of a call."""
    refused: list[int] = []
    refuse = Connection._refuse

    def noted(self: Connection, error: Any) -> Any:
        refused.append(error.code)
        return refuse(self, error)

    queue.put(*map(str, range(500)))
    monkeypatch.setattr(Connection, "_refuse", noted)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            mine = Queue(url)
            for turn in range(30):
                outcome = mine.take(5)
                if isinstance(outcome, Held):
                    continue
                ids = tuple(job.id for job in outcome.jobs)
                mine.one(Extend(NAME, ids, outcome.fencing_token, 60.0))
                assert mine.one(finishing(outcome, ends[(number + turn) % len(ends)])) == Finished()
                mine.one(finishing(outcome, ends[(number + turn) % len(ends)]))  # late
                mine.put(str(turn))
            mine.store.close()
        except BaseException as error:  # noqa: BLE001 - told by the test
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    return refused


def test_a_take_waits_for_nobody(queue: Queue, url: str, mysql: MariaDBServer) -> None:
    """Jobs that somebody has locked, or put and not committed, are passed over at once."""
    ids = queue.put("1", "2", "3")
    with closing(mysql.connect(database_of(url))) as connection, connection.cursor() as cursor:
        connection.begin()
        cursor.execute("SELECT 1 FROM dibs_lease_job WHERE id = %s FOR UPDATE", (ids[1],))
        queue.within(connection, Put(NAME, "p", (NewJob("4", priority=9),)))
        with within(0.9, "somebody was waited for"):
            assert [job.payload for job in queue.taken(10).jobs] == ["1", "3"]
        connection.rollback()


def test_a_take_reads_in_claim_order(queue: Queue, url: str, mysql: MariaDBServer) -> None:
    """Its scan is a range of the primary key, in its order, from where the last one ended to what is due later."""
    queue.put(*map(str, range(300)), *[NewJob("later", delay=3600) for _ in range(300)])
    queue.one(finishing(queue.taken(200)))
    sent: list[str] = []
    execute = queue.store._connection._execute

    def noted(statement: str, deadline: Deadline) -> Any:
        sent.append(statement)
        return execute(statement, deadline)

    queue.store._connection._execute = noted
    queue.one(finishing(queue.taken(10), BACK))  # so that the scan can be repeated
    (scan,) = [statement for statement in sent if "SKIP LOCKED" in statement]
    with closing(mysql.connect(database_of(url))) as connection, connection.cursor() as cursor:
        cursor.execute(EXPLAIN + scan)
        plan = [step for step in steps(cursor.fetchall()) if step.table == "j"]
        assert [(step.how, step.key) for step in plan] == [("range", "PRIMARY")], plan
        assert "filesort" not in plan[0].besides
        cursor.execute("FLUSH STATUS")
        cursor.execute(scan)
        cursor.execute("SHOW SESSION STATUS LIKE 'Handler_read_next'")
        assert int(cursor.fetchall()[0][1]) < 50


@pytest.mark.parametrize("n", [1, 2, 100])
def test_no_act_reads_the_whole_table(queue: Queue, n: int) -> None:
    """Rows are named by a key, whatever the planner thinks of lists: one that is only looked at would be locked."""
    queue.put(*[NewJob("1", key=f"k{number}", max_tries=2) for number in range(n)], *map(str, range(200)))
    plans: list[tuple[str, list[Step]]] = []
    execute = queue.store._connection._execute

    def explained(statement: str, deadline: Deadline) -> Any:
        if statement.startswith(("UPDATE", "DELETE")) or " FOR UPDATE" in statement:
            plans.append((statement[:300], steps(execute(EXPLAIN + statement, deadline).rows)))
        return execute(statement, deadline)

    queue.store._connection._execute = explained
    for end in (BACK, RETRY, DEAD):
        taken = queue.taken(n)
        queue.one(Extend(NAME, tuple(job.id for job in taken.jobs), taken.fencing_token, 60.0))
        assert queue.one(finishing(taken, end, note="e")) == Finished()
    queue.one(finishing(queue.taken(n)))
    queue.put(NewJob("2", key=f"k{n - 1}"), on_conflict=REPLACE)
    queue.jobs.cancel(NAME, [job.id for job in queue.taken(n).jobs], 60.0, soon())
    queue.jobs.revive(NAME, None, soon())
    assert len(plans) >= 20
    # "a" is the document that says which rows.
    for statement, plan in plans:
        assert not [step for step in plan if step.table != "a" and step.how in ("ALL", "index")], (statement, plan)


# -- rights, tables ---------------------------------------------------------------------------------------------------


def test_missing_tables_and_missing_rights(mysql: MariaDBServer, url: str) -> None:
    """Who may not make the tables is told what to do; four rights are enough then, and leases need no queues."""
    database = database_of(url)
    user = f"jobs_{database}"
    mysql.create_user(user)
    mysql.sql(f"GRANT SELECT, INSERT, UPDATE, DELETE ON `{database}`.* TO '{user}'@'127.0.0.1'")
    app = Queue(mysql.url(database, user=user) + "?" + url.partition("?")[2])
    with pytest.raises(SetupRequired, match="dibs setup"):
        app.put("1")
    admin = Queue(url)
    admin.store.setup(soon())
    assert "dibs_lease_job_end" in admin.store.schema()
    app.put("1")
    taken = app.take(group_limit=1)
    assert app.one(finishing(taken, DEAD, note="e")) == Finished()
    assert app.jobs.revive(NAME, None, soon()) == 1
    watch = app.store.watch("address", soon())
    assert NAME in watch.changed([NAME])
    mysql.sql(f"REVOKE ALL ON `{database}`.* FROM '{user}'@'127.0.0.1'")
    mysql.sql(f"GRANT SELECT ON `{database}`.dibs_lease TO '{user}'@'127.0.0.1'")
    app.store.close()
    admin.store.close()


def test_an_empty_queue_is_not_worth_asking(queue: Queue, url: str) -> None:
    """A watch tells of a queue while a job of it is due, and not of one whose group's first is being worked."""
    watching = Queue(url)
    watch = watching.store.watch("address", soon())

    def told() -> bool:
        watch._jobs_at = float("-inf")
        return NAME in watch.changed([NAME, "default:other"])

    assert not told()
    queue.put(NewJob("1", delay=60.0))
    watch._jobs_at = float("-inf")
    assert not told()
    queue.put(NewJob("1", group="g"), NewJob("2", group="g"))
    assert told()
    taken = queue.taken()
    assert not told()
    queue.one(finishing(taken))
    assert told()
    watch.close()


# -- the caller's own transaction -------------------------------------------------------------------------------------


@pytest.fixture(params=CALLERS)
def caller(request: pytest.FixtureRequest, mysql: MariaDBServer) -> Iterator[Caller]:
    """A connection of each kind, in another database of the same server than the queue."""
    url = mysql.create_database()
    caller = KINDS[request.param][1](url)
    caller.run("CREATE TABLE letter (body VARCHAR(100)) ENGINE = InnoDB")
    caller.commit()
    yield caller
    caller.close()
    mysql.drop_database(url)


@pytest.fixture
def here(mysql: MariaDBServer) -> Iterator[Queue]:
    url = mysql.create_database()
    queue = Queue(url)
    yield queue
    queue.store.close()
    mysql.drop_database(url)


def letters(caller: Caller) -> int:
    return int(caller.run("SELECT COUNT(*) FROM letter")[0][0])


def test_a_put_within_a_transaction_follows_it(here: Queue, caller: Caller) -> None:
    """Nothing is there before the commit, nothing after a rollback, and all of it after a commit, once."""
    request = Put(NAME, "p1", tuple(NewJob(f'"{number}:%s"', key=str(number)) for number in range(250)))
    caller.run("INSERT INTO letter VALUES ('dear ada')")
    assert isinstance(here.within(caller.given, request), PutDone)
    assert isinstance(here.take(), Held)
    here.put("other")  # others go on meanwhile
    caller.rollback()
    assert letters(caller) == 0
    assert here.payloads("ready") == ["other"]
    caller.run("INSERT INTO letter VALUES ('dear ada')")
    second = here.within(caller.given, request)
    assert here.within(caller.given, request) == second
    refused = here.within(caller.given, Put(NAME, "p2", (NewJob("new"), NewJob("again", key="7"))))
    assert refused == KeyTaken("7", second.ids[7], False)
    kept = here.within(caller.given, Put(NAME, "p3", (NewJob("kept", key="7"), NewJob("more")), KEEP))
    assert kept.ids[0] == second.ids[7]
    replaced = here.within(caller.given, Put(NAME, "p4", (NewJob("urgent", 9, key="8"),), REPLACE))
    assert replaced.ids == (second.ids[8],)
    caller.commit()
    assert letters(caller) == 1
    expected = [f'"{number}:%s"' for number in range(250) if number != 8]
    assert [job.payload for job in here.taken(1000).jobs] == ["urgent", "other", *expected, "more"]


def test_an_end_within_a_transaction_follows_it(here: Queue, caller: Caller) -> None:
    """Effect and end are one: both are there after a commit, and neither after a rollback."""
    here.put("1", "2")
    taken = here.taken(2)
    every = Finished(tuple(job.id for job in taken.jobs))
    for end in (caller.rollback, caller.commit):
        caller.run("INSERT INTO letter VALUES ('dear ada')")
        assert here.within(caller.given, finishing(taken, DONE, note='"ok"', keep=60.0)) == Finished()
        assert here.within(caller.given, finishing(taken)) == every
        here.put(NewJob("3", delay=60.0))  # nobody waits for more than these two rows
        assert isinstance(here.take(), Held)
        end()
    assert letters(caller) == 1
    assert here.one(finishing(taken)) == every
    assert here.payloads(DONE) == ["2", "1"]


@pytest.mark.parametrize("end", [RETRY, BACK, DEAD])
def test_other_ends_within_a_transaction(here: Queue, caller: Caller, end: str) -> None:
    """A failure, or giving back, within a transaction is as it is outside."""
    here.put("1", NewJob("2", max_tries=1, key="k"))
    taken = here.taken(2)
    assert here.within(caller.given, finishing(taken, end, note="e")) == Finished()
    caller.commit()
    assert here.payloads("ready") == {RETRY: ["1"], BACK: ["1", "2"], DEAD: []}[end]
    assert sorted(here.payloads(DEAD)) == {RETRY: ["2"], BACK: [], DEAD: ["1", "2"]}[end]


def test_a_late_end_within_a_transaction_is_refused(here: Queue, caller: Caller) -> None:
    """A claim that has expired ends nothing there either, whether somebody else has the job or nobody."""
    (job,) = here.put("1")
    old = here.taken(1, 0.05)
    time.sleep(0.06)  # the claim is over
    assert here.within(caller.given, finishing(old)) == Finished((job,))
    caller.commit()
    new = here.taken()
    assert here.within(caller.given, finishing(old)) == Finished((job,))
    assert here.within(caller.given, finishing(new, DEAD, note="e")) == Finished()
    caller.commit()
    assert here.payloads(DEAD) == ["1"]


def test_an_end_in_a_transaction_that_began_before(here: Queue, caller: Caller) -> None:
    """A transaction that reads as of a moment before the job was taken ends it all the same."""
    here.put("0")
    caller.run("SELECT COUNT(*) FROM letter")
    here.put("1")
    taken = here.taken(2)
    assert here.within(caller.given, finishing(taken)) == Finished()
    caller.commit()
    assert isinstance(here.take(), Held)


def test_another_database_is_refused(here: Queue) -> None:
    """A connection to another kind of database cannot be to this one."""
    with pytest.raises(InvalidOption, match="MySQL"):
        here.jobs.within(Put(NAME, "p", (NewJob("1"),)), "sqlite", None, soon())


# -- odd values -------------------------------------------------------------------------------------------------------


def test_jobs_of_any_time(queue: Queue) -> None:
    """A time far before, or after, what the server can keep is the first or last that it can."""
    queue.put(NewJob("past", at=-1e12), NewJob("future", at=1e12), NewJob("never", delay=1e15))
    assert [job.payload for job in queue.taken(10).jobs] == ["past"]
    assert queue.payloads("later") == ["future", "never"] or queue.payloads("later") == ["never", "future"]


def test_busy_is_never_silent(queue: Queue, url: str, mysql: MariaDBServer) -> None:
    """A put whose key somebody has put and not committed is told so at once; the others of the call are carried out."""
    queue.put("0")
    with closing(mysql.connect(database_of(url))) as connection:
        connection.begin()
        queue.within(connection, Put(NAME, "p", (NewJob("1", key="k"),)))
        puts = [Put(NAME, f"q{i}", (NewJob("2", key=key),)) for i, key in enumerate(("k", "l"))]
        locked, done = queue.jobs.act(puts, soon(1.5))
        assert (type(locked), type(done)) == (RowBusy, PutDone)
        connection.rollback()
    queue.put(NewJob("2", key="k"))
