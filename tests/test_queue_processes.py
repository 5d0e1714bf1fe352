"""Workers that are real processes: told to stop, killed, stopped for longer than their claims last, without a store."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import dibs
from tests.servers.mysql import MariaDBServer
from tests.servers.postgres import PostgresServer
from tests.servers.redis import RedisServer
from tests.waits import eventually

# What a worker says goes to a journal, a line each, so that whoever kills it loses none of it.
PROLOGUE = """
import asyncio, os, sys, time, dibs
url, journal = sys.argv[1:3]
def say(*words):
    fd = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, (" ".join(map(str, words)) + "\\n").encode())
    os.close(fd)
client = dibs.connect(url, ttl=float(sys.argv[3]))
queue = client.queue("jobs")
"""
THREADS = (
    PROLOGUE
    + """
def work(job):
    say("begun", job.payload)
    end = time.monotonic() + float(sys.argv[4])
    while time.monotonic() < end and not job.lost.is_set():
        time.sleep(0.01)  # the work
    say("lost" if job.lost.is_set() else "worked", job.payload)
say("done", queue.run(work, workers=2, drain_timeout=float(sys.argv[5])))
client.close()
say("closed")
"""
)
TASKS = (
    PROLOGUE
    + """
async def work(job):
    say("begun", job.payload)
    try:
        await asyncio.sleep(float(sys.argv[4]))  # the work
    except asyncio.CancelledError:
        say("lost", job.payload)
        raise
    say("worked", job.payload)
async def main():
    async with dibs.connect_async(url, ttl=float(sys.argv[3])) as client:
        say("done", await client.queue("jobs").run(work, workers=2, drain_timeout=float(sys.argv[5])))
    say("closed")
asyncio.run(main())
"""
)
BLOCK = (
    PROLOGUE
    + """
try:
    with queue.take(3) as batch:
        for job in batch:
            say("begun", job.payload)
            time.sleep(float(sys.argv[4]))  # the work
            say("worked", job.payload)
except KeyboardInterrupt:
    say("interrupted")
    client.close()
    raise
except dibs.LeaseLost:
    say("refused")
say("lost", *[job.payload for job in batch.lost])
"""
)
BY_HAND = (
    PROLOGUE
    + """
batch = queue.take(2)
job, other = batch.won
say("begun", job.payload)
time.sleep(float(sys.argv[4]))  # the work
for what, end in (("job", job.done), ("batch", batch.done)):
    try:
        end()
        say(what, "done")
    except dibs.LeaseLost:
        say(what, "refused")
"""
)

PUTS = (
    PROLOGUE
    + """
number = 0
while True:
    try:
        queue.put(number)
        say("put", number)
    except dibs.StoreUnavailable:
        time.sleep(0.1)  # before another try
    number += 1
    time.sleep(0.01)  # so that there is something to put all the time
"""
)


class Worker:
    """A process that works the queue ``jobs``."""

    def __init__(
        self, code: str, url: str, journal: Path, ttl: float = 5, work_s: float = 0, drain_s: float = 10
    ) -> None:
        self.journal = journal
        self.errors = ""
        arguments = [url, str(journal), str(ttl), str(work_s), str(drain_s)]
        self.process = subprocess.Popen([sys.executable, "-c", code, *arguments], stderr=subprocess.PIPE, text=True)

    def said(self) -> list[str]:
        return self.journal.read_text().splitlines() if self.journal.exists() else []

    def until_said(self, *lines: str) -> None:
        eventually(lambda: set(lines) <= set(self.said()), f"{lines} was not said, but {self.said()}", 20)

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def ended(self) -> int:
        _, self.errors = self.process.communicate(timeout=20)
        print(self.errors)  # for whoever looks at a failure
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "journal"


class Workers:
    """Starts workers, and ends them with the test."""

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._all: list[Worker] = []

    def __call__(
        self, code: str, url: str, ttl: float = 5, work_s: float = 0, drain_s: float = 10, *, own: bool = False
    ) -> Worker:
        """Another one; ``own``: with a journal of its own."""
        journal = self._journal.with_suffix(f".{len(self._all)}") if own else self._journal
        self._all.append(Worker(code, url, journal, ttl, work_s, drain_s))
        return self._all[-1]

    def close(self) -> None:
        for worker in self._all:
            worker.close()


@pytest.fixture
def start(journal: Path) -> Iterator[Workers]:
    workers = Workers(journal)
    yield workers
    workers.close()


@pytest.fixture
def queue(sqlite_url: str) -> Iterator[dibs.Queue]:
    with dibs.connect(sqlite_url, ttl=20) as client:
        yield client.queue("jobs")


def counts(queue: dibs.Queue) -> tuple[int, int, int, int]:
    depth = queue.depth()
    return depth.ready, depth.later, depth.claimed, depth.dead


# -- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("code", [THREADS, TASKS], ids=["threads", "tasks"])
def test_a_worker_that_is_told_to_stop_drains(
    code: str, number: int, queue: dibs.Queue, sqlite_url: str, start: Workers
) -> None:
    """SIGTERM and Ctrl-C: what is in hand is finished, nothing more is taken, and the program goes on to its end."""
    queue.put_many([*"abcdef"])
    worker = start(code, sqlite_url, work_s=0.7)
    worker.until_said("begun a", "begun b")
    worker.send(number)
    assert worker.ended() == 0
    assert sorted(worker.said()) == ["begun a", "begun b", "closed", "done 2", "worked a", "worked b"]
    assert counts(queue) == (4, 0, 0, 0)
    assert [job.tries for job in queue.jobs()] == [0] * 4


@pytest.mark.parametrize("code", [THREADS, TASKS], ids=["threads", "tasks"])
def test_what_does_not_end_in_time_is_given_back(code: str, queue: dibs.Queue, sqlite_url: str, start: Workers) -> None:
    """After the drain time jobs in hand are given back, with no try counted, and whoever works them is told."""
    queue.put_many([*"ab"])
    worker = start(code, sqlite_url, work_s=60, drain_s=0.3)
    worker.until_said("begun a", "begun b")
    worker.send(signal.SIGTERM)
    assert worker.ended() == 0
    assert {"closed", "done 0"} <= set(worker.said())
    assert [(job.state, job.tries) for job in queue.jobs()] == [("ready", 0)] * 2


@pytest.mark.parametrize("code", [THREADS, TASKS], ids=["threads", "tasks"])
def test_a_second_ctrl_c_does_not_wait(code: str, queue: dibs.Queue, sqlite_url: str, start: Workers) -> None:
    """It raises KeyboardInterrupt at once; jobs in hand are given back on the way out."""
    queue.put_many([*"ab"])
    worker = start(code, sqlite_url, work_s=60, drain_s=60)
    worker.until_said("begun a", "begun b")
    worker.send(signal.SIGINT)
    time.sleep(0.7)  # for what must not happen: that it ends
    assert worker.process.poll() is None
    worker.send(signal.SIGINT)
    assert worker.ended() == -signal.SIGINT
    assert [(job.state, job.tries) for job in queue.jobs()] == [("ready", 0)] * 2


def test_ctrl_c_with_a_job_in_hand_gives_it_back(queue: dibs.Queue, sqlite_url: str, start: Workers) -> None:
    """An interrupted block is no failure of its job: that is ready at once for others, and costs no try."""
    queue.put_many([*"abc"])
    worker = start(BLOCK, sqlite_url, work_s=60)
    worker.until_said("begun a")
    worker.send(signal.SIGINT)
    assert worker.ended() == -signal.SIGINT
    assert worker.said() == ["begun a", "interrupted"]
    assert [(job.payload, job.state, job.tries) for job in queue.jobs()] == [(p, "ready", 0) for p in "abc"]


# -- deaths and pauses ------------------------------------------------------------------------------------------------


def test_the_jobs_of_a_killed_worker_are_handed_out_again(queue: dibs.Queue, sqlite_url: str, start: Workers) -> None:
    """By the end of its ttl, with the crash counted; no earlier."""
    queue.put_many([*"ab"])
    worker = start(THREADS, sqlite_url, ttl=1.5, work_s=60)
    worker.until_said("begun a", "begun b")
    worker.send(signal.SIGKILL)
    worker.ended()
    assert len(queue.take(2)) == 0
    before = time.monotonic()
    jobs: list[dibs.Job] = []
    while len(jobs) < 2:
        jobs += queue.take(2, timeout=5).won
    assert 0.1 < time.monotonic() - before < 4
    assert [(job.payload, job.tries, job.crashes) for job in jobs] == [("a", 2, 1), ("b", 2, 1)]
    for job in jobs:
        job.done()


def test_who_was_stopped_for_too_long_is_refused(queue: dibs.Queue, sqlite_url: str, start: Workers) -> None:
    """A worker that sleeps through its claim is refused when it wakes up, before and after others have had the job."""
    ids = queue.put_many([*"ab"])
    worker = start(BY_HAND, sqlite_url, ttl=1, work_s=1)
    worker.until_said("begun a")
    worker.send(signal.SIGSTOP)
    with queue.take(timeout=10) as batch:
        assert [job.id for job in batch] == ids[:1]
    worker.send(signal.SIGCONT)
    assert worker.ended() == 0
    assert worker.said()[1:] == ["job refused", "batch refused"]
    assert counts(queue) == (1, 0, 0, 0)


# -- the store goes away ----------------------------------------------------------------------------------------------


def test_a_locked_file_is_waited_for(queue: dibs.Queue, sqlite_url: str, start: Workers) -> None:
    """While another program keeps the whole file, jobs in hand go on; when it lets go, everything is done, and once."""
    queue.put_many(range(30))
    workers = [start(THREADS, sqlite_url, ttl=10, work_s=0.1) for _ in range(2)]
    workers[0].until_said("begun 3")
    with closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None, timeout=20)) as db:
        db.execute("BEGIN EXCLUSIVE")
        time.sleep(2)  # several tries of everybody's
        db.execute("ROLLBACK")
    eventually(lambda: counts(queue) == (0, 0, 0, 0), "everything is done", 20)
    for worker in workers:
        worker.send(signal.SIGTERM)
    assert [worker.ended() for worker in workers] == [0, 0]
    assert Counter(line for line in workers[0].said() if line.startswith("worked")) == Counter(
        f"worked {number}" for number in range(30)
    )


@pytest.mark.parametrize("code", [THREADS, TASKS], ids=["threads", "tasks"])
def test_a_server_that_is_restarted_is_waited_for(code: str, own_postgres: PostgresServer, start: Workers) -> None:
    """Stopped and started again, or killed, the server forgets no put, no claim and no end, and workers go on."""
    url = own_postgres.create_database()
    with dibs.connect(url, ttl=20) as client:
        queue = client.queue("jobs")
        for first, end in ((0, own_postgres.stop), (30, own_postgres.kill)):
            queue.put_many(range(first, first + 30))
            worker = start(code, url, ttl=20, work_s=0.1)
            worker.until_said(f"begun {first + 3}")
            end()
            time.sleep(0.5)  # while it is away, everybody finds it away
            own_postgres.start()
            eventually(lambda: counts(queue) == (0, 0, 0, 0), "everything is done", 30)
            worker.send(signal.SIGTERM)
            assert worker.ended() == 0
        times = Counter(int(line.split()[1]) for line in worker.said() if line.startswith("worked"))
        assert [times[number] for number in range(60)] == [1] * 60


@pytest.mark.parametrize("kind", ["mysql", "redis"])
def test_a_server_that_is_killed_while_jobs_come_and_go(
    kind: str, request: pytest.FixtureRequest, start: Workers
) -> None:
    """What was put by then, and confirmed, is done, though a worker left meanwhile; nobody makes many words of it."""
    server: MariaDBServer | RedisServer = request.getfixturevalue(f"own_{kind}")
    url = server.create_place() if isinstance(server, RedisServer) else server.create_database()
    with dibs.connect(url, ttl=20) as client:
        queue = client.queue("jobs")
        putting = start(PUTS, url, own=True)
        workers = [start(code, url, ttl=20, work_s=0.02, own=True) for code in (THREADS, TASKS)]
        leaving = start(THREADS, url, ttl=3, work_s=0.02, drain_s=0.1, own=True)
        eventually(lambda: all(worker.said() for worker in (*workers, leaving)), "somebody has nothing to do", 20)
        server.kill()
        leaving.send(signal.SIGTERM)
        assert leaving.ended() == 0
        assert leaving.said()[-1] == "closed"
        server.start()
        before = len(putting.said())
        eventually(lambda: len(putting.said()) > before, "nothing goes on", 20)
        putting.send(signal.SIGTERM)
        eventually(lambda: counts(queue) == (0, 0, 0, 0), "everything is done", 30)
        for worker in workers:
            worker.send(signal.SIGTERM)
        assert [worker.ended() for worker in workers] == [0, 0]
    everybody = [line.split() for worker in (leaving, *workers) for line in worker.said()]
    put = {line.split()[1] for line in putting.said()}
    assert put <= {words[1] for words in everybody if words[0] == "worked"}
    for worker in (leaving, *workers):
        assert "Traceback" not in worker.errors
        assert len(worker.errors.splitlines()) <= 3, worker.errors


@pytest.mark.parametrize(
    "kind, code",
    [("postgres", THREADS), ("mysql", THREADS), ("redis", THREADS), ("redis", TASKS)],
    ids=["postgres", "mysql", "redis", "redis-tasks"],
)
def test_a_worker_that_starts_before_its_server(
    kind: str, code: str, request: pytest.FixtureRequest, start: Workers
) -> None:
    """At boot, or while the server is restarted: it says that the store is away, and works when it is there."""
    server: MariaDBServer | PostgresServer | RedisServer = request.getfixturevalue(f"own_{kind}")
    url = server.create_place() if isinstance(server, RedisServer) else server.create_database()
    with dibs.connect(url) as client:
        client.queue("jobs").put(1)
    server.stop()
    worker = start(code, f"{url}{'&' if '?' in url else '?'}patience=60")
    assert worker.process.stderr is not None
    assert "queue 'jobs': the store is away, trying again: " in worker.process.stderr.readline()
    server.start()
    worker.until_said("worked 1")
    worker.send(signal.SIGTERM)
    assert worker.ended() == 0
    assert "the store is back" in worker.errors
